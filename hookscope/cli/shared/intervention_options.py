"""``--at SEL WORD``: an intervention, parsed before a model is loaded and built afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem

from hookscope import hooks, interventions, models
from hookscope.cli.fields import option
from hookscope.cli.shared.images import with_notes
from hookscope.cli.shared.options import complete_layers, complete_words
from hookscope.errors import UsageError


def _complete_at(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of layers, and words for interventions: click does not say which of the two is being typed."""
    words = complete_words(*sorted(interventions.WORDS))(ctx, param, incomplete)
    return complete_layers(ctx, param, incomplete) + words


def at_option() -> Any:
    return option(
        "Apply the intervention WORD at SEL: a layer selection or the name of a parameter; repeatable.",
        "--at",
        metavar="SEL WORD",
        nargs=2,
        multiple=True,
        parse=lambda pairs: tuple(Change.parse(*pair) for pair in pairs),
        shell_complete=_complete_at,
    )


@dataclass(frozen=True)
class Change:
    """One ``--at``: a layer selection or the name of a parameter, and an intervention."""

    where: hooks.Selection
    spec: interventions.InterventionSpec

    @classmethod
    def parse(cls, where: str, text: str) -> Change:
        words = interventions.WORDS
        if text.startswith("--"):
            asked = f"--at needs a layer and an intervention, but '{text}' is an option"
            raise UsageError(asked, do="such as --at layer3 zero")
        if where.partition(":")[0] in words and text.partition(":")[0] not in words:
            raise UsageError(f"no intervention '{text}'", do=f"the layer comes first: --at {text} {where}")
        return cls(hooks.Selection(where), interventions.InterventionSpec.parse(text, one_image=True))

    def build(self, net: models.LoadedModel, types: Sequence[str] | None) -> Any:
        """The intervention with the images and tensors that it reads from files."""
        source = interventions.read_source(net, str(self.where), self.spec, types, with_notes)
        return self.spec.build(source, one_pass=True)
