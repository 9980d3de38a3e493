"""The receptive field of the units of each layer: computed from the operations of a pass, or measured by gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from hookscope.geometry.facts import ReceptiveField
from hookscope.geometry.operation import RULES, AxisField, Field, FieldOperation, Followed, Rule, StrideTerm, union
from hookscope.geometry.rules import attention, cat, constant, pointwise, product, reduction
from hookscope.hooks import (
    Call,
    InputSize,
    Layers,
    Observer,
    Selection,
    buffers_kept,
    by_channel,
    capture,
    channel_axis,
    key_of,
    leaf_tensors,
    leaves_of,
    map_tensors,
    passed_on,
    random_states_kept,
    storage_key,
    tensors_in,
    token_grid,
)
from hookscope.models import LoadedModel, model_errors_as_input_errors

_POINTWISE = (  # without torch's tag
    "hardswish", "log_sigmoid_forward", "rrelu_with_noise", "_prelu_kernel", "prelu", "polar", "complex", "real",
    "fake_quantize_per_tensor_affine",
)  # fmt: skip
_REDUCTIONS = ("mean", "sum", "prod", "max", "min", "std", "var", "norm")


def _rule_of(function: Any, operation: FieldOperation) -> Rule | None:
    name = operation.name if operation.name.endswith("__") else operation.name.rstrip("_")
    operation.name = name
    if name in RULES:
        return RULES[name]
    packet = function.overloadpacket
    if name in _REDUCTIONS and len(operation.tensors) == 1:  # `max` of two tensors works on each position alone
        return reduction
    if name in _POINTWISE or any(torch.Tag.pointwise in getattr(packet, member).tags for member in packet.overloads()):
        return pointwise
    if "attention" in name or "transformer" in name:
        return attention
    if "keepdim" in operation.takes:
        return reduction
    return None


_OF_SEVERAL: tuple[Rule | None, ...] = (pointwise, cat, product, constant, attention)
"""The rules for several tensors that depend on the input; others know what to do with the first alone."""


class FieldTracker(TorchDispatchMode):
    """Follows which pixels of the input the values of each tensor depend on, while operations run inside the block.

    Attributes:
        shown: The size of the input.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._followed = WeakTensorKeyDictionary()
        self._writes: Counter[int | None] = Counter()
        self.shown = InputSize(0, 0)

    def follow(self, inputs: Any) -> None:
        """Follow the images among the inputs of a pass; call it before the pass begins."""
        tensors = [image for image in tensors_in(inputs).values() if image.dim() > 2 and image.is_floating_point()]
        for tensor in tensors:
            dims = tensor.dim()
            terms = (StrideTerm(dim, 1, tensor.shape[dim], 1.0) for dim in (dims - 2, dims - 1))
            rows, columns = (AxisField((term,), 0, 1) for term in terms)
            self._set(tensor, Followed((rows, columns)))
        if tensors:
            self.shown = InputSize.of(tensors[0])

    def of(self, tensor: Tensor) -> Followed | None:
        """What is known of ``tensor``; None for one that does not depend on the input."""
        known: tuple[Followed, int] | None = self._followed.get(tensor)
        if known is None:
            return None
        followed, writes = known
        if writes != self._writes[storage_key(tensor)]:  # written to through another tensor
            return followed.each(lambda reach: reach.unknown("a write to a part"))
        return followed

    def _set(self, tensor: Tensor, followed: Followed | None) -> None:
        if followed is None:
            self._followed.pop(tensor, None)
        else:
            self._followed[tensor] = followed, self._writes[storage_key(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = FieldOperation(func, args, kwargs, self.of)
        writes = func._schema.is_mutable and operation.tensors
        base = operation.tensors[0]._base if writes and not operation.tensors[0].is_inference() else None
        before = self.of(base) if base is not None else None
        output = operation.output = func(*args, **kwargs)
        if not operation.known and not writes:
            return output
        results = self._results(func, operation) if operation.known else []
        if writes:
            self._writes[storage_key(operation.tensors[0])] += 1
        made = operation.tensors[:1] if writes else tensors_in(output).values()
        made = [tensor for tensor in made if tensor.is_floating_point() or tensor.is_complex()]
        for at, tensor in enumerate(made):
            self._set(tensor, results[min(at, len(results) - 1)] if results else None)
        if base is not None:
            self._set(base, _written(base, operation.tensors[0], before, results[0] if results else None))
        return output

    def _results(self, func: Any, operation: FieldOperation) -> list[Followed]:
        follow = _rule_of(func, operation)
        if operation.known.keys() != {id(operation.input)} and follow not in _OF_SEVERAL:
            follow = None
        results = follow(operation) if follow is not None else None
        if results is None:
            why = f"{operation.name}, which is not followed"
            results = next(iter(operation.known.values())).each(lambda reach: reach.unknown(why))
        return [results] if isinstance(results, Followed) else results


def _written(base: Tensor, view: Tensor, before: Followed | None, written: Followed | None) -> Followed | None:
    """What is known of ``base`` after a write to ``view``, a part of it."""
    if written is None:
        return before
    offset = int(view.storage_offset() - base.storage_offset())
    at: dict[int, int] = {}
    strides = [int(stride) for stride in base.stride()]
    for dim in sorted(range(base.dim()), key=lambda dim: -strides[dim]):
        at[dim], offset = divmod(offset, strides[dim]) if strides[dim] else (0, offset)

    def place(dim: int) -> int | None:
        long_enough = (to for to in range(base.dim()) if base.shape[to] >= view.shape[dim] > 1)
        fits = [to for to in long_enough if base.stride(to) == view.stride(dim)]
        return fits[0] if len(fits) == 1 else None

    def put(reach: AxisField) -> AxisField:
        if any(place(part.dim) is None for part in reach.parts if part.count > 1):
            return reach.unknown("a write to a part")
        for part in reach.parts:
            reach = reach.as_single_stride(part.dim, view.shape[part.dim])
        placed = reach.permuted(place, "")
        for part in placed.parts:
            placed = placed.resampled(part.dim, part.count, 1, -at[part.dim], -at[part.dim], base.shape[part.dim])
        return placed

    field = written.each(put)
    if before is None:
        return field
    both = zip(before.field, field.field, strict=True)
    rows, columns = (union(old, new, base.shape, "a write to a part") for old, new in both)
    return Followed((rows, columns))


_FAINT = 1 - 0.9545  # of the largest gradient; what is fainter is two standard deviations away in a Gaussian


def effective_fields(
    net: LoadedModel,
    inputs: Sequence[Any],
    layers: Layers = "all",
    types: Iterable[Any] | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """How large the part of the input is that the middle unit of each wanted call reacts to.

    The effective receptive field (arXiv:1701.04128) is usually much smaller than the one that the geometry allows: the
    gradient fades towards its edge. One backward pass for each call, from its middle unit with random weights of the
    channels; absolute gradients are added up over channels and images.

    Args:
        net: The model.
        inputs: The positional inputs of one forward pass; several images give a steadier number than one.
        layers: A selection, see `Selection`.
        types: Class names that indices and ``all`` count.
        on_progress: Called with the calls done and their number.

    Returns:
        The side in pixels of a square with as many pixels as have a gradient above 4.55 % of the largest, by
        ``name`` or ``name#call``, rounded to 0.01; 0 where no gradient arrives. Calls without positions are left out.
    """
    generator = torch.Generator().manual_seed(0)
    lengths: dict[str, float] = {}
    modules = dict(net.model.named_modules(remove_duplicate=False))
    with (
        model_errors_as_input_errors(net.name, inputs),
        random_states_kept(),
        buffers_kept(net.model),
        torch.enable_grad(),
    ):
        leaves = leaves_of(tuple(inputs))
        images = [tensor for tensor in leaf_tensors(leaves) if tensor.dim() >= 3]
        with capture(net.model, layers, types) as activations:
            net.model(*passed_on(leaves))
        shown = InputSize.of(images[0]) if images else InputSize(0, 0)
        for done, call in enumerate(activations.calls):
            output = activations[call.key]
            counts = {len(images[0]), len(images)} if images else ()  # of images in one tensor, or one by one
            if isinstance(output, Tensor) and output.requires_grad and len(output) in counts:
                values = by_channel(output, modules.get(call.name), shown)
                if values.dim() == 3 and (grid := token_grid(values.shape[2], shown)) is not None:
                    extra, frames, *sides = grid
                    values = values[:, :, extra:].unflatten(2, (-1, *sides))[:, :, frames // 2]
                if values.dim() == 4 and values.shape[-1] * values.shape[-2] > 1:
                    lengths[key_of(call, "")] = _side(values, images[0], generator)
            if on_progress is not None:
                on_progress(done + 1, len(activations.calls))
    return lengths


def _side(values: Tensor, image: Tensor, generator: torch.Generator) -> float:
    weights = torch.randn(values.shape[:2], generator=generator).to(values)
    middle = values[:, :, values.shape[2] // 2, values.shape[3] // 2]
    (gradient,) = torch.autograd.grad((middle * weights).sum(), image, retain_graph=True, allow_unused=True)
    if gradient is None:
        return 0.0
    strength = gradient.abs().flatten(0, -3).sum(0)
    highest = float(strength.max())
    return round(math.sqrt(int((strength > _FAINT * highest).sum())), 2) if highest > 0 else 0.0


def receptive_fields(
    net: LoadedModel, inputs: Sequence[Any], layers: Layers = "all", types: Iterable[Any] | None = None
) -> dict[str, ReceptiveField]:
    """What the units of each wanted call see of the input: one forward pass, which follows every operation.

    Sizes, steps and starts are of the operations that run: convolutions, pooling, upsampling, padding, slices,
    views, and everything that works on each position alone. Where branches meet, the field is the smallest that
    holds the fields of all branches. What reaches every position with the same value is left out, and `reason` says so:
    the gate of squeeze-and-excitation, the statistics of group, layer or instance norm, a mean of the image that is
    added everywhere. Strictly, a unit then depends on the whole image, but a crop of it shows nobody what the unit
    reacts to. Where positions themselves are joined, as by attention or a linear layer over positions, the field is
    ``whole``. Where an operation is not followed, such as a deformable convolution, the field is measured by gradients.

    Args:
        net: The model.
        inputs: The positional inputs of one forward pass, such as `LoadedModel.inputs` gives. One image is enough.
        layers: A selection, see `Selection`.
        types: Class names that indices and ``all`` count.

    Returns:
        A field for each tensor that a wanted call returns, by ``name`` or ``name#call``, followed by a space and the
        name of the part if it is one of several. Pixels are of ``inputs``, also where the model resizes its
        input, as a detector does.
    """
    fields: dict[str, ReceptiveField] = {}
    unknown: dict[str, Call] = {}
    tracker = FieldTracker()
    tracker.follow(list(inputs))

    def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for part, tensor in tensors_in(output).items():
            key = key_of(call, part)
            fields[key], is_known = computed_field(tracker, tensor, module)
            if not is_known:
                unknown[key] = call

    with model_errors_as_input_errors(net.name, inputs), random_states_kept(), buffers_kept(net.model):
        with torch.no_grad(), Observer(net.model, layers, types, on_call), tracker:
            net.model(*inputs)
        if unknown:
            _measure(net.model, inputs, fields, unknown, tracker.shown)
    return fields


def computed_field(tracker: FieldTracker, tensor: Tensor, module: nn.Module | None) -> tuple[ReceptiveField, bool]:
    """What the units of ``tensor`` see, an output of ``module``; and whether every operation on the way is known."""
    followed = tracker.of(tensor)
    is_known = followed is None or all(reach.known for reach in followed.field)
    return _field(tensor, followed, module, tracker.shown), is_known


def _field(tensor: Tensor, followed: Followed | None, module: nn.Module | None, shown: InputSize) -> ReceptiveField:
    whole = float(shown.height), float(shown.width)
    if followed is None:
        return ReceptiveField("whole", whole, reason="no operation that is followed leads from the input to it")
    rows, columns, frame = _placed(followed.field, tensor, channel_axis(tensor, module, shown), shown)
    if not rows.parts and not columns.parts:
        return ReceptiveField("whole", whole, reason=rows.merged_by or columns.merged_by or "it has no positions")
    start, stride, size = [0.0, 0.0], [0.0, 0.0], list(whole)
    for axis, reach in enumerate((rows, columns)):
        if math.isfinite(reach.start):
            start[axis], size[axis] = reach.start, reach.end - reach.start
        if reach.parts:
            stride[axis] = reach.parts[0].step
    ignored = rows.global_dependency or columns.global_dependency
    reason = f"left out: {ignored}, which reaches all positions alike" if ignored else ""
    joined = [reach.merged_by for reach in (rows, columns) if not reach.parts]
    reason = f"whole along one axis: {joined[0]}" if joined else reason
    return ReceptiveField("computed", _pair(size), _pair(stride), _pair(start), reason, frame)


def _pair(numbers: Sequence[float]) -> tuple[float, float]:
    rows, columns = numbers
    return rows, columns


def _placed(field: Field, tensor: Tensor, channels: int, shown: InputSize) -> tuple[AxisField, AxisField, int]:
    """Rows and columns with a part for the row and the column of a feature map, and the columns of a frame of a clip.

    Without parts where the positions of the tensor are not rows and columns.
    """
    shape, dims = list(tensor.shape), tensor.dim()
    rows, columns = (reach.without({channels}, "positions are flattened into channels") for reach in field)
    if not dims:
        return rows, columns, 0
    positions = [dim for dim in range(1 if channels else 0, dims) if dim != channels]
    if len(positions) == 1 and channels:  # tokens, frame by frame and row by row
        (at,) = positions
        extra, *grid = token_grid(shape[at], shown) or (1,)
        before, shape = shape, [*shape[:at], *grid, *shape[at + 1 :]]
        if extra:
            rows, columns = (reach.without({at}, "class tokens") for reach in (rows, columns))
        else:
            rows, columns = rows.reshaped(before, shape), columns.reshaped(before, shape)
            positions = [at, at + 1, at + 2]
    strides = []
    for reach, at in zip((rows, columns), positions[-2:] if len(positions) > 1 else (-1, -1), strict=True):
        elsewhere = {part.dim for part in reach.parts if part.dim != at and part.count > 1}
        if any(part.dim not in positions for part in reach.parts if part.dim in elsewhere):
            reach = reach.without(set(range(dims + 1)), "windows along the batch axis")
        else:
            reach = reach.without({part.dim for part in reach.parts if part.dim != at}, "exchanged rows and columns")
        strides.append(reach.as_single_stride(at, shape[at]))
    frame = shape[positions[-1]] if len(positions) == 3 and shape[positions[0]] > 1 else 0
    return strides[0], strides[1], frame


def _measure(
    model: nn.Module,
    inputs: Sequence[Any],
    fields: dict[str, ReceptiveField],
    unknown: Mapping[str, Call],
    shown: InputSize,
) -> None:
    """Replace the fields of calls that depend on an operation which is not followed by fields with a gradient."""
    generator = torch.Generator().manual_seed(0)
    masks: dict[str, dict[tuple[int, int], Tensor]] = {key: {} for key in unknown}
    modules = dict(model.named_modules(remove_duplicate=False))
    sizes: dict[str, tuple[int, int]] = {}

    def noise(tensor: Tensor) -> Tensor:
        if tensor.dim() < 3 or not tensor.is_floating_point():
            return tensor
        return torch.randn(tensor.shape, generator=generator).to(tensor) * tensor.std() + tensor.mean()

    for is_noise in (False, True):  # a ReLU that is 0 for one may let the gradient of the other through
        noisy = map_tensors(tuple(inputs), noise)
        leaves = leaves_of(noisy if is_noise else tuple(inputs))
        image = next(tensor for tensor in leaf_tensors(leaves) if tensor.dim() >= 3)
        with torch.enable_grad(), capture(model, Selection.of_calls(set(unknown.values()))) as activations:
            model(*passed_on(leaves))
            outputs = {
                key_of(call, part): tensor
                for call in activations.calls
                for part, tensor in tensors_in(activations[call.key]).items()
            }
        for key in unknown:
            tensor = outputs.get(key)
            if tensor is None or not tensor.requires_grad or len(tensor) != len(image):
                continue
            values = by_channel(tensor, modules.get(unknown[key].name), shown)[0]
            if values.dim() != 3:
                continue
            high, wide = int(values.shape[-2]), int(values.shape[-1])
            sizes[key] = high, wide
            weights = torch.randn(len(values), generator=generator).to(values)
            middle = high // 2, wide // 2
            beside = min(middle[0] + 1, high - 1), min(middle[1] + 1, wide - 1)
            for place in dict.fromkeys([middle, beside, (0, 0), (high - 1, wide - 1)]):
                score = (values[:, place[0], place[1]] * weights).sum()
                gradient = torch.autograd.grad(score, image, retain_graph=True, allow_unused=True)[0]
                if gradient is not None:
                    mask = gradient.flatten(0, -3).ne(0).any(0)
                    masks[key][place] = mask | masks[key].get(place, mask)
                    if mask.all():
                        break
    for key, places in masks.items():
        if measured := _fitted(places, sizes.get(key), shown, fields[key].reason):
            fields[key] = measured


def _fitted(
    places: dict[tuple[int, int], Tensor], made: tuple[int, int] | None, shown: InputSize, reason: str
) -> ReceptiveField | None:
    """The smallest field with every pixel that has a gradient, None where it is everything or nothing."""
    if made is None or not any(mask.any() for mask in places.values()):
        return None
    size, stride, start = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for axis, length in enumerate((shown.height, shown.width)):
        spans = {
            place[axis]: (int(pixels.min()), int(pixels.max()) + 1)
            for place, mask in places.items()
            if len(pixels := mask.any(1 - axis).nonzero())
        }
        fits = []
        for step in _steps(spans, length, made[axis]):
            low = min(low - at * step for at, (low, _) in spans.items())
            fits.append((max(high - at * step for at, (_, high) in spans.items()) - low, step, low))
        size[axis], stride[axis], start[axis] = min(fits)
    field = ReceptiveField("measured", _pair(size), _pair(stride), _pair(start), reason)
    middle = field.box((made[0] // 2, made[1] // 2), (shown.height, shown.width))
    return None if middle == (0, 0, shown.width, shown.height) else field


def _steps(spans: dict[int, tuple[int, int]], length: int, made: int) -> Iterator[float]:
    """How far the field may move from one unit to the next: by shape, and as neighbours do that no border cuts."""
    yield length / made
    for at, (low, high) in spans.items():
        if at + 1 in spans:
            next_low, next_high = spans[at + 1]
            if low > 0:
                yield next_low - low
            if next_high < length:
                yield next_high - high
