"""The result of ``compare``: the answer in a few lines, and rows for pairs, calls without a partner and images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hookscope import comparison, statistics
from hookscope.cli.output.report import Columns, Report, Row, Section, row_of
from hookscope.cli.output.table import MOST_WORDS, Page, wrapped
from hookscope.findings import counted, listed, percent

ANSWER_FIELDS = (
    "kind", "sentence", "advice", "first", "most", "same_before", "images", "top1", "top5", "changed", "a", "b",
)  # fmt: skip
FIELDS = (
    "index", "layer", "type", "call", "order", "part", "layer_b", "type_b", "how", "shape", "shape_b", "relative_l2",
    "alone", "noise", "differs", "cosine", "cka", "max_abs", "image", "place", "value_a", "value_b", "values", "equal",
    "nonfinite_a", "nonfinite_b", "dead_a", "dead_b", "parameters", "buffers",
)  # fmt: skip
UNPAIRED_FIELDS = ("side", "index", "layer", "type", "call", "order")
IMAGE_FIELDS = ("image", "class_a", "class_b", "probability_a", "probability_b")
LIMIT_FIELDS = ("limit", "index", "layer", "order", "part", "value", "allowed", "evidence")
_TABLE = (
    "index", "layer", "part", "layer_b", "type", "shape", "relative_l2", "alone", "cosine", "cka", "max_abs",
    "nonfinite_a", "nonfinite_b", "dead_a", "dead_b", "parameters", "buffers",
)  # fmt: skip
_WITH_VALUES = (
    "part",
    "layer_b",
    "nonfinite_a",
    "nonfinite_b",
    "dead_a",
    "dead_b",
    "parameters",
    "buffers",
)
_LEAST_NEEDED = (
    {"index"},
    {"max_abs"},
    {"dead_a", "dead_b"},
    {"shape"},
    {"cosine"},
    {"buffers"},
    {"type"},
    {"cka"},
    {"parameters"},
)
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
    answer = row_of(
        ANSWER_FIELDS,
        found.answer,
        found.agreement,
        images=len(found.names),
        changed=len(found.agreement.changed) if found.agreement else None,
        a=asdict(found.a),
        b=asdict(found.b),
    )
    sections = [
        Section([answer], ANSWER_FIELDS, "answer", in_table=False, in_flat=False),
        Section(
            [_pair_row(pair, found.names) for pair in order],
            FIELDS,
            "call",
            columns=Columns(_TABLE, _WITH_VALUES, ("index", "alone", "cka", "cosine"), least_needed=_LEAST_NEEDED),
            totals=totals,
            shown=[_pair_row(pair, found.names) for pair in shown],
            for_table=_without_same_name,
        ),
        Section(_unpaired_rows(found), UNPAIRED_FIELDS, "unpaired_call", in_table=False, in_flat=False),
        Section(_image_rows(found), IMAGE_FIELDS, "changed_image", in_table=False, in_flat=False),
    ]
    verdict = ""
    if limits is not None:
        rows = [row_of(LIMIT_FIELDS, limit) for limit in limits.broken]
        columns = Columns(LIMIT_FIELDS, ("part",), least_needed=({"index"}, {"allowed"}))
        sections.append(Section(rows, LIMIT_FIELDS, "broken_limit", columns=columns, in_flat=False, needs_rows=True))
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


def _pair_row(pair: comparison.PairedCall, names: Sequence[str]) -> Row:
    largest = pair.difference.largest if pair.difference else None
    values: dict[str, Any] = dict.fromkeys(("max_abs", "image", "place", "value_a", "value_b"))
    if largest is not None:
        image = None if largest.image is None else names[largest.image]
        values = {"max_abs": largest.value, "image": image, "place": largest.place}
        values |= {"value_a": largest.a, "value_b": largest.b}
    return row_of(
        FIELDS,
        pair.a,
        pair,
        pair.difference,
        layer=pair.a.key,
        layer_b=pair.b.key,
        type_b=pair.b.type,
        shape=pair.shape_a,
        differs=pair.differs,
        **values,
    )


def _without_same_name(row: Row) -> Row:
    """The row of a table: the layer of B only where its name is another."""
    return {**row, "layer_b": row["layer_b"] if row["layer_b"] != row["layer"] else None}


def _unpaired_rows(found: comparison.Comparison) -> list[Row]:
    sides = (("a", found.unpaired_a), ("b", found.unpaired_b))
    return [row_of(UNPAIRED_FIELDS, call, side=side, layer=call.key) for side, calls in sides for call in calls]


def _image_rows(found: comparison.Comparison) -> list[Row]:
    changed = found.agreement.changed if found.agreement else ()
    return [row_of(IMAGE_FIELDS, image, image=image.name) for image in changed]


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
    return f"; adds most: {pair.key}" + (f", {pair.alone:.2g} alone" if pair.alone is not None else "")


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
