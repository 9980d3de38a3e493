"""The places of an inspection: rows for programs, and about ten lines for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hookscope import hooks, inspection
from hookscope.cli.output.report import Section
from hookscope.cli.output.styles import styled
from hookscope.cli.output.table import MOST_WORDS, Page, beside, caption_lines, shortened, wrapped
from hookscope.columns import Column, Columns, Row
from hookscope.errors import printable
from hookscope.findings import counted, numbers_by_severity, percent, severity_counts

PLACES = Columns(
    Column("rank", help="1 for the first place to look at"),
    Column("severity", help="error, warning or note"),
    Column("kind", help="name of the finding, or of another reason to look"),
    Column("layer", help="the layer or the parameter, empty for the input or the whole model"),
    Column("index", help="index, call and order as in list-layers"),
    Column("call"),
    Column("order"),
    Column("channels", help="the channels that the reason is about, the most important first", as_json=True),
    Column("image", help="the image that the reason is about, empty for all"),
    Column("reason", help="why to look there, in one sentence"),
    Column("numbers", help="the numbers of the reason, by name", as_json=True),
    Column("meaning", help="what it means and what to do about it"),
    Column("weights", help="the weights; with random weights the answers mean nothing"),
    Column("file", help="the page"),
)
_MOST_LINES, _LEAST_PLACES = 8, 3  # without the caption
_IMAGES, _CLASSES, _LEAST_SHARE = 3, 3, 0.01  # of the answer


def place_section(found: inspection.Inspection, file: str) -> Section:
    """A row for each place."""
    return Section(list(_rows(found, file)), PLACES)


def _rows(found: inspection.Inspection, file: str) -> Iterator[Row]:
    calls: dict[str, hooks.Call] = {}
    for one in [facts.call for facts in found.calls] + [layer.call for layer in found.layers]:
        calls.setdefault(one.key, one)
        calls.setdefault(one.name, one)  # of a parameter, whose layer may run several times
    for rank, place in enumerate(found.places, 1):
        call = calls.get(place.layer) if place.layer else None
        owner = call or (calls.get(place.layer.rpartition(".")[0]) if "." in place.layer else None)
        yield PLACES.row(
            place,
            owner,
            rank=rank,
            layer=(call.name or hooks.MODEL) if call else place.layer or None,
            image=None if place.image is None else found.images[place.image].name,
            weights=found.weights,
            file=file,
        )


def in_words(found: inspection.Inspection, caption: Mapping[str, Any], page: Page) -> Iterator[str]:
    """The answer for each image, how severe the places are, and the first of them."""
    page = replace(page, columns=min(MOST_WORDS, page.columns))
    # the first line tells of random weights
    named = int(found.is_random and [place.kind for place in found.places[:1]] == ["random-weights"])
    lines, shown = [*_answers(found, page)], named
    if not named or len(found.places) > named:
        lines += _verdict(found.places, page)
    for place in found.places[named:]:
        begin = f"{shown + 1:>2}  {place.severity}  "
        layer = "" if place.layer in place.reason else printable(place.layer)
        where = f"{shortened([layer], page.columns // 2, page.ellipsis)[0]}: " if layer else ""
        more = [*beside(begin, [f"{where}{place.reason}"], len(where), place.severity, page, indent=" " * 4)]
        if shown - named >= _LEAST_PLACES and len(lines) + len(more) > _MOST_LINES:
            break
        shown, lines = shown + 1, [*lines, *more]
    if rest := len(found.places) - shown:
        lines += wrapped(f"{counted(rest, 'more place')} on the page", page.columns, " " * 4)
    yield from [*lines, "", *caption_lines(caption, [], page)]


def _answers(found: inspection.Inspection, page: Page) -> Iterator[str]:
    if found.is_random:
        label = found.weights.replace("random", "RANDOM WEIGHTS", 1)
        text = f"{label}: this network is not trained, and its answers mean nothing; give --weights FILE"
        yield from (styled(line, "error", page.colours) for line in wrapped(text, page.columns))
    for image in found.images[:_IMAGES]:
        name = shortened([printable(image.name)], page.columns // 2, page.ellipsis, are_paths=True)[0]
        yield from wrapped(f"{name}: {_answer(image)}", page.columns, later="  ")
    if (rest := len(found.images) - _IMAGES) > 0:
        yield from wrapped(f"{counted(rest, 'more image')} on the page", page.columns)


def _answer(image: inspection.InspectedImage) -> str:
    best = image.predictions[:_CLASSES]
    if best and math.isnan(best[0].probability):
        return "the scores are NaN"
    seen = [one for one in best if one.probability >= _LEAST_SHARE] or best[:1]
    return ", ".join(f"{one.name} {percent(one.probability)}" for one in seen) or "the model gives no scores of classes"


def _verdict(places: Sequence[inspection.Place], page: Page) -> Iterator[str]:
    severest = next(iter(numbers_by_severity(places)), "note")
    for line in wrapped(severity_counts(places) or "no place stands out", page.columns):
        yield styled(line, severest, page.colours) if severest != "note" else line
