"""``hookscope intervene --ablate-each``: channels ranked by what they are worth."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from hookscope.cli import output, process
from hookscope.cli.effect_rows import CHANNEL_FIELDS, channel_row
from hookscope.cli.intervening import Subject
from hookscope.cli.options import chosen_format
from hookscope.cli.progress import pass_progress
from hookscope.cli.targeting import categories_of
from hookscope.findings import counted, listed

if TYPE_CHECKING:
    from hookscope.ablation import Ablation

__all__ = ["ablate"]


def ablate(one: Subject, changes: list[tuple[str, Any]], options: Mapping[str, Any]) -> None:
    """Channel after channel, on top of what ``--at`` changes."""
    from hookscope.ablation import ablate_each
    from hookscope.interventions import intervene
    from hookscope.visualize import refusal

    categories = categories_of(one.net, options["categories"])
    with (
        process.prints_to_standard_error(),
        refusal(one.net.name, one.inputs),
        intervene(one.net.model, changes, one.types) if changes else nullcontext(),
        pass_progress() as on_progress,
    ):
        found = ablate_each(
            one.net.model,
            one.inputs,
            options["ablate"],
            options["target"],
            types=one.types,
            categories=categories,
            batch_size=options["batch_size"],
            on_progress=on_progress,
        )
    if found.skipped:
        output.note(
            f"Note: {counted(len(found.skipped), 'call')} without channels left out: {listed(found.skipped, 3)}"
        )
    _report_channels(one, found, options)


def _report_channels(one: Subject, found: Ablation, options: Mapping[str, Any]) -> None:
    shown = found.channels[: options["top"]]
    rows = [channel_row(place, channel, one.net.weights) for place, channel in enumerate(shown, 1)]
    format = chosen_format(options["format"])
    fields = [name for name in CHANNEL_FIELDS if format != "table" or name != "weights"]
    asked = found.prediction
    name = f"{asked.index} {asked.label or ''}".strip()
    lines = [f"{len(shown)} of {counted(len(found.channels), 'channel')}, by what each is worth to the score of {name}"]
    lines += [f"with all of them: {asked.score:.4g}"]
    rows = [{name: row[name] for name in fields} for row in rows]
    output.write_rows(rows, fields, format, process.standard_output(), lines)
