"""``hookscope verify``: does hookscope tell the truth about this model on this machine?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.shared.images import ImageFiles
from hookscope.cli.shared.model import load_net
from hookscope.cli.shared.options import (
    chosen_format,
    complete_types,
    format_option,
    layer_option,
    model_argument,
    net_options,
)
from hookscope.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from hookscope.models import LoadedModel
    from hookscope.verification import Check

FIELDS = ("check", "holds", "compared", "largest_difference", "layer", "note")


@click.command("verify")
@model_argument()
@click.argument("images", metavar="[IMAGE]", nargs=-1, type=click.Path())
@layer_option(
    "Which calls: 30, -1, 0:10, conv1, 'layer4.*', 're:conv[12]$', name#1, all; repeatable, comma separated."
    "  [default: all]",
    ("all",),
)
@click.option(
    "--type",
    "types",
    metavar="CLASS",
    multiple=True,
    shell_complete=complete_types,
    help="Class of layer that is checked and that indices count; repeatable; a glob.  [default: all, every leaf]",
)
@net_options
@format_option
def command(
    model: str,
    images: tuple[str, ...],
    layers: tuple[str, ...],
    types: tuple[str, ...],
    weights: str,
    seed: int,
    device: str,
    preprocess: str,
    input_size: tuple[int, int] | None,
    format: str | None,
) -> None:
    """Prove that what hookscope says of MODEL is true on this machine.

    IMAGE is what the model sees; without one it is seeded noise of the model's own size (optical flow takes two
    images, or shows one to itself). Prints a row for each check, and ends with status 3 at the first that fails:

    \b
      feature-extractor  outputs equal torchvision's feature extractor (fx), node by node
      re-computation     each recorded input through a copy of its layer gives the recorded output
      model-output       the model puts out the same with and without hooks, to the bit
      inputs             recorded inputs equal the outputs that fed them, where the fx graph says so
      untouched          hooks, modes, parameters, gradients, buffers, random states are as before,
                         also after a pass that was left half-way
      shapes             list-layers tells the shapes of the real pass

    The field holds is true, false, or empty where a check is not possible (fx cannot trace every model): the note
    says why. The layer is the first that differs, else that of the largest difference.

    \b
    Examples:
      hookscope verify resnet18
      hookscope verify vgg16 cat.jpg --type Conv2d --type ReLU
      hookscope verify mobilenet_v3_small --input-size 64 --weights none --format json
      hookscope verify retinanet_resnet50_fpn --layer 'backbone.*' && echo all is true
    """
    from hookscope.hooks import Selection

    Selection(layers)
    if len(images) > 2:
        raise UsageError("verify takes one image, or two for optical flow", f"there are {len(images)}")
    photographs = ImageFiles(images)
    photographs.read_first()
    net = load_net(model, weights, seed, device, preprocess, input_size)
    failed: list[Check] = []
    checks = _checks(net, _pictures(net, photographs, seed), layers, types or ("all",))
    output.write_rows(_rows(checks, failed), FIELDS, chosen_format(format), process.standard_output())
    if failed:
        output.note(f"Difference: {_told(failed[0])}")
        raise click.exceptions.Exit(3)


def _pictures(net: LoadedModel, photographs: ImageFiles, seed: int) -> list[Tensor]:
    """What the model is shown: the images, prepared, or noise."""
    from hookscope.verification import noise_pictures

    if not photographs.paths:
        return noise_pictures(net, seed)
    return [net.prepare(picture) for picture in photographs.read_together(net)]


def _checks(net: LoadedModel, pictures: list[Tensor], layers: Sequence[str], types: Sequence[str]) -> Iterator[Check]:
    """The checks one by one; what the model prints meanwhile is no row."""
    from hookscope.verification import verify

    checks = verify(net, pictures, layers, types)
    while True:
        with process.prints_to_standard_error():
            check = next(checks, None)
        if check is None:
            return
        yield check


def _rows(checks: Iterable[Check], failed: list[Check]) -> Iterator[dict[str, Any]]:
    """A row for each check up to the first that fails, which goes to ``failed`` too."""
    for check in checks:
        told = dataclasses.asdict(check)
        yield {"check": told.pop("name"), **told}
        if check.holds is False:
            failed.append(check)
            return


def _told(check: Check) -> str:
    where = f" at '{check.layer}'" if check.layer else ""
    by = f" by {check.largest_difference:.4g}" if check.largest_difference else ""
    return f"{check.name} fails{where}{by}: {check.note}"
