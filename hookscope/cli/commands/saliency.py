"""``hookscope saliency``: which pixels of an image the score of a class depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from hookscope import explain
from hookscope.cli.output.report import Row
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.explain import ExplainOptions, Explanation, explain_images, explain_options
from hookscope.cli.shared.model import ModelOptions, running
from hookscope.cli.shared.registries import CommandWithTable, kept_rows
from hookscope.findings import counted

FIELDS = (
    "image", "method", "class", "label", "score", "probability", "shape", "sum", "expected", "max", "peak_x", "peak_y",
    "weights", "file",
)  # fmt: skip
_DEFAULTS = explain.Settings()
_GAP = 0.05  # relative difference of sum and score from which a note says so
_ROUNDING = 1e-5  # relative rounding error of the score difference


@dataclass(frozen=True)
class Options(ExplainOptions):
    """The options of the command."""

    method: str
    samples: int
    noise: float
    steps: int
    batch_size: int


def _read_methods() -> Iterator[tuple[str, str]]:
    return ((name, method.summary) for name, method in explain.SALIENCY_METHODS.items())


_methods = kept_rows("saliency", "explain", _read_methods)


@click.command("saliency", cls=CommandWithTable, table=_methods)
@shared.model_argument()
@shared.images_argument()
@shared.method_option(_methods, "gradient", "What is computed.")
@shared.count_option("--samples", "Number of noisy copies for smoothgrad.", _DEFAULTS.samples)
@click.option(
    "--noise",
    metavar="SHARE",
    type=click.FloatRange(0),
    default=_DEFAULTS.noise,
    show_default=True,
    help="Standard deviation of the noise of smoothgrad, as a share of the image's range.",
)
@shared.count_option(
    "--steps", "Number of points between zeros and the image for integrated-gradients.", _DEFAULTS.steps
)
@shared.count_option(
    "--batch-size", "Images in one forward pass of smoothgrad and integrated-gradients.", _DEFAULTS.batch_size
)
@explain_options("IMAGE/CLASS")
def command(model: ModelOptions, paths: tuple[str, ...], **values: Any) -> None:
    """Show which pixels of each IMAGE the score of a class depends on.

    IMAGE is a file, or - for standard input. The command draws a grey map over the image and writes it as PNG. It
    prints a row: class, score, probability, the sum of the signed values, the expected sum, the highest value of the
    map, and the position of that value in pixels of the image. For a video model the position is that in the mean over
    the frames. The expected sum of integrated-gradients is the score minus the score of an image of zeros; a note says
    when more --steps are needed. --raw keeps the signed values (3, H, W) of the model's input.

    \b
    Methods:
      {table}

    \b
    Examples:
      hookscope saliency resnet34 cat.jpg --method smoothgrad
      hookscope saliency shapes samples/shapes/star.png
      hookscope saliency vgg16 cat.jpg --method guided-backprop --target tabby -o cat-guided.png
      hookscope saliency resnet18 cat.jpg --method integrated-gradients --raw shares.npy --format json
    """
    options = Options(**values)
    settings = explain.Settings(options.samples, options.noise, options.steps, options.batch_size, model.seed)
    draw = lambda explanation: _draw(explanation, options, settings)  # noqa: E731
    explain_images(model, paths, options, options.check(paths), FIELDS, draw)


def _draw(explanation: Explanation, options: Options, settings: explain.Settings) -> Iterator[Row]:
    """Write the pictures of one image, and yield a row for each."""
    with running(explanation.net, explanation.inputs), pass_progress() as on_progress:
        maps = explain.saliency_maps(
            explanation.net.model,
            explanation.inputs,
            options.target,
            options.method,
            categories=explanation.categories,
            settings=settings,
            on_progress=on_progress,
        )
    for result in maps:
        page, provenance = explain.draw_saliency(explanation.source, result, options.cmap)
        path = explanation.write(page, provenance, options.method, result.prediction.index, len(maps) == 1)
        yield _row(explanation, result, path)


def _row(explanation: Explanation, result: explain.Saliency, path: str) -> Row:
    index = result.prediction.index
    if not result.still.any():
        explanation.note(f"class {index} does not depend on any pixel: the map is all zero")
    total = float(result.values.double().sum())
    _note_limits(explanation, result, total)
    explanation.raw.keep(f"{explanation.word}/{index}", result.values.cpu().float().numpy())
    return explanation.row(FIELDS, result, path, sum=total)


def _note_limits(explanation: Explanation, result: explain.Saliency, total: float) -> None:
    """Report a map that does not have the properties of its method."""
    index, score, expected = result.prediction.index, result.prediction.score, result.expected
    if expected is not None and abs(total - expected) > _GAP * abs(expected) + _ROUNDING * abs(score):
        explanation.note(
            f"the shares of class {index} add up to {total:.4g}, but the score minus the score of zeros is"
            f" {expected:.4g}; raise --steps"
        )
    if result.unguided:
        calls = counted(result.unguided, "functional ReLU call")
        explanation.note(f"{calls} not guided: hooks act on modules only")
