"""Say where two models, or two runs of one, begin to differ."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Self

import click

from hookscope import comparison, hooks, jobs, models, report, statistics, system
from hookscope.cli import process
from hookscope.cli.command import RowCommand
from hookscope.cli.commands.intervene import Change, at_option
from hookscope.cli.fields import Option, Options, group, option
from hookscope.cli.output.formats import Report, Section, note
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.long_run import BatchOptions, ImageRun
from hookscope.cli.shared.output_paths import check_plot, write_html, write_picture, write_plot
from hookscope.cli.shared.subject import ImageFiles, ImageList, ModelOptions, check_choice, image_list, note_assumption
from hookscope.errors import ModelError, UsageError
from hookscope.findings import counted, listed, percent

_CKA_IMAGES = 4


_SIDES = ("a", "b")
_LIMITS = "max_relative min_cosine min_agreement"
_OF_IMAGES = f"image_b layers map plot grid matrix html junit {_LIMITS}"  # which saved statistics do not take


class SideOptions(ModelOptions):
    """MODEL of one side, how it is loaded, and how it runs."""

    dtype: str | None = option(
        "Data type of the model: float16, bfloat16, float32 or float64; autocast or autocast:float16 for"
        " torch.autocast.  [default: as loaded]",
        metavar="TYPE",
        type=click.Choice(models.dtype_words()),
        topic="model",
    )
    compile: bool = option("Run the model through torch.compile.", topic="model")
    changes: tuple[Change, ...] = at_option()

    @classmethod
    def of(cls, side: str, values: Mapping[str, Any]) -> SideOptions:
        """The options of ``side``: its own, else the options of both sides; interventions of both and of its own."""
        holds = {letter: _holds_weights(values[f"model_{letter}"]) for letter in _SIDES}
        own = {field.name: values[f"{field.name}_{side}"] for field in fields(cls)}
        both = {name: values.get(name) for name in own}
        if holds[side] and not all(holds.values()):  # --weights is then for the other side
            both["weights"] = "auto"
        given = {name: both[name] if own[name] is None else own[name] for name in own}
        compiled, changes = both["compile"] or own["compile"], (*(both["changes"] or ()), *(own["changes"] or ()))
        return cls(**{**given, "compile": compiled, "changes": changes})

    @property
    def says_values(self) -> bool:
        return self.preprocess != "weights" or any((self.mean, self.std, self.range))

    def side(self, net: models.LoadedModel) -> comparison.Side:
        changes = Change.build_all(self.changes, net)
        with process.prints_to_standard_error():
            return comparison.make_side(net, self.dtype, changes=changes, compiled=self.compile)


class Sides(Options):
    """The options of both sides; each is also one for A and one for B."""

    a: SideOptions
    b: SideOptions

    @classmethod
    def click_parameters(cls, only: Sequence[str] = ()) -> Iterator[click.Parameter]:
        """MODEL_A and MODEL_B; ``--weights``, ``--weights-a`` and ``--weights-b``, and so on."""
        for both in SideOptions.click_parameters():
            for side in _SIDES:
                if isinstance(both, click.Argument):
                    own = copy.copy(both)
                    own.name, own.opts, own.metavar = f"model_{side}", [f"model_{side}"], f"MODEL_{side.upper()}"
                    yield own
            if isinstance(both, Option):
                yield both
                for side in _SIDES:
                    variant = copy.copy(both)
                    variant.name, variant.opts = f"{both.name}_{side}", [f"{name}-{side}" for name in both.opts]
                    variant.default = variant.spelled = None
                    yield variant
                both.spelled = f"{both.opts[0]}[-a|-b]"

    @classmethod
    def taken(cls, values: Mapping[str, Any]) -> Self:
        """The options of A and of B from the ``values`` that click has read."""
        return cls(**{side: SideOptions.of(side, values) for side in _SIDES})


def load_sides(a: SideOptions, b: SideOptions) -> tuple[comparison.Side, comparison.Side]:
    """Load both sides. A model that does not state its preprocessing gets the other's, unless an option sets it.

    A file with options for its values alone gets the other's resize.
    """
    nets = [options.load(pictures=False) for options in (a, b)]
    own = [net.preprocess for net in nets]
    for at, options in enumerate((a, b)):
        if not a.says_values and not b.says_values:
            nets[at] = replace(nets[at], preprocess=own[at].like(own[1 - at]))
        elif _holds_weights(options.model) and options.preprocess == "weights" and options.resize is None:
            nets[at] = replace(nets[at], preprocess=own[at].resized_like(own[1 - at]))
    for net in nets[: 1 if nets[0].preprocess == nets[1].preprocess else 2]:
        note_assumption(net)
    return a.side(nets[0]), b.side(nets[1])


def _holds_weights(model: str) -> bool:
    """Whether a file of this name holds the weights too; loading says what is not a model."""
    try:
        return models.find_source(model).own_weights
    except ModelError:
        return False


class Compare(RowCommand, ImageList, BatchOptions):
    """Compare MODEL_A and MODEL_B call by call on each IMAGE, and say where they first differ.

    \b
    Examples:
      hookscope compare resnet18 resnet18 photos/ --weights-b fine-tuned.pth
      hookscope compare resnet50 resnet50 cat.jpg --dtype-b bfloat16
      hookscope compare nets.py:mine nets.py:mine cat.jpg --weights-a before.pth --weights-b after.pth --html diff.html
      hookscope compare resnet18 quantized:resnet18 photos/ --sort --max-relative 0.05
      hookscope compare shapes shapes star.png --image-b ring.png
      hookscope compare shapes shapes star.png --at-b features.3 noise:std=0.1 --grid maps.png
      hookscope compare resnet18 model.onnx cat.jpg
      hookscope compare healthy.json today.json

    The two models may be one model with different weights, data type, device, preprocessing, interventions or images.
    Options that end in -a or -b apply to one side; the same options without this end apply to both. IMAGE is a file,
    a folder, a glob, or - for standard input.

    Without images, two files of `hookscope stats --save` are compared: the first is the reference.

    Calls of A and B are paired by name, by order and type, or by --map.

    The answer comes first: the first call that differs by more than noise, and the cause that the numbers show. Noise
    is how far A is from itself when it runs again, and when its input changes by rounding. Only more than ten times the
    noise counts as a difference.

    A table has the pairs that differ most; json and ndjson also have the answer, calls without a partner and images
    that changed class. --max-relative, --min-cosine and --min-agreement set limits: the exit status is 3 when a pair
    breaks one or could not be compared.
    """

    fields_told = comparison.PAIRS
    fields_title = "Fields of a pair, beside the fields of list-layers"

    sides: Sides = group(Sides)
    image_b: str | None = shared.in_file("Other images for B: a file or a folder, as many as A has, in the same order.")
    layers: hooks.Selection | None = shared.calls_option("Calls of A", "every layer without layers inside")
    types: tuple[str, ...] = shared.type_option()
    ops: bool | None = shared.ops_option()
    map: dict[str, str] | None = shared.in_file(
        "Pair layers by hand: each line of FILE is a name in A, a tab, a name in B; * is the same text in both.",
        parse=lambda path: _read_map(path),
    )
    alone: bool = option(
        "Also run each layer of B on the inputs of A.  [default: --alone]",
        "--alone/--no-alone",
        default=True,
        show_default=False,
    )
    sort: bool = option("Sort the pairs by isolated_l2: the layer that adds most comes first.")
    top: int = option("Number of pairs in a table.", default=20)
    categories: tuple[str, ...] | None = shared.categories_option()
    plot: str | None = shared.plot_file("Draw the differences by depth")
    grid: str | None = shared.picture_file("Draw maps of A, B and B - A: a PNG file.")
    matrix: str | None = shared.out_file(
        "Draw linear CKA of every layer of A against every layer of B: a PNG, SVG or PDF file.",
        writes=check_plot,
        images=(_CKA_IMAGES,),
    )
    html: str | None = shared.html_file("the answer, pairs, maps and changed images")
    max_relative: float | None = option("Largest allowed relative L2 difference of a pair.", type=shared.number_from())
    min_cosine: float | None = option(
        "Smallest allowed cosine of a pair, such as 0.99.", type=shared.number_from(-1.0, 1.0)
    )
    min_agreement: float | None = option("Smallest allowed share of equal best classes: 95%.", type=shared.share)
    junit: str | None = shared.out_file("Also write the result of the limits as JUnit XML.", needs=_LIMITS)
    batch_size: int | None = option(  # type: ignore[assignment]
        "Images in one forward pass.  [default: as many as fit, 4 to 16]", topic="images"
    )

    @cached_property
    def others(self) -> list[str] | None:
        """The images of B, if they are others."""
        return None if self.image_b is None else image_list([self.image_b], None, self.limit)

    @cached_property
    def saved(self) -> list[str]:
        """The two files of `stats --save` that stand in place of models, if no image is named."""
        files = [side.model for side in (self.sides.a, self.sides.b)]
        are_saved = all(jobs.is_state_file(path) for path in files)
        return files if are_saved and not self.paths and self.files0_from is None else []

    def inputs(self) -> Iterator[tuple[str, str]]:
        if self.saved:
            yield from (("saved statistics", path) for path in self.saved)
            return
        yield from (("image", path) for path in self.images)
        yield from (("image of B", path) for path in self.others or ())

    def run(self) -> int:
        if self.saved:
            if unused := next((name for name in _OF_IMAGES.split() if getattr(self, name) is not None), None):
                asked = f"--{unused.replace('_', '-').replace('layers', 'layer')} needs models and images"
                raise UsageError(f"{asked}, not saved statistics", do="leave it out, or use `check --reference`")
            self.print(_saved_report(*map(statistics.load_statistics, self.saved)))
            return 0
        side_a, side_b = load_sides(self.sides.a, self.sides.b)
        check_choice(side_a.net, self.types)
        pictures: Sequence[Any] = self.images
        if "-" in pictures:  # standard input can be read once, and each side prepares it
            pictures = ImageFiles(self.images).usable(side_a.net.preprocess.frames)
        with ImageRun(len(pictures), None, self.strict) as run:
            outcome = comparison.compare(
                side_a,
                side_b,
                pictures,
                images_b=self.others,
                layers=self.layers,
                types=self.types or None,
                ops=bool(self.ops),
                names=self.map,
                alone=self.alone,
                matrix=self.matrix is not None or (self.html is not None and len(pictures) >= _CKA_IMAGES),
                keep=(self.grid is not None or self.html is not None) and (self.layers or True),
                categories=shared.categories_of(side_a.net, self.categories),
                run=jobs.RunSettings(self.batch_size, self.workers, None, run.listener),
            )
        for text in dict.fromkeys(outcome.notes):
            if text not in (*side_a.net.notes, *side_b.net.notes):  # printed when they were loaded
                note(f"Note: {text}")
        checked = comparison.check_comparison(outcome, self.max_relative, self.min_cosine, self.min_agreement)
        result = checked if checked.checked else None
        outcome = replace(outcome, provenance={**outcome.provenance, "command": process.command_line()})
        with self.printed_after(comparison_report(outcome, self.top, self.sort, result)):
            self._write(outcome, result, run.skipped)
        return 3 if result is not None and result.broken else min(run.skipped, 1)

    def _write(self, outcome: comparison.Comparison, result: statistics.LimitsResult | None, skipped: int) -> None:
        if self.plot is not None:
            write_plot(self.plot, report.plot(outcome), outcome.provenance)
        if self.matrix is not None and outcome.matrix is not None:
            a, b = outcome.models
            figure = report.plot(outcome.matrix, a=a, b=b)
            write_plot(self.matrix, figure, outcome.provenance)
        if self.grid is not None and outcome.maps:
            write_picture(self.grid, comparison.draw_compared_maps(outcome))
        elif self.grid is not None:
            note(f"Note: {self.grid} was not written: no call with maps differs")
        if self.html is not None:
            write_html(self.html, report.draw_comparison_page(outcome))
        if self.junit is not None and result is not None:
            suite = f"hookscope compare {outcome.a.model} {outcome.b.model}"
            system.write_atomically(self.junit, statistics.junit_xml(suite, result, skipped))


def _read_map(path: str) -> dict[str, str]:
    """The layer of B of each layer of A, from a file of two columns; empty lines and lines with # are left out."""
    try:
        with open(path, encoding="utf-8-sig") as stream:  # with or without a mark of the byte order
            lines = [line.rstrip("\n") for line in stream]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"--map {path} cannot be read: {reason}", do="check the path") from error
    names: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != 2 or not all(columns):
            raise UsageError(f"line {number} of {path} is '{line}'", do="write the name in A, a tab and the name in B")
        if columns[0] in names:
            raise UsageError(f"{path} has '{columns[0]}' twice", do="name each layer of A once")
        names[columns[0]] = columns[1]
    return names


def _saved_report(a: statistics.SavedStatistics, b: statistics.SavedStatistics) -> Report:
    """B against A: the verdict, and how far each call is from the reference."""
    found = comparison.against_reference(b, a)
    rows = Section(comparison.SHIFTS.rows(found.calls), comparison.SHIFTS, "call")
    sentence = f"{found.sentence[:1].upper()}{found.sentence[1:]}."
    caption = {"reference": f"{a.source.model}, {a.source.weights}", "now": f"{b.source.model}, {b.source.weights}"}
    return Report(
        [rows],
        [found.finding] if found.finding is not None else None,
        flat_note=f"Note: {sentence}",
        caption=caption,
        lead=[sentence],
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
            for_table=lambda row: {**row, "layer_b": row["layer_b"] if row["layer_b"] != row["layer"] else None},
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
    totals, lead = [verdict] if verdict else [], _in_words(found)
    return Report(sections, totals=totals, flat_note=note, caption=_caption(found), lead=lead)


def _shown(
    outcome: comparison.Comparison, order: Sequence[comparison.PairedCall], most: int
) -> Sequence[comparison.PairedCall]:
    """The input, the first pair that differs, the output, and those that add most, in the given order."""
    if len(order) <= most:
        return order
    named = [outcome.calls[0], outcome.calls[-1], *(pair for pair in outcome.calls if pair.key == outcome.answer.first)]
    differing = [pair for pair in outcome.calls if pair.difference is None or not pair.difference.is_same]
    best = dict.fromkeys(pair.key for pair in [*named, *sorted(differing, key=comparison.how_different, reverse=True)])
    chosen = set([*best][:most])
    return [pair for pair in order if pair.key in chosen]


def _caption(outcome: comparison.Comparison) -> Mapping[str, Any]:
    a, b = ({"model": side.model, "weights": side.weights, "runs": _runs(side)} for side in (outcome.a, outcome.b))
    same = {name: value for name, value in a.items() if b[name] == value}
    sides = {
        side: ", ".join(dict.fromkeys(facts[name] for name in facts if name not in same))
        for side, facts in (("A", a), ("B", b))
        if len(same) < len(a)
    }
    of_a, of_b = outcome.a.preprocess, outcome.b.preprocess
    about = {"preprocess": of_a} if of_a == of_b else {"preprocess of A": of_a, "of B": of_b}
    images = {"image": outcome.names[0]} if len(outcome.names) == 1 else {"images": len(outcome.names)}
    return {**same, **sides, **about, **images}


def _runs(side: comparison.SideFacts) -> str:
    return ", ".join(filter(None, (f"{side.dtype} on {side.device}", side.special)))


def _in_words(outcome: comparison.Comparison) -> Iterator[str]:
    first = outcome.answer.first
    unpaired = [
        f"{counted(len(calls), 'call')} of {side} without a partner: {listed([call.key for call in calls], _CALLS)}"
        for side, calls in (("A", outcome.unpaired_a), ("B", outcome.unpaired_b))
        if calls
    ]
    lines = [
        outcome.answer.sentence,
        f"first difference: {first}{_before(outcome)}{_most(outcome)}" if first else "",
        _agreement(outcome.agreement) if outcome.agreement is not None else "",
        *unpaired,
        outcome.answer.advice,
    ]
    yield from filter(None, lines)


def _before(outcome: comparison.Comparison) -> str:
    """How many pairs before the first that differs do not."""
    same = outcome.answer.same_before
    fine = [pair.key for pair in outcome.calls if not pair.differs or pair.key == outcome.answer.first]
    within = fine.index(outcome.answer.first) - same
    words = [f"{counted(same, 'pair')} the same to the bit"] if same else []
    words += [f"{counted(within, 'pair')} within the noise"] if within else []
    return f", after {' and '.join(words)}" if words else ""


def _most(outcome: comparison.Comparison) -> str:
    pair = next((pair for pair in outcome.calls if pair.key == outcome.answer.most), None)
    if pair is None:
        return ""
    return f"; adds most: {pair.key}" + (f", {pair.isolated_l2:.2g} alone" if pair.isolated_l2 is not None else "")


def _agreement(agreement: comparison.Agreement) -> str:
    same = agreement.images - len(agreement.changed)
    text = f"top-1 is the same for {same:,} of {counted(agreement.images, 'image')}"
    if agreement.best > 1:  # of two classes top-1 says it all
        best = "five" if agreement.best == 5 else agreement.best
        text += f", and {percent(agreement.top5)} of the {best} best classes are shared"
    changed = [
        f"{image.name} ({_best(image.class_a, image.probability_a)} in A,"
        f" {_best(image.class_b, image.probability_b)} in B)"
        for image in agreement.changed
    ]
    return f"{text}; {listed(changed, _IMAGES)}" if changed else text


def _best(name: str, probability: float) -> str:
    return f"{name} {percent(probability)}" if probability == probability else name
