"""``hookscope list-layers``: every call of a model's layers in order of execution."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from hookscope.cli import process
from hookscope.cli.shared.options import chosen_format, format_option, model_argument, size_option, type_option
from hookscope.findings import counted

if TYPE_CHECKING:
    from hookscope.hooks import LayerCall
    from hookscope.tracing import Trace

FIELDS = ("index", "name", "type", "call", "input_shape", "output_shape", "params", "macs", "note")


@click.command("list-layers")
@model_argument(default="resnet34")
@type_option
@size_option
@format_option
def command(model: str, types: tuple[str, ...], input_size: tuple[int, int] | None, format: str | None) -> None:
    """List a model's layers, in order of execution.

    MODEL is resnet34 when left out. The index is what `--layer` takes in other commands. Shapes come from a pass
    without arithmetic where the model allows one; MACs are counted by torchinfo's rule. The note says when a later
    layer overwrites this output in place, when a layer is called more than once, when it is shared, and when it did
    not run.

    \b
    Examples:
      hookscope list-layers
      hookscope list-layers vgg16 --type Conv2d --type ReLU
      hookscope list-layers googlenet --format tsv | awk -F'\\t' '$3=="Conv2d"{print $2}'
      hookscope list-layers inception_v3 --input-size 299x299 --format json
    """
    from hookscope.cli.output.rows import write_rows
    from hookscope.hooks import usual_types
    from hookscope.tracing import rows_of_type

    size, found = _trace(model, input_size)
    types = types or usual_types(layer.types for layer in found.layers)
    rows = rows_of_type(found, types)
    as_rows = ({name: getattr(row, name) for name in FIELDS} for row in rows)
    write_rows(as_rows, FIELDS, chosen_format(format), sys.stdout, _totals(model, size, found, rows, types))


def _trace(model: str, input_size: tuple[int, int] | None) -> tuple[tuple[int, int], Trace]:
    from hookscope.models import find_source
    from hookscope.tracing import cached_listing, listing

    if (cached := cached_listing(model, input_size)) is not None:
        return cached
    find_source(model)  # an unknown name fails before torch is imported
    process.import_torch()
    with process.prints_to_standard_error():
        return listing(model, input_size)


def _totals(
    model: str, size: tuple[int, int], found: Trace, rows: Iterable[LayerCall], types: tuple[str, ...]
) -> list[str]:
    ran = [row for row in rows if row.index is not None]
    idle = sum(row.index is None for row in rows)
    params = sum({row.name: row.params for row in rows}.values())
    of_type = "/".join(types)
    return [
        counted(len(ran), f"{of_type} call") + (f", {counted(idle, 'layer')} did not run" if idle else ""),
        f"{of_type}: {params:,} parameters, {sum(row.macs for row in ran):,} MACs",
        f"{model} at {size[0]}x{size[1]}: {found.params:,} parameters, {found.macs:,} MACs"
        + (" (by a real pass)" if found.real else ""),
    ]
