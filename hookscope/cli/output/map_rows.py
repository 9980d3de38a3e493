"""The result of ``cam --compare``: the verdict, a row for each map, over all images and of each image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hookscope import faithfulness
from hookscope.cli.output.report import Report, Section
from hookscope.cli.output.table import MOST_WORDS, wrapped
from hookscope.columns import Column, Columns, Row
from hookscope.findings import counted

_NUMBERS = Columns(
    Column("road"),
    Column("insertion"),
    Column("deletion"),
    Column("drop", need=9),
    Column("increase", need=6, hide="unknown"),
    Column("points", need=7, hide="unknown"),
    Column("in_box", need=8, hide="unknown"),
    Column("randomized", need=10, hide="unknown"),
    Column("passes", need=1),
)
MAPS = Columns(
    Column("image"),
    Column("map", lambda measured: measured.name),
    Column("class", lambda measured: measured.prediction.index, need=3),
    Column("label", lambda measured: measured.prediction.label, need=4, hide="unknown"),
    Column("target", lambda measured: measured.prediction.target or None, need=5, hide="unknown"),
    Column("score", lambda measured: measured.prediction.score, need=2),
    Column("probability", lambda measured: measured.prediction.probability, need=2, hide="unknown"),
    *_NUMBERS,
    Column("weights", where="rows"),
    Column("file"),
)
MEANS = Columns(
    Column("map", lambda scores: scores.name),
    _NUMBERS[0],
    Column("low", lambda scores: scores.interval and scores.interval[0], hide="unknown"),
    Column("high", lambda scores: scores.interval and scores.interval[1], hide="unknown"),
    *_NUMBERS[1:],
    Column("behind_low", lambda scores: scores.behind and scores.behind[0], where="rows"),
    Column("behind_high", lambda scores: scores.behind and scores.behind[1], where="rows"),
    Column("within_noise", where="rows"),
)
VERDICT = Columns("by", "images", "passes", "sentences")


def comparison_report(found: faithfulness.MapComparison, rows: Sequence[Row], caption: Mapping[str, Any]) -> Report:
    """The verdict and the means over images; of one image the table has its rows, the best first."""
    single, order = found.images == 1, [each.name for each in found.maps]
    passes = sum(each.passes for each in found.maps)
    shown = sorted(rows, key=lambda row: order.index(row["map"])) if single else rows
    verdict = {"by": found.by, "images": found.images, "passes": passes, "sentences": found.verdict}
    total = f"{counted(found.images, 'image')}, {counted(len(found.maps), 'map')}: {passes:,} passes to measure them"
    sections = [
        Section([verdict], VERDICT, "verdict", in_table=False, in_flat=False),
        Section(shown, MAPS, "measured_map", in_table=single),
        Section(MEANS.rows(found.maps), MEANS, "map", in_table=not single, in_flat=False),
    ]
    return Report(
        sections,
        totals=[total],
        flat_note=f"Note: {' '.join(found.verdict)}",
        caption=caption,
        lead=lambda page: wrapped(" ".join(found.verdict), min(page.columns, MOST_WORDS)),
    )
