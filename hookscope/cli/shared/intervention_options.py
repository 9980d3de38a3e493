"""``--at SEL WORD``: from what was asked for to interventions, with what they bring in from files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from hookscope.cli.output import rows as output
from hookscope.cli.shared.options import complete_layers
from hookscope.errors import UsageError
from hookscope.hooks import Selection

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.images import InputImage
    from hookscope.interventions import InterventionSpec
    from hookscope.models import LoadedModel

# What an activation is dropped by is silent in eval mode, the mode of every command: here it always acts.
_DEFAULTS = {"when": "always"}


def _complete_at(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of layers, and the words for interventions: click does not tell which of the two is being typed."""
    from hookscope.interventions import WORDS

    words = [CompletionItem(word) for word in WORDS if word.startswith(incomplete)]
    return complete_layers(ctx, param, incomplete) + words


at_option = click.option(
    "--at",
    "wishes",
    metavar="SEL WORD",
    nargs=2,
    multiple=True,
    shell_complete=_complete_at,
    help="Where (a layer selection, or a parameter's name) and what; repeatable, and done in the order given.",
)


@dataclass(frozen=True)
class ModelAndImages:
    """What is run, and on what.

    Attributes:
        net: The model.
        read: The pictures as they were read.
        pictures: As they were prepared.
        inputs: As the model takes them.
        types: Class names that indices count.
    """

    net: LoadedModel
    read: Sequence[InputImage]
    pictures: Sequence[Tensor]
    inputs: tuple[Any, ...]
    types: Sequence[str]


@dataclass(frozen=True)
class InterventionOptions:
    """One ``--at``, judged before a model is loaded."""

    where: str
    word: InterventionSpec

    @classmethod
    def parse(cls, where: str, text: str) -> InterventionOptions:
        """Judge both halves.

        Raises:
            UsageError: for a word that is none, or one that lacks something.
            SelectionError: for a selection that cannot be read.
        """
        from hookscope.interventions import WORDS, InterventionSpec

        if where.partition(":")[0] in WORDS and text.partition(":")[0] not in WORDS:
            raise UsageError(f"no intervention '{text}'", do=f"where comes first: --at {text} {where}")
        Selection(where)
        word = InterventionSpec.parse(text)
        if word.name == "mean" and word.source is None and word.given.get("over") != "positions":
            raise UsageError("the mean over one image is itself", do="give mean:from=FOLDER, or mean:over=positions")
        if word.name == "permute" and word.given.get("axis") == "images":
            raise UsageError("one image has no order", do="permute axis=positions or axis=channels")
        return cls(where, word)


def interventions_of(
    net: LoadedModel, wishes: Sequence[InterventionOptions], types: Sequence[str]
) -> list[tuple[str, Any]]:
    """The interventions, with the pictures and directions they take from files.

    Raises:
        ImageError: for a picture that cannot be read.
        WeightsError: for a direction that cannot be read.
    """
    return [(wish.where, wish.word.build(_source(net, wish, types), **_DEFAULTS)) for wish in wishes]


def _source(net: LoadedModel, wish: InterventionOptions, types: Sequence[str]) -> Any:
    from hookscope.interventions import mean_at, read_direction

    readers: dict[str, Callable[[str], Any]] = {
        "steer": read_direction,
        "patch": lambda path: next(_activations(net, wish, [path], types)),
        "mean": lambda path: mean_at(_activations(net, wish, _pictures(path), types)),
    }
    return None if wish.word.source is None else readers[wish.word.name](wish.word.source)


def _pictures(path: str) -> list[str]:
    from hookscope.images import find_pictures

    return find_pictures([path])


def _activations(
    net: LoadedModel, wish: InterventionOptions, paths: Sequence[str], types: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """What the calls in question put out for each of some pictures."""
    from hookscope.images import read_picture
    from hookscope.interventions import activations_at
    from hookscope.models import model_errors_as_input_errors

    names = [name for name, _ in net.model.named_parameters(remove_duplicate=False)]
    if wish.where in names:
        asked = f"{wish.word.name} takes an activation, and {wish.where} is a parameter"
        raise UsageError(asked, do=f"name its layer: {wish.where.rpartition('.')[0]}")
    for path in paths:
        picture = read_picture(path, frames=net.preprocess.frames)
        for text in picture.notes:
            output.note(f"Note: {picture.name}: {text}")
        tensor = net.prepare(picture)
        with model_errors_as_input_errors(net.name, tensor):
            yield activations_at(net.model, net.inputs(tensor), wish.where, types, wish.word.given.get("on", "output"))
