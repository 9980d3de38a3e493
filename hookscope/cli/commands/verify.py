"""Prove that hookscope reports the truth on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from hookscope import hooks, verification
from hookscope.cli import process
from hookscope.cli.output.formats import Report, Section, note
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.subject import OfImage
from hookscope.columns import Column, Columns, Row

COLUMNS = Columns(
    Column("check", lambda check: check.name),
    Column("holds"),
    Column("compared", need=1),
    Column("largest_difference", need=2),
    Column("layer", hide="unknown"),
    Column("note", hide="zero"),
)


class Verify(OfImage):
    """Prove that hookscope reports the truth about MODEL on this machine.

    \b
    Examples:
      hookscope verify resnet18
      hookscope verify vgg16 cat.jpg --type Conv2d --type ReLU
      hookscope verify mobilenet_v3_small --input-size 64 --weights none --format json
      hookscope verify retinanet_resnet50_fpn --layer 'backbone.*' && echo all is true

    The command prints a row for each check, and ends with status 3 at the first check that fails. IMAGE is the model's
    input; the default is noise, which --seed sets. Optical flow takes two images; a single image is used twice.

    \b
    Checks:
      feature-extractor  each output equals the output of torchvision's
                         feature extractor (fx)
      re-computation     a copy of each layer turns the recorded input into the
                         recorded output
      model-output       the model returns the same with and without hooks, to
                         the bit
      inputs             each recorded input equals the outputs it came from,
                         where the fx graph shows them
      untouched          hooks, modes, parameters, gradients, buffers and random
                         states are as before, also after an interrupted pass
      shapes             list-layers reports the shapes of the real pass

    The field holds is true or false. It is empty if a check is not possible, because fx cannot trace every model; the
    field note says why. The field layer is the first layer that differs, else the layer with the largest difference.
    """

    paths: tuple[str, ...] = shared.image_argument("[IMAGE]", required=False)
    layers: hooks.Selection = shared.calls_option("Calls to check", "all", default="all")
    types: tuple[str, ...] = shared.type_option()

    def run(self) -> int:
        failed: list[verification.Check] = []
        self.print(Report([Section(_rows(self, failed), COLUMNS)], caption=self.caption))
        for check in failed:
            where = f" at '{check.layer}'" if check.layer else ""
            by = f" by {check.largest_difference:.4g}" if check.largest_difference else ""
            note(f"Difference: {check.name} fails{where}{by}: {check.note}", always=True)
        return 3 if failed else 0


def _rows(options: Verify, failed: list[verification.Check]) -> Iterator[Row]:
    """A row for each check up to the first that fails, which is added to ``failed``."""
    tensors = list(options.tensors) or verification.noise_pictures(options.net, options.model.seed)
    checks = verification.each_check(options.net, tensors, options.layers, options.types or None)
    while not failed:
        with process.prints_to_standard_error():
            check = next(checks, None)
        if check is None:
            return
        yield COLUMNS.row(check)
        if check.holds is False:
            failed.append(check)
