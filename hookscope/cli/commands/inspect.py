"""Make one page that says where to look. Start here."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from hookscope import exemplars, hooks, images, inspection, report, scores, statistics, system
from hookscope.cli import process, progress
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Output, Report, Section, note
from hookscope.cli.output.table import MOST_WORDS, Page, beside, caption_lines, shortened, styled, wrapped
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import page_name, refuse_input
from hookscope.cli.shared.picture_run import PictureCommand, write_bytes
from hookscope.cli.shared.subject import ImageFiles, caption_of, with_subject
from hookscope.cli.shared.written import wrote
from hookscope.columns import Column, Columns, Row
from hookscope.display import RowTuple
from hookscope.errors import UsageError, printable
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

_LONG = 60  # seconds
_MOST_IMAGES = 8  # side by side on a page, unless --limit says otherwise


class Inspect(PictureCommand):
    """Make one page of what MODEL answers on each IMAGE, and where to look first.

    \b
    Examples:
      hookscope inspect resnet34 cat.jpg
      hookscope inspect efficientnet-lite0 cat.jpg coffee.jpg --open
      hookscope inspect nets.py:mine photos/ --weights mine.pth --layer 'backbone.*' -o mine.html --max-size 20MB
      hookscope inspect resnet50 cat.jpg --exemplars found/exemplars.json
      hookscope inspect shapes samples/shapes/star.png --format json | jq '.[0].reason'

    This is the command to begin with. The page is one self-contained HTML file. It shows what the model answered, and
    at most twelve places to look at with the reason for each. It also shows the numbers of every call, and the feature
    maps of each layer. Several images share one page: at most 8, or as many as --limit says. IMAGE is a file, a folder,
    a glob, or - for standard input.

    A terminal shows the answer and the first places in about ten lines. Other formats have a row for each place, the
    most important first.

    The exit status does not depend on findings: 0, or 1 if an image cannot be read. `check` ends with 3 when a layer
    breaks a limit.
    """

    fields_told = PLACES
    suffixes = (".html",)

    output: str | None = shared.output_option("page")
    max_size: int = option(
        "Largest size of the page, such as 20MB or 512KiB. A larger page keeps the best channels of each layer.",
        type=shared.size,
        default="50MB",
    )
    exemplars: str | None = shared.in_file(
        "Show the exemplars that hookscope exemplars -o saved in FILE, in the views of their layers."
    )
    reference: str | None = shared.reference_option()
    layers: hooks.Selection | None = shared.calls_option("Calls whose maps are on the page", "0:, every index")
    types: tuple[str, ...] = shared.type_option()
    target: scores.Target = shared.target_option("Class whose score the page explains")
    categories: tuple[str, ...] | None = shared.categories_option()

    def check(self) -> None:
        if self.target.count > 1:
            raise UsageError(f"a page explains one class, got --target {self.target}", do="give one class")
        super().check()

    def run(self) -> int:
        reference = None if self.reference is None else statistics.load_statistics(self.reference)
        net, files, place = self.net, self.files, self.place
        files.groups(net)
        images = files.usable(net.preprocess.frames)
        best = [] if self.exemplars is None else exemplars.read_exemplars_of(self.exemplars, net)
        times: list[float] = []

        def on_progress(done: int, total: int) -> None:
            times.append(time.monotonic())
            if done == 2 and (seconds := (times[1] - times[0]) * total) > _LONG:  # the first image takes longer
                note(f"Note: {total} images take about {math.ceil(seconds / 60)} min; --limit takes fewer")
            if show is not None:
                show(done, total)

        with process.prints_to_standard_error(), progress.pass_progress("images") as show:
            outcome = inspection.inspect(
                net,
                images,
                self.layers,
                types=self.types or None,
                also=[layer.call.name for layer in best],
                target=self.target,
                categories=shared.categories_of(net, self.categories),
                reference=reference,
                on_progress=on_progress,
                on_phase=Output.now.begin,
                on_note=lambda name, text: note(f"Note: {name}: {text}"),
            )
        if outcome.against is not None and outcome.against.finding is None:  # else it is the first place
            note(f"Note: {outcome.against.sentence}")
        places = [self.with_command(place, outcome.images[place.image or 0].name) for place in outcome.places]
        provenance = {**outcome.provenance, "command": process.command_line()}
        outcome = replace(outcome, provenance=provenance, places=RowTuple(places))
        words = [files.words[image.name] for image in images]
        file = place.path_for(page_name(words, net.name), "", net.name, alone=True)
        crops = exemplars.cut_crops(net, best)
        if gone := exemplars.lost_words(crops):
            note(f"Note: {gone}")
        Output.now.begin("drawing the page")
        page = report.draw_page(outcome, best, crops, max_size=self.max_size)
        data = page.encode(errors="backslashreplace")
        if place.kind == "stdout":
            write_bytes(data)
        else:
            refuse_input(file, files.paths)
            if folder := os.path.dirname(file):
                system.make_folder(folder)
            system.write_atomically(file, data)
            wrote(file, lambda: report.draw_overview(outcome))
            rows = Section(list(_rows(outcome, file)), PLACES)
            self.print(Report([rows], in_words=partial(in_words, outcome, caption_of(net))))
        return files.status

    def with_command(self, place: inspection.Place, image: str) -> inspection.Place:
        """The place, in whose meaning commands can be pasted."""
        return replace(place, meaning=with_subject(place.meaning, self.model.model, image, self.paths))

    @cached_property
    def files(self) -> ImageFiles:
        """The images of the page: without ``--limit`` not more than stand side by side."""
        if self.limit is not None or len(self.images) <= _MOST_IMAGES:
            return ImageFiles(self.images)
        note(f"Note: the page has {_MOST_IMAGES} of {len(self.images):,} images; use --limit for more")
        return ImageFiles(images.spread(self.images, _MOST_IMAGES))


_MOST_LINES, _LEAST_PLACES = 8, 3  # without the caption
_IMAGES, _CLASSES, _LEAST_SHARE = 3, 3, 0.01  # of the answer


def _rows(outcome: inspection.Inspection, file: str) -> Iterator[Row]:
    calls: dict[str, hooks.Call] = {}
    for layer_call in [facts.call for facts in outcome.calls] + [layer.call for layer in outcome.layers]:
        calls.setdefault(layer_call.key, layer_call)
        calls.setdefault(layer_call.name, layer_call)  # of a parameter, whose layer may run several times
    for rank, place in enumerate(outcome.places, 1):
        call = calls.get(place.layer) if place.layer else None
        owner = call or (calls.get(place.layer.rpartition(".")[0]) if "." in place.layer else None)
        yield PLACES.row(
            place,
            owner,
            rank=rank,
            layer=(call.name or hooks.MODEL) if call else place.layer or None,
            image=None if place.image is None else outcome.images[place.image].name,
            weights=outcome.weights,
            file=file,
        )


def in_words(found: inspection.Inspection, caption: Mapping[str, Any], page: Page) -> Iterator[str]:
    """The answer for each image, how severe the places are, and the first of them."""
    page = replace(page, columns=min(MOST_WORDS, page.columns))
    # the first line tells of random weights
    named = int(found.is_random and [place.kind for place in found.places[:1]] == ["random-weights"])
    lines, shown = [*_answers(found, page)], named
    if not named or len(found.places) > named:
        severest = next(iter(numbers_by_severity(found.places)), "note")
        verdict = wrapped(severity_counts(found.places) or "no place stands out", page.columns)
        lines += [styled(line, severest, page.colours) if severest != "note" else line for line in verdict]
    carriers = [rank for rank, place in enumerate(found.places, 1) if place.kind == "carries-answer"]
    for rank, place in enumerate(found.places, 1):
        if rank <= named or rank in carriers[2:]:  # sound networks have many
            continue
        begin = f"{rank:>2}  {place.severity}  "
        is_named = re.search(rf"(?<![\w.]){re.escape(place.layer)}(?!\.?\w)", place.reason)
        layer = "" if is_named else printable(place.layer)
        where = f"{shortened([layer], page.columns // 2, page.ellipsis)[0]}: " if layer else ""
        more = [*beside(begin, [f"{where}{place.reason}"], len(where), place.severity, page, indent=" " * 4)]
        if shown - named >= _LEAST_PLACES and len(lines) + len(more) > _MOST_LINES:
            break
        shown, lines = shown + 1, [*lines, *more]
    if rest := len(found.places) - shown:
        lines += wrapped(f"{counted(rest, 'more place')} on the page", page.columns, " " * 4)
    yield from [*lines, "", *caption_lines(caption, [], page)]


def _answers(outcome: inspection.Inspection, page: Page) -> Iterator[str]:
    if outcome.is_random:
        label = outcome.weights.replace("random", "RANDOM WEIGHTS", 1)
        text = f"{label}: this network is not trained, and its answers mean nothing; give --weights FILE"
        yield from (styled(line, "error", page.colours) for line in wrapped(text, page.columns))
    for image in outcome.images[:_IMAGES]:
        name = shortened([printable(image.name)], page.columns // 2, page.ellipsis, are_paths=True)[0]
        yield from wrapped(f"{name}: {_answer(image, outcome.is_random)}", page.columns, later="  ")
    if (rest := len(outcome.images) - _IMAGES) > 0:
        yield from wrapped(f"{counted(rest, 'more image')} on the page", page.columns)


def _answer(image: inspection.InspectedImage, is_random: bool) -> str:
    best = image.classes[:_CLASSES]
    if not best and image.answer is not None:
        return image.answer.words(_CLASSES)
    if best and math.isnan(best[0].probability):
        return "the scores are NaN"
    top = [prediction for prediction in best if prediction.probability >= _LEAST_SHARE] or best[:1]
    words = (one.name if is_random else f"{one.name} {percent(one.probability)}" for one in top)
    return ", ".join(words) or "the model gives no scores of classes"
