"""``hookscope saliency``: which pixels of a photograph the score of a class depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from hookscope.cli import process
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import explain as explaining
from hookscope.cli.shared.explain import ExplainOptions, Explanation, answer_fields, explaining_options, peak_fields
from hookscope.cli.shared.options import model_argument
from hookscope.cli.shared.registries import CommandWithTable, RegistryChoice
from hookscope.explain import Settings
from hookscope.findings import counted

if TYPE_CHECKING:
    from hookscope.explain import Saliency

FIELDS = (
    "image", "method", "class", "label", "score", "probability", "shape", "sum", "expected", "max", "peak_x", "peak_y",
    "weights", "file",
)  # fmt: skip
_DEFAULTS = Settings()
_GAP = 0.05  # from which on shares that do not make up the score are told
_ROUNDING = 1e-5  # of the score, which the difference of two that are nearly the same is made of


def _methods() -> Iterator[tuple[str, str]]:
    from hookscope.explain import SALIENCY_METHODS

    return ((name, method.summary) for name, method in SALIENCY_METHODS.items())


@click.command("saliency", cls=CommandWithTable, table=_methods)
@model_argument()
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--method",
    type=RegistryChoice(lambda: dict(_methods())),
    default="gradient",
    show_default=True,
    help="What is computed.",
)
@click.option(
    "--samples",
    metavar="N",
    type=click.IntRange(1),
    default=_DEFAULTS.samples,
    show_default=True,
    help="Noisy pictures of smoothgrad.",
)
@click.option(
    "--noise",
    metavar="SHARE",
    type=click.FloatRange(0),
    default=_DEFAULTS.noise,
    show_default=True,
    help="Standard deviation of smoothgrad's noise, as a share of the picture's range.",
)
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(1),
    default=_DEFAULTS.steps,
    show_default=True,
    help="Points of integrated-gradients between a picture of zeros and the picture.",
)
@click.option(
    "--batch-size",
    metavar="N",
    type=click.IntRange(1),
    default=_DEFAULTS.batch_size,
    show_default=True,
    help="Pictures in one pass of these two.",
)
@explaining_options("IMAGE/CLASS")
def command(model: str, images: tuple[str, ...], **options: Any) -> None:
    """Show which pixels of each IMAGE the score that MODEL gives a class depends on (- reads one from standard input).

    Writes a PNG, the map over the photograph in grey, and prints a row: class, score and probability, the sum of the
    signed values and what it should be (integrated-gradients: the score less that of a picture of zeros; a note says
    when more --steps are needed), the highest value of the map and where it is, in pixels of the photograph (of a clip,
    in the mean over its frames). --raw keeps the signed values (3, H, W) of what the network saw.

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
    plan = ExplainOptions.parse(images, options)
    names = ("samples", "noise", "steps", "batch_size", "seed")
    settings = Settings(**{name: options[name] for name in names})
    explaining.explain_all(plan, model, options, FIELDS, lambda one: _rows(one, options["method"], settings))


def _rows(one: Explanation, method: str, settings: Settings) -> Iterator[dict[str, Any]]:
    """Make the maps of one picture, write them, and say a row for each."""
    from hookscope.explain import draw_saliency

    maps = _maps(one, method, settings)
    for found in maps:
        page, about = draw_saliency(one.subject, found, one.plan.cmap)
        file = one.write(page, about, method, found.prediction.index, len(maps) == 1)
        yield _row(one, found, file)


def _maps(one: Explanation, method: str, settings: Settings) -> list[Saliency]:
    from hookscope.explain import saliency_maps
    from hookscope.models import model_errors_as_input_errors

    inputs = one.net.inputs(one.tensor)
    with (
        process.prints_to_standard_error(),
        model_errors_as_input_errors(one.net.name, inputs),
        pass_progress() as on_progress,
    ):
        return saliency_maps(
            one.net.model,
            inputs,
            one.plan.target,
            method,
            categories=one.categories,
            settings=settings,
            on_progress=on_progress,
        )


def _note(one: Explanation, found: Saliency, total: float) -> None:
    """Say where a map is less than its method promises."""
    index, score = found.prediction.index, found.prediction.score
    if found.expected is not None and abs(total - found.expected) > _GAP * abs(found.expected) + _ROUNDING * abs(score):
        what = f"the shares of class {index} make {total:.4g} together, and not {found.expected:.4g}"
        one.note(f"{what}, the score less that of zeros; raise --steps")
    if found.unguided:
        are = "is a function" if found.unguided == 1 else "are functions"
        many = counted(found.unguided, "ReLU")
        one.note(f"{many} on the way {are} in a forward, which hooks do not see: not guided")


def _row(one: Explanation, found: Saliency, file: str) -> dict[str, Any]:
    still, answer = found.still, found.prediction
    if not still.any():
        one.note(f"class {answer.index} does not depend on any pixel: the map is all zero")
    total = float(found.values.double().sum())
    _note(one, found, total)
    one.plan.raw.keep(f"{one.word}/{answer.index}", found.values.cpu().float().numpy())
    return {
        "image": one.subject.origin.image,
        "method": found.method,
        **answer_fields(answer),
        "shape": list(found.values.shape),
        "sum": total,
        "expected": found.expected,
        "max": float(still.max()),
        **peak_fields(one.subject.peak_in(still)),
        "weights": one.net.weights,
        "file": file,
    }
