"""The result of ``compare``: the answer in a few lines, and rows for pairs, calls without a partner and images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hookscope import comparison, statistics
from hookscope.cli.output.report import Report, Section
from hookscope.cli.output.table import MOST_WORDS, Page, wrapped
from hookscope.columns import Row
from hookscope.findings import counted, listed, percent

_IMAGES, _CALLS = 3, 4  # in the words above the table


def comparison_report(
    found: comparison.Comparison, most: int, rank: bool, limits: statistics.LimitsResult | None
) -> Report:
    """The answer, the pairs, and what has no partner, changed class or breaks a limit.

    A table has the ``most`` different pairs. With ``rank`` the pair that adds most comes first.
    """
    order = sorted(found.calls, key=comparison.how_different, reverse=True) if rank else list(found.calls)
    shown = _shown(found, order, most)
    totals = (
        [f"{len(shown)} of {len(order)} pairs; --top N shows more, --format tsv all"] if len(shown) < len(order) else []
    )
    sides = (("a", found.unpaired_a), ("b", found.unpaired_b))
    unpaired = [comparison.UNPAIRED.row(call, side=side) for side, calls in sides for call in calls]
    changed = comparison.CHANGED_IMAGES.rows(found.agreement.changed if found.agreement else ())
    sections = [
        Section([comparison.answer_row(found)], comparison.ANSWER, "answer", in_table=False, in_flat=False),
        Section(
            [comparison.pair_row(pair, found.names) for pair in order],
            comparison.PAIRS,
            "call",
            totals=totals,
            shown=[comparison.pair_row(pair, found.names) for pair in shown],
            for_table=_without_same_name,
        ),
        Section(unpaired, comparison.UNPAIRED, "unpaired_call", in_table=False, in_flat=False),
        Section(changed, comparison.CHANGED_IMAGES, "changed_image", in_table=False, in_flat=False),
    ]
    verdict = ""
    if limits is not None:
        rows = comparison.BROKEN_LIMITS.rows(limits.broken)
        broken = Section(rows, comparison.BROKEN_LIMITS, "broken_limit", in_flat=False, needs_rows=True)
        sections.append(broken)
        verdict = f"limits: {limits.verdict()}"
    note = " ".join(filter(None, ["Note:", found.answer.sentence, verdict]))
    return Report(
        sections,
        totals=[verdict] if verdict else [],
        flat_note=note,
        caption=_caption(found),
        lead=lambda page: _in_words(found, page),
    )


def _shown(
    found: comparison.Comparison, order: Sequence[comparison.PairedCall], most: int
) -> Sequence[comparison.PairedCall]:
    """The input, the first pair that differs, the output, and those that add most, in the given order."""
    if len(order) <= most:
        return order
    named = [found.calls[0], found.calls[-1], *(pair for pair in found.calls if pair.key == found.answer.first)]
    differing = [pair for pair in found.calls if pair.difference is None or not pair.difference.is_same]
    best = dict.fromkeys(pair.key for pair in [*named, *sorted(differing, key=comparison.how_different, reverse=True)])
    chosen = set([*best][:most])
    return [pair for pair in order if pair.key in chosen]


def _without_same_name(row: Row) -> Row:
    """The row of a table: the layer of B only where its name is another."""
    return {**row, "layer_b": row["layer_b"] if row["layer_b"] != row["layer"] else None}


def _caption(found: comparison.Comparison) -> Mapping[str, Any]:
    a, b = ({"model": side.model, "weights": side.weights, "runs": _runs(side)} for side in (found.a, found.b))
    same = {name: value for name, value in a.items() if b[name] == value}
    sides = {
        side: ", ".join(dict.fromkeys(facts[name] for name in facts if name not in same))
        for side, facts in (("A", a), ("B", b))
        if len(same) < len(a)
    }
    prepare = {found.a.preprocess: "preprocess", found.b.preprocess: "preprocess"}
    if len(prepare) > 1:
        prepare = {found.a.preprocess: "preprocess of A", found.b.preprocess: "of B"}
    images = found.names[0] if len(found.names) == 1 else len(found.names)
    about = {name: text for text, name in prepare.items()}
    return {**same, **sides, **about, "image" if len(found.names) == 1 else "images": images}


def _runs(side: comparison.SideFacts) -> str:
    return ", ".join(filter(None, (f"{side.dtype} on {side.device}", side.special)))


def _in_words(found: comparison.Comparison, page: Page) -> Iterator[str]:
    """The answer, where it is, and the agreement."""
    columns, answer = min(MOST_WORDS, page.columns), found.answer
    yield from wrapped(answer.sentence, columns)
    if answer.first:
        yield from wrapped(f"first difference: {answer.first}{_before(found)}{_most(found)}", columns)
    if found.agreement is not None:
        yield from wrapped(_agreement(found.agreement), columns)
    unpaired = [
        f"{counted(len(calls), 'call')} of {side} without a partner: {listed([call.key for call in calls], _CALLS)}"
        for side, calls in (("A", found.unpaired_a), ("B", found.unpaired_b))
        if calls
    ]
    for line in unpaired:
        yield from wrapped(line, columns)
    if answer.advice:
        yield from wrapped(answer.advice, columns)


def _before(found: comparison.Comparison) -> str:
    """How many pairs before the first that differs do not."""
    same = found.answer.same_before
    fine = [pair.key for pair in found.calls if not pair.differs or pair.key == found.answer.first]
    within = fine.index(found.answer.first) - same
    words = [f"{counted(same, 'pair')} the same to the bit"] if same else []
    words += [f"{counted(within, 'pair')} within the noise"] if within else []
    return f", after {' and '.join(words)}" if words else ""


def _most(found: comparison.Comparison) -> str:
    """The pair that adds most, and how much."""
    pair = next((pair for pair in found.calls if pair.key == found.answer.most), None)
    if pair is None:
        return ""
    return f"; adds most: {pair.key}" + (f", {pair.isolated_l2:.2g} alone" if pair.isolated_l2 is not None else "")


def _agreement(agreement: comparison.Agreement) -> str:
    same = agreement.images - len(agreement.changed)
    text = f"top-1 is the same for {same:,} of {counted(agreement.images, 'image')}"
    text += f", and {percent(agreement.top5)} of the five best classes are shared"
    changed = [
        f"{image.name} ({image.class_a} {percent(image.probability_a)} in A,"
        f" {image.class_b} {percent(image.probability_b)} in B)"
        for image in agreement.changed
    ]
    return f"{text}; {listed(changed, _IMAGES)}" if changed else text
