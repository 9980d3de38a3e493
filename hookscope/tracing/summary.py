"""One pass without arithmetic: every call in order, with shapes, parameters, MACs and the layer that overwrites it."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hookscope.display import Rows
from hookscope.errors import InputError, ModelError, is_out_of_memory
from hookscope.geometry import FieldTracker
from hookscope.hooks import (
    AnyModel,
    Selection,
    buffers_kept,
    check_hookable,
    module_of,
    other_hooks_set_aside,
    random_states_kept,
    tensors_in,
    types_of,
)
from hookscope.models import (
    LoadedModel,
    as_size,
    example_inputs,
    first_channels,
    given_inputs,
    meta_forward,
    model_errors_as_input_errors,
)
from hookscope.tracing.call_recorder import CallRecorder
from hookscope.tracing.facts import LayerCall, LayerTotals, Trace, rows_of_type, totals_of_type

_CONVOLUTIONS = {torch.ops.aten.convolution, torch.ops.aten._convolution}


def _of_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    """Attention in one operation on a CPU, for which torch has a formula from 2.15 on."""
    size = query.shape[-1]
    return query.numel() // size * key.shape[-2] * (size + value.shape[-1])


_FORMULAS: dict[Any, Callable[..., int]] = {
    # an LSTM in one operation on a CPU: inputs (T, N, C), then two matrices and their biases
    torch.ops.aten.mkldnn_rnn_layer: lambda x, a, b, *more: math.prod(x.shape[:2]) * (a.numel() + b.numel()),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _of_attention,
}


class MacCounter(TorchDispatchMode):
    """Calls ``count(macs, added)`` for each operation inside the ``with`` block that multiplies and accumulates.

    A multiply-accumulate is two of torch's FLOPs. ``added`` are the values of a convolution's output that get a bias.
    """

    supports_higher_order_operators = True

    def __init__(self, count: Callable[[int, int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count

    def __enter__(self) -> Any:
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it fuses attention into an operation without a formula
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        torch.backends.mha.set_fastpath_enabled(self._fastpath)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = func._overloadpacket if isinstance(func, OpOverload) else func
        formula = flop_registry.get(kind)
        if formula is None:
            if kind is torch.ops.aten.native_batch_norm and args[0].is_meta and not args[5]:
                nothing = args[0].new_empty(0)  # torch finds its shapes by sixteen operations
                return torch.empty_like(args[0]), nothing, nothing
            if len(args) > 1 and hasattr(args[1], "unpack"):
                return self._quantized(kind, args, func(*args, **kwargs))
            if kind in _FORMULAS:
                self._count(_FORMULAS[kind](*args[:5]), 0)
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        added = output.numel() if kind in _CONVOLUTIONS and args[2] is not None else 0
        self._count(formula(*args, **kwargs, out_val=output) // 2, added)
        return output

    def _quantized(self, kind: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Count an operation of a quantized layer, whose second argument holds the weight and the bias."""
        weight, bias = args[1].unpack()[:2]
        is_convolution = "conv" in kind.__name__
        values = args[0] if "transpose" in kind.__name__ else output  # of these values, one row of the weight for each
        self._count(values.numel() * weight[0].numel(), output.numel() if is_convolution and bias is not None else 0)
        return output


Inputs = tuple[Any, ...] | Mapping[str, Any]


@contextmanager
def everything_as_before(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Run the block in one mode and without other hooks, then put back modes, attributes, buffers and random states.

    A detector keeps the anchors it computed as an attribute, and anchors of a pass on the meta device would spoil every
    later pass. Containers among the attributes are put back too, but not what lies deeper in them.
    """
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    plain = (dict, OrderedDict, list, set)
    values = [value for _, own in attributes for value in own.values() if type(value) in plain]
    contents = [(container, copy.copy(container)) for container in values]
    with (
        torch.inference_mode(False),  # inside it tensors do not count writes
        torch.no_grad(),
        random_states_kept(),
        other_hooks_set_aside(model),
        buffers_kept(model),
    ):
        try:
            model.train(training)
            yield
        finally:
            for module, own in attributes:
                vars(module).clear()
                vars(module).update(own)
            for container, content in contents:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)


def trace(
    model: nn.Module,
    inputs: Inputs,
    *,
    on_meta: bool = True,
    name: str = "",
    ops: bool = True,
    fields: bool = False,
    sources: bool = False,
) -> Trace:
    """Run ``model`` without arithmetic, or with it where the model needs values, and record every call.

    ``inputs`` are a tuple of positional inputs or a mapping of keywords. Modes, hooks, buffers and random states of the
    model are as before afterwards. Only hooks that are part of the model fire meanwhile, see `other_hooks_set_aside`; a
    model that needs another one to take the input is refused. ``on_meta=False`` goes straight to the real pass. Without
    ``ops`` no operations are recorded, which saves a quarter of the time. With ``fields`` each call knows what its
    units see of the input, as far as the operations before it are known. With ``sources``, and operations, each call
    knows which calls made what it read. Errors call the model ``name``, by default the name of its class.

    Raises:
        InputError: when the model refuses the input, or needs values and is on the meta device.
        ModelError: for scripted and compiled models, and lazy ones that never ran.
    """
    check_traceable(model)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    refusal: Exception | None = None
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    for real in [False] * on_meta + [True] * (not is_meta or not on_meta):
        tracker = FieldTracker() if fields else None
        recorder = CallRecorder(model, tracker=tracker, sources=sources)
        try:
            with (
                model_errors_as_input_errors(name or type(model).__name__, inputs),
                everything_as_before(model),
                recorder.watching(ops),
                MacCounter(recorder.count),
                tracker or nullcontext(),
                recorder.sources or nullcontext(),
            ):
                _ = model(*args, **kwargs) if real else meta_forward(model, args, kwargs)
            return recorder.trace(real)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            refusal = error
    assert refusal is not None
    raise refusal


def check_traceable(model: nn.Module) -> None:
    """Raise a ModelError for scripted and compiled models, and lazy ones that never ran."""
    check_hookable(model)
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:  # the first pass makes lazy layers other layers, and cannot be undone
        raise ModelError(f"'{lazy}' has no shape yet: the model is lazy", do="run it once on a real input first")


def list_layers(
    model: AnyModel,
    input_size: Sequence[int] | None = None,
    types: Iterable[Any] | None = None,
    inputs: Inputs | None = None,
    *,
    ops: bool = False,
) -> Rows[LayerCall]:
    """Every call of the chosen types in one forward pass of ``model``, in order of execution.

    Args:
        model: Any eager module; torchvision's detectors, clips and flow models get the input their family needs.
        input_size: ``(H, W)`` of the picture, ``(D, H, W)`` of a clip or volume, or a whole shape such as
            ``(1, 1, 28, 28)``; None for the size of a model of `load_model`, else ``(224, 224)``.
        types: Class names (or classes), ``("all",)`` for every layer without children or with own parameters. None for
            Conv2d (Conv3d in models of clips); with ``ops`` all calls are listed then.
        inputs: The positional inputs as a tuple, or a mapping of keywords, instead of ``input_size``.
        ops: Whether operations that are not modules, such as `torch.relu` and ``+``, are calls too. Their type is the
            name of the function, and their name begins with the name of the module in which they run: ``block1::relu``.

    Multiply-accumulates are half of the FLOPs that torch's formulas count for what each call computes itself, and one
    for each value that a convolution adds its bias to. A row counts the layers inside it that have no row. With ``all``
    the numbers of all rows add up to the model's. A block that computes something outside its layers has a row without
    an index.

    Returns:
        Rows with index, name, type, call, order, shapes, params, MACs and a note; layers that did not run come last.

    Raises:
        LayerError: when the model has no layer of the types.
        InputError: when the model refuses the input.

    Example:
        >>> import torch
        >>> rows = list_layers(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), (9, 9))
        >>> rows[0].name, rows[0].output_shape, rows[0].macs
        ('0', (1, 8, 7, 7), 10976)
    """
    return rows_of_type(trace_at(model, input_size, inputs, fields=True), types, ops)


def layer_totals(
    model: AnyModel,
    input_size: Sequence[int] | None = None,
    types: Iterable[Any] | None = None,
    inputs: Inputs | None = None,
) -> LayerTotals:
    """The parameters and multiply-accumulates of ``model``, and of its calls of the chosen types.

    Arguments and errors are as in `list_layers`, and so are the rules by which it counts.

    Example:
        >>> import torch
        >>> totals = layer_totals(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)), (9, 9))
        >>> totals.params, totals.type_params, totals.macs
        (240, 224, 10976)
    """
    return totals_of_type(trace_at(model, input_size, inputs, fields=True), types)


def named(model: nn.Module, layers: Selection, input_size: Sequence[int]) -> Selection:
    """``layers`` with the names of the layers that `list_layers` shows at its indices."""
    if not layers.counts:
        return layers
    calls = [(row.index, row.name) for row in list_layers(model, input_size) if row.index is not None]
    types, _ = types_of(model, None)
    layers.check_ran([], len(calls), types, [name for name, _ in model.named_modules()])
    names = [name for index, name in calls if layers.wants_index(index, len(calls))]
    return Selection([*(term for term in layers.terms if not term.counts), Selection.of_names(names)])


def trace_at(
    model: AnyModel, input_size: Sequence[int] | None = None, inputs: Inputs | None = None, **options: Any
) -> Trace:
    """The trace of one pass; ``input_size`` and ``inputs`` are as in `list_layers`, the options as in `trace`."""
    if inputs is None and (tensors_in(input_size) or type(input_size).__module__ == "numpy"):  # a tensor in its place
        inputs, input_size = given_inputs(model, input_size), None
    if input_size is None and isinstance(model, LoadedModel):
        picture = torch.zeros(model.preprocess.input_shape, dtype=model.preprocess.dtype, device=model.device)
        inputs = model.inputs(picture) if inputs is None else inputs
    if inputs is not None:
        given = inputs if isinstance(inputs, Mapping) else given_inputs(model, inputs)
        return trace(module_of(model), given, **options)
    model, input_size = module_of(model), (224, 224) if input_size is None else as_size(input_size)
    counts = dict.fromkeys([None, first_channels(model)]) if len(input_size) == 2 else [None]
    return first_accepted(model, (example_inputs(model, input_size, channels) for channels in counts), **options)


def first_accepted(model: nn.Module, candidates: Iterable[Inputs], name: str = "", **options: Any) -> Trace:
    """The trace with the first inputs that the model takes; the error is the one of the first of all."""
    refusals = []
    for inputs in candidates:
        try:
            return trace(model, inputs, name=name, **options)
        except InputError as error:
            refusals.append(error)
    raise refusals[0]
