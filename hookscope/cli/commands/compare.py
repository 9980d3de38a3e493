"""``hookscope compare``: two models, or two ways to run one, side by side; where they begin to differ."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import click

from hookscope import comparison, hooks, report, statistics, system
from hookscope.cli import process
from hookscope.cli.output.comparison_rows import comparison_report
from hookscope.cli.output.formats import note, write_report
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import image_options, options as shared
from hookscope.cli.shared.class_options import categories_of, categories_option
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.image_run import LostImages
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.model import check_choice
from hookscope.cli.shared.output_paths import (
    OutputPath,
    check_html,
    check_plot,
    is_same_file,
    refuse_input,
    write_html,
    write_picture,
    write_plot,
)
from hookscope.cli.shared.side_options import SideOptions, load_sides, side_options
from hookscope.cli.shared.threshold_options import Number, Share
from hookscope.errors import UsageError

_CKA_IMAGES = 4


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    layers: hooks.Selection | None
    types: tuple[str, ...]
    ops: bool | None
    map: str | None
    alone: bool
    rank: bool
    top: int
    grid: str | None
    plot: str | None
    matrix: str | None
    html: str | None
    max_relative: float | None
    min_cosine: float | None
    min_agreement: float | None
    junit: str | None
    categories: tuple[str, ...] | None
    batch_size: int | None
    workers: int
    strict: bool
    format: str

    @property
    def limits(self) -> comparison.ComparisonLimits:
        return comparison.ComparisonLimits(self.max_relative, self.min_cosine, self.min_agreement)

    @property
    def draws_maps(self) -> bool:
        return self.grid is not None or self.html is not None

    @property
    def files(self) -> dict[str, str | None]:
        """The files that are written, by their options."""
        names = ("grid", "plot", "matrix", "html", "junit")
        return {f"--{name}": getattr(self, name) for name in names}


@click.command("compare", cls=GroupedCommand)
@shared.tell_fields(comparison.PAIRS, "Fields of a pair, beside the fields of list-layers")
@shared.model_argument("MODEL_A")
@shared.model_argument("MODEL_B")
@image_options.images_argument
@shared.file_option("--image-b", "Other images for B: a file or a folder, as many as A has, in the same order.")
@shared.layer_option(f"Calls of A to compare: {shared.SELECTION}  [default: every layer without layers inside]")
@shared.type_option
@shared.ops_option
@shared.file_option(
    "--map",
    "Pair layers by hand: each line of FILE is a name in A, a tab, a name in B; * is one text in both.",
)
@click.option(
    "--alone/--no-alone", default=True, help="Also run each layer of B on the inputs of A.  [default: --alone]"
)
@click.option(
    "--sort",
    "rank",
    is_flag=True,
    help="Sort the pairs by isolated_l2: the layer that adds most comes first.",
)
@shared.count_option("--top", "Number of pairs in a table.", 20)
@categories_option
@shared.plot_option("Draw the differences by depth")
@shared.file_option("--grid", "Draw maps of A, B and B - A: a PNG file.")
@shared.file_option("--matrix", "Draw linear CKA of every layer of A against every layer of B: a PNG, SVG or PDF file.")
@shared.html_option("the answer, all pairs, maps and changed images")
@click.option("--max-relative", type=Number(), help="Largest allowed relative L2 difference of a pair.")
@click.option("--min-cosine", type=Number(-1.0, 1.0), help="Smallest allowed cosine of a pair, such as 0.99.")
@click.option("--min-agreement", type=Share(), help="Smallest allowed share of images with the same best class: 95%.")
@shared.file_option("--junit", "Also write the result of the limits as JUnit XML.")
@image_options.files0_option
@image_options.limit_option
@shared.count_option("--batch-size", "Images in one forward pass.  [default: as many as fit, 4 to 16]")
@image_options.workers_option
@image_options.strict_option
@side_options
@shared.format_option
def command(
    a: SideOptions,
    b: SideOptions,
    paths: Sequence[str],
    image_b: str | None,
    files0_from: str | None,
    limit: int | None,
    **values: Any,
) -> None:
    """Compare MODEL_A and MODEL_B call by call on each IMAGE, and say where they part.

    \b
    Examples:
      hookscope compare resnet18 resnet18 photos/ --weights-b fine-tuned.pth
      hookscope compare resnet50 resnet50 cat.jpg --dtype-b bfloat16
      hookscope compare nets.py:mine nets.py:mine cat.jpg --weights-a before.pth --weights-b after.pth --html diff.html
      hookscope compare resnet18 quantized:resnet18 photos/ --sort --max-relative 0.05
      hookscope compare shapes shapes star.png --image-b ring.png
      hookscope compare shapes shapes star.png --at-b features.3 noise:std=0.1 --grid maps.png
      hookscope compare resnet18 model.onnx cat.jpg

    The two models may be one model with different weights, data type, device, preprocessing, interventions or images.
    Options that end in -a or -b apply to one side; the same options without this end apply to both. Calls of A and B
    are paired by name, by order and type, or by --map. IMAGE is a file, a folder, a glob, or - for standard input.

    The answer comes first: the first call that differs by more than noise, and the cause that the numbers show. Noise
    is how far A is from itself when it runs again, and when its input changes by rounding. A difference is more than
    ten times the noise.

    A table has the pairs that differ most; json and ndjson also have the answer, calls without a partner and images
    that changed class. With --max-relative, --min-cosine or --min-agreement the exit status is 3 when a pair breaks a
    limit or could not be compared.
    """
    options = Options(**values)
    images = image_options.image_list(paths, files0_from, limit)
    others = None if image_b is None else image_options.image_list([image_b], None, limit)
    _check(options, images, others or ())
    side_a, side_b = load_sides(a, b)
    check_choice(side_a.net, options.types, options.layers)
    pictures: Sequence[Any] = images
    if "-" in images:  # standard input can be read once, and each side prepares it
        pictures = ImageFiles(images).usable(side_a.net.preprocess.frames)
    lost = LostImages(options.strict or len(images) == 1)
    with process.prints_to_standard_error(), pass_progress("images") as on_progress:
        found = comparison.compare(
            side_a,
            side_b,
            pictures,
            images_b=others,
            layers=options.layers,
            types=options.types or None,
            ops=bool(options.ops),
            names=None if options.map is None else _read_map(options.map),
            alone=options.alone,
            matrix=options.matrix is not None or (options.html is not None and len(images) >= _CKA_IMAGES),
            keep=options.draws_maps and (options.layers or True),
            categories=categories_of(side_a.net, options.categories),
            batch_size=options.batch_size,
            workers=options.workers,
            on_lost=lost.lost,
            on_note=lost.note,
            on_progress=on_progress or (lambda done, total: None),
        )
    lost.finish()
    for text in dict.fromkeys(found.notes):
        if text not in (*side_a.net.notes, *side_b.net.notes):  # printed when they were loaded
            note(f"Note: {text}")
    result = comparison.check_comparison(found, options.limits) if options.limits.names else None
    found = replace(found, provenance={**found.provenance, "command": process.command_line()})
    with ExitStack() as stack:  # a full disk is no reason to lose the rows
        stack.callback(_report, found, options, result)
        _write(found, options, result, lost.count)
    if result is not None and result.broken:
        raise click.exceptions.Exit(3)
    if lost.count:
        raise click.exceptions.Exit(1)


def _check(options: Options, images: Sequence[str], others: Sequence[str]) -> None:
    """Refuse, before minutes of work, what cannot be measured, or written after it."""
    inputs = [*images, *others]
    if options.junit is not None and not options.limits.names:
        raise UsageError("--junit needs a limit", do="give --max-relative, --min-cosine or --min-agreement")
    check_plot(options.plot, inputs)
    check_plot(options.matrix, inputs)
    if options.matrix is not None and len(images) < _CKA_IMAGES:
        raise UsageError(f"--matrix needs {_CKA_IMAGES} images, and there are {len(images)}", do="give more images")
    if options.grid is not None:
        OutputPath.parse_page("--grid", options.grid, images[:1])
    if options.junit is not None:
        system.check_writable(options.junit)
        refuse_input(options.junit, inputs)
    files = {option: path for option, path in options.files.items() if option != "--html"}
    check_html(options.html, inputs, files)
    named = [path for path in options.files.values() if path is not None]
    for at, path in enumerate(named):
        if any(is_same_file(path, other) for other in named[:at]):
            raise UsageError(f"two options name the same file '{path}'", do="name two files")


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


def _write(found: comparison.Comparison, options: Options, result: statistics.LimitsResult | None, lost: int) -> None:
    if options.plot is not None:
        write_plot(options.plot, comparison.draw_differences(found), found.provenance)
    if options.matrix is not None and found.matrix is not None:
        write_plot(options.matrix, comparison.draw_matrix(found.matrix, found.a.model, found.b.model), found.provenance)
    if options.grid is not None:
        if found.maps:
            write_picture(options.grid, comparison.draw_compared_maps(found))
        else:
            note(f"Note: {options.grid} was not written: no call with maps differs")
    if options.html is not None:
        write_html(options.html, report.draw_comparison_page(found))
    if options.junit is not None and result is not None:
        suite = f"hookscope compare {found.a.model} {found.b.model}"
        system.write_atomically(options.junit, statistics.junit_xml(suite, result, lost))


def _report(found: comparison.Comparison, options: Options, result: statistics.LimitsResult | None) -> None:
    with process.reader_may_leave():  # the exit status is the result, even when nobody reads the rows
        write_report(comparison_report(found, options.top, options.rank, result), options.format)
