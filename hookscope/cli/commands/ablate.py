"""``hookscope intervene --ablate-each``: channels ranked by what they are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.output.effect_rows import CHANNEL_FIELDS, channel_row
from hookscope.cli.output.table_width import fitting, terminal_columns
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared.class_options import categories_of
from hookscope.cli.shared.intervention_options import ModelAndImages
from hookscope.cli.shared.options import chosen_format
from hookscope.findings import counted, listed

if TYPE_CHECKING:
    from hookscope.interventions import Ablation


def ablate(one: ModelAndImages, changes: list[tuple[str, Any]], options: Mapping[str, Any]) -> None:
    """Channel after channel, on top of what ``--at`` changes."""
    from hookscope.interventions import ablate_each, from_the_start, intervene
    from hookscope.models import model_errors_as_input_errors

    model, categories = one.net.model, categories_of(one.net, options["categories"])
    with ExitStack() as stack:
        stack.enter_context(process.prints_to_standard_error())
        stack.enter_context(model_errors_as_input_errors(one.net.name, one.inputs))
        changes = list(from_the_start(model, one.inputs, changes, one.types, options["seed"]))
        stack.enter_context(intervene(model, changes, one.types))
        on_progress = stack.enter_context(pass_progress())
        found = ablate_each(
            model,
            one.inputs,
            options["ablate"],
            options["target"],
            types=one.types,
            categories=categories,
            batch_size=options["batch_size"],
            on_progress=on_progress,
            seed=options["seed"],
        )
    if found.skipped:
        output.note(
            f"Note: {counted(len(found.skipped), 'call')} without channels left out: {listed(found.skipped, 3)}"
        )
    if found.channels and all(channel.worth == 0 for channel in found.channels):
        also = ", after what --at does" if changes else ""
        output.note(f"Note: the score is the same without any of these channels{also}")
    _report_channels(one, found, categories, options)


def _report_channels(
    one: ModelAndImages, found: Ablation, categories: Sequence[str] | None, options: Mapping[str, Any]
) -> None:
    shown = found.channels[: options["top"]]
    rows = [channel_row(place, channel, categories, one.net.weights) for place, channel in enumerate(shown, 1)]
    format, stream = chosen_format(options["format"]), process.standard_output()
    fields = list(CHANNEL_FIELDS)
    if format == "table":
        usual = {"weights", "score"} | {name for name in ("call", "top_label") if not any(row[name] for row in rows)}
        fields = [name for name in fields if name not in usual]
        fields = fitting(
            rows, fields, [{"score_after"}, {"probability_after"}, {"top_after"}], terminal_columns(stream)
        )
    asked = found.prediction
    name = f"{asked.index} {asked.label or ''}".strip()
    lines = [f"{len(shown)} of {counted(len(found.channels), 'channel')}, by what each is worth to the score of {name}"]
    lines += [f"with all of them: {asked.score:.4g}"]
    output.write_rows([{name: row[name] for name in fields} for row in rows], fields, format, stream, lines)
