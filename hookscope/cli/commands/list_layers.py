"""List the layers of a model in order of execution."""

from __future__ import annotations

import shlex

from hookscope import hooks, models, tracing
from hookscope.cli import process
from hookscope.cli.command import RowCommand
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section, note
from hookscope.cli.shared import options as shared
from hookscope.findings import counted, operations_in_words


class ListLayers(RowCommand):
    """List the layers of a model, in order of execution.

    \b
    Examples:
      hookscope list-layers resnet18
      hookscope list-layers vgg16 --type Conv2d --type ReLU
      hookscope list-layers resnet18 --ops --type '*add*'
      hookscope list-layers vit_b_32 --total --format json | jq '.[0].macs'
      hookscope list-layers inception_v3 --input-size 299x299 --format json
      hookscope list-layers googlenet --format tsv | awk -F'\\t' '$3=="Conv2d"{print $2}'

    MODEL is resnet34 by default. The index is what --layer takes in other commands: the position among the calls of
    --type, which is Conv2d by default. Give other commands the same --type.

    MACs include what a layer computes with functions. A row also counts the layers inside it that have no row, so the
    rows of --type all add up to the model. There a block that computes something itself has a row without an index.

    The receptive field may be larger than the input. Where a unit depends on the whole input, it is the size of the
    input. It and stride are empty where an operation is not known. Paths that reach all positions alike, such as
    squeeze-and-excitation, are left out.

    --ops adds a row for each operation that is not a module, such as torch.relu and +; its type is the name of the
    function. With --ops and without --type all calls are listed, and order counts operations too. Without --ops a line
    says how many operations there are.

    The lines under the table are the totals of the types and of the whole model, in which shared parameters count once.
    --total prints them as one row. Shapes come from a pass without arithmetic if the model allows it, else from a real
    pass.
    """

    fields_told = tracing.LAYER_CALLS

    model: str = shared.model_argument(default="resnet34")
    types: tuple[str, ...] = shared.type_option()
    input_size: tuple[int, ...] | None = shared.size_option()
    ops: bool | None = shared.ops_option()
    total: bool = option("Print one row with the totals of the types and of the model.")

    def run(self) -> None:
        size, trace = traced(self.model, self.input_size)
        ops, types = bool(self.ops), self.types
        usual = hooks.usual_types(layer.types for layer in trace.layers)
        if self.total and not any(set(usual).intersection(layer.types) for layer in trace.layers):
            types = types or ("all",)
        totals = tracing.totals_of_type(trace, types or None, ops)
        shown = types or (("all",) if ops else usual)
        uncounted = {} if totals.macs or not totals.params else {"macs": None, "type_macs": None}  # see _lines
        if self.total:
            about = {"model": self.model, "input_size": size, "type": "/".join(shown), **uncounted}
            return self.print(Report([Section([tracing.LAYER_TOTALS.row(totals, **about)], tracing.LAYER_TOTALS)]))
        rows = tracing.LAYER_CALLS.rows(tracing.rows_of_type(trace, types or None, ops), **uncounted)
        lines = _lines(totals, shown, f"{self.model} at {'x'.join(map(str, size))}")
        lines[-1] += " (by a real pass)" if trace.real else ""
        if types not in ((), usual) and not ops:
            given = shlex.join(word for name in types for word in ("--type", name))
            lines[0] += f"; give other commands {given} with these indices"
        more = tracing.totals_of_type(trace, ("all",)).type_calls - totals.type_calls
        if more and not types and not ops:
            lines = [f"not listed: {counted(more, 'call')} of other layers; --type all lists them", *lines]
        if not ops and (words := operations_in_words(trace.operations)):
            lines = [f"not listed: {words}; --ops lists them", *lines]
        self.print(Report([Section(rows, tracing.LAYER_CALLS)], totals=lines))


def traced(
    model: str, input_size: tuple[int, ...] | None, sources: bool = False
) -> tuple[tuple[int, ...], tracing.Trace]:
    """The size of the input and the calls of ``model``, from the cache or a pass; ``sources`` says what each reads."""
    if (listing := tracing.cached_listing(model, input_size, sources)) is None:
        models.find_source(model)  # an unknown name fails before torch is imported
        with process.prints_to_standard_error():
            listing = tracing.listing(model, input_size, sources)
    for text in listing[1].notes:
        note(f"Note: {text}")
    return listing


def _lines(totals: tracing.LayerTotals, types: tuple[str, ...], size: str) -> list[str]:
    kind = "" if "all" in types else "/".join(types)
    idle = f", {counted(totals.did_not_run, 'layer')} did not run" if totals.did_not_run else ""
    macs, of_type = (f"{number:,} MACs" for number in (totals.macs, totals.type_macs))
    if totals.params and not totals.macs:  # onnxruntime multiplies, and torch counts nothing
        macs = of_type = "MACs not counted"
    return [
        counted(totals.type_calls, f"{kind} call".strip()) + idle,
        f"{kind or 'all layers'}: {totals.type_params:,} parameters, {of_type}",
        f"{size}: {totals.params:,} parameters, {macs}",
    ]
