"""``--at SEL WORD``: interventions from the command line, with the images and tensors they read from files."""

from __future__ import annotations

from collections.abc import Sequence
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


def _complete_at(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of layers and words of interventions: click does not say which of the two is being typed."""
    from hookscope.interventions import WORDS

    words = [CompletionItem(word) for word in sorted(WORDS) if word.startswith(incomplete)]
    return complete_layers(ctx, param, incomplete) + words


at_option = click.option(
    "--at",
    "wishes",
    metavar="SEL WORD",
    nargs=2,
    multiple=True,
    shell_complete=_complete_at,
    help="Where (a layer selection or a parameter's name) and what; repeatable, applied in the given order.",
)


@dataclass(frozen=True)
class ModelAndImages:
    """A model and the images it runs on.

    Attributes:
        net: The model.
        read: The images as read.
        pictures: The images as prepared tensors.
        inputs: The inputs of the model.
        types: Class names that indices count.
    """

    net: LoadedModel
    read: Sequence[InputImage]
    pictures: Sequence[Tensor]
    inputs: tuple[Any, ...]
    types: Sequence[str]


@dataclass(frozen=True)
class InterventionOptions:
    """One ``--at``, checked before a model is loaded."""

    where: str
    spec: InterventionSpec

    @classmethod
    def parse(cls, where: str, text: str) -> InterventionOptions:
        """Parse both values.

        Raises:
            UsageError: for an unknown or incomplete intervention.
            SelectionError: for a selection that cannot be read.
        """
        from hookscope.interventions import WORDS, InterventionSpec

        if where.partition(":")[0] in WORDS and text.partition(":")[0] not in WORDS:
            raise UsageError(f"no intervention '{text}'", do=f"the layer comes first: --at {text} {where}")
        Selection(where)
        return cls(where, InterventionSpec.parse(text, one_image=True))


def interventions_of(
    net: LoadedModel, wishes: Sequence[InterventionOptions], types: Sequence[str]
) -> list[tuple[str, Any]]:
    """Build the interventions, with what they read from files.

    Raises:
        ImageError: for an image that cannot be read.
        WeightsError: for a tensor that cannot be read.
    """
    from hookscope.interventions import read_source

    def note(image: InputImage) -> None:
        for text in image.notes:
            output.note(f"Note: {image.name}: {text}")

    sources = (read_source(net, wish.where, wish.spec, types, note) for wish in wishes)
    return [(wish.where, wish.spec.build(source, one_pass=True)) for wish, source in zip(wishes, sources, strict=True)]
