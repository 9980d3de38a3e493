"""The result of ``cam --compare``: the verdict, a row for each map, over all images and of each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hookscope import faithfulness
from hookscope.cli.output.report import Columns, Report, Row, Section, row_of
from hookscope.cli.output.table import MOST_WORDS, wrapped
from hookscope.findings import counted

_NUMBERS = ("road", "insertion", "deletion", "drop", "increase", "points", "in_box", "randomized", "passes")
FIELDS = ("image", "map", "class", "label", "target", "score", "probability", *_NUMBERS, "weights", "file")
MEAN_FIELDS = ("map", "road", "low", "high", *_NUMBERS[1:], "behind_low", "behind_high", "within_noise")
VERDICT_FIELDS = ("by", "images", "passes", "sentences")
_LEAST_NEEDED = (
    {"passes"}, {"score", "probability"}, {"class"}, {"label"}, {"target"}, {"increase"}, {"points"}, {"in_box"},
    {"drop"}, {"randomized"},
)  # fmt: skip


def map_row(measured: faithfulness.Faithfulness, **more: Any) -> Row:
    """The row of one map of one image."""
    answer = measured.prediction
    named = {"map": measured.name, "class": answer.index, "target": answer.target or None}
    return row_of(FIELDS, measured, answer, **named, **more)


def _mean_row(each: faithfulness.MapScores) -> Row:
    low, high = each.interval or (None, None)
    behind_low, behind_high = each.behind or (None, None)
    ends = {"low": low, "high": high, "behind_low": behind_low, "behind_high": behind_high}
    return row_of(MEAN_FIELDS, each, map=each.name, **ends)


def comparison_report(found: faithfulness.MapComparison, rows: Sequence[Row], caption: Mapping[str, Any]) -> Report:
    """The verdict and the means over images; of one image the table has its rows, the best first."""
    single, order = found.images == 1, [each.name for each in found.maps]
    passes = sum(each.passes for each in found.maps)
    shown = sorted(rows, key=lambda row: order.index(row["map"])) if single else rows
    verdict = {"by": found.by, "images": found.images, "passes": passes, "sentences": found.verdict}
    total = f"{counted(found.images, 'image')}, {counted(len(found.maps), 'map')}: {passes:,} passes to measure them"
    known = ("increase", "points", "in_box", "randomized", "label", "target", "probability")
    columns = Columns([name for name in FIELDS if name != "weights"], (), known, least_needed=_LEAST_NEEDED)
    means = [_mean_row(each) for each in found.maps]
    sections = [
        Section([verdict], VERDICT_FIELDS, "verdict", in_table=False, in_flat=False),
        Section(shown, FIELDS, "measured_map", columns=columns, in_table=single),
        Section(
            means,
            MEAN_FIELDS,
            "map",
            columns=Columns(MEAN_FIELDS[:-3], (), (*known, "low", "high"), least_needed=_LEAST_NEEDED),
            in_table=not single,
            in_flat=False,
        ),
    ]
    return Report(
        sections,
        totals=[total],
        flat_note=f"Note: {' '.join(found.verdict)}",
        caption=caption,
        lead=lambda page: wrapped(" ".join(found.verdict), min(page.columns, MOST_WORDS)),
    )
