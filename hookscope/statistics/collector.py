"""A ``with`` block that measures every selected layer over any number of forward passes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from hookscope.display import Cells, Rows, Shown
from hookscope.errors import InputError
from hookscope.findings import Finding
from hookscope.hooks import (
    ACTIVATION_FUNCTIONS,
    EVERY_OPERATION,
    AnyModel,
    Call,
    HookHandles,
    InputSize,
    KnownTensors,
    Layers,
    Observer,
    Operation,
    OperationCounter,
    Selection,
    activation_class,
    as_float,
    by_channel,
    check_values,
    class_names,
    is_leaf,
    is_single,
    joined_inputs,
    key_of,
    matches_type,
    module_of,
    one_thread,
    select_types,
    tensors_in,
)
from hookscope.statistics.accumulator import LayerAccumulator, bounds_of, has_fixed_channels, rotations_of
from hookscope.statistics.facts import LayerStatistics
from hookscope.statistics.findings import StatisticsThresholds, diagnose
from hookscope.statistics.moments import ChannelMoments
from hookscope.statistics.ranges import ANSWERS, INPUT_CALL, READ, CallRange, held_by
from hookscope.statistics.totals import BATCH_NORMS, BatchNormAccumulator, Coverage, RunningStatistics

MOST_CHANNELS_FOR_RANK = 2048
"""A wider layer gets no effective rank: its covariance would take 130 MB, and its eigenvalues minutes."""


class StatisticsCollector(Shown, rows="table()"):
    """Statistics of every selected layer call over all forward passes of ``model`` inside the ``with`` block.

    Memory does not grow with the number of images. An output is measured in the hook of its layer, before a later
    layer can overwrite it. A pass that fails is not counted at all.

    Args:
        model: Any eager module.
        layers: A selection, as `capture` takes it; None for every convolution, Linear layer and activation function,
            and for what the model returns if that is not the output of one of these.
        types: Class names that indices and ``all`` count, see `capture`; the default of ``layers`` is then ``all``.
        rank: Whether to measure the effective rank of layers with up to 2048 channels.
        ops: Whether operations are measured too, such as `torch.relu`, ``+`` and the products of attention; each is a
            call named after the module in which it runs, such as ``block1::relu``. A call that returns the values of
            its input, such as `view`, is not measured again.
        handed_on: Whether a layer has statistics too if it returns the tensor of another measured layer, as a container
            does. By default the output of the model has none in this case.
        ranges: Whether to measure how the input and the output of every module vary from image to image, as a
            reference needs it.

    Attributes:
        totals: The `RunningStatistics` so far.
        coverage: What was not measured.

    Raises:
        LayerError: On entry, if the model does not have a name or type.
        InputError: The number of channels of a layer changes.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU(inplace=True))
        >>> with StatisticsCollector(net) as collector, torch.no_grad():
        ...     _ = net(torch.rand(8, 3, 5, 5))
        >>> [(layer.call.name, layer.items, layer.shape) for layer in collector.totals.statistics()]
        [('0', 8, (4, 5, 5)), ('1', 8, (4, 5, 5))]
    """

    def __init__(
        self,
        model: AnyModel,
        layers: Layers | None = None,
        types: Iterable[Any] | None = None,
        *,
        rank: bool = False,
        ops: bool = False,
        handed_on: bool = True,
        ranges: bool = False,
    ) -> None:
        self.net, model = model, module_of(model)
        self.model = model
        self.types = select_types(types) if types else None
        usual = layers is None and not types
        self.layers = Selection.of("all" if layers is None else layers)
        if usual:  # by name, so a layer that never runs is not an error
            names = _names_of(model, ("Conv2d", "_ConvNd", "Linear", *ACTIVATION_FUNCTIONS))
            self.layers = Selection.of_names([*names, ""])
        if usual and ops:
            self.layers = Selection([self.layers, EVERY_OPERATION])
        self.rank, self.ops, self.ranges = rank, ops, ranges
        self.totals = RunningStatistics()
        self.coverage = Coverage(left_out=_left_out(model, self.layers) if usual else Counter())
        self._handed_on, self._passes = handed_on and not usual, 0
        self._names: Sequence[str] | None = None
        self._held: dict[str, Any] = {}
        self._convolves = any("Conv2d" in class_names(module) for module in model.modules())
        self._pass = _MeasuredPass()
        self._watch: Observer | None = None
        self._modes: Any = None
        self._counting = HookHandles()
        self._stack = ExitStack()

    def _cells(self) -> Cells:
        return {"model": type(self.model).__name__, **self.totals._cells()}

    def table(self) -> Rows[LayerStatistics]:
        """A row for each measured call, as ``totals.statistics()`` returns them."""
        return self.totals.statistics()

    def findings(self, thresholds: StatisticsThresholds | None = None) -> Rows[Finding]:
        """What somebody should look at, as `diagnose` finds it."""
        return diagnose(self.totals, thresholds)

    def name_images(self, names: Sequence[str]) -> None:
        """Set the names of the images of the next pass; the default names are numbers."""
        self._names = names

    def __enter__(self) -> Self:
        # the first pass of a compiled model compiles what hooks call, unless it is told not to
        eager: Any = torch.compiler.disable if "torch._dynamo" in sys.modules else lambda function: function
        with ExitStack() as stack:
            if not self.ops:
                self._modes = OperationCounter(self.model)
                self._counting = stack.enter_context(HookHandles())
                self._modes.modules.watch(self._counting)
            if self.ranges:  # before the observer that ends the pass
                on_range = partial(self.unseen, self._on_range)
                stack.enter_context(Observer(self.model, "*", None, on_range, ordered=True))
            self._watch = Observer(
                self.model,
                self.layers,
                self.types,
                eager(self._on_call),
                on_start=eager(self._start),
                on_end=eager(self._end),
                ops=self.ops,
                ordered=True,
            )
            stack.enter_context(self._watch)
            self._modes = self._watch.operations or self._modes
            # by name: `all` requires that one of them runs, but some layers only run in training
            if batch_norms := _names_of(self.model, BATCH_NORMS):
                layers = Selection.of_names(batch_norms)
                stack.enter_context(
                    Observer(self.model, layers, BATCH_NORMS, eager(partial(self.unseen, self._on_batch_norm)))
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        self._pass = _MeasuredPass()
        stopped = self._stack.__exit__(*error)
        if error[0] is None and self._watch is not None:
            self._watch.warn_of_compiled_code()
        return stopped

    def _start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        for tensor in tensors_in(given).values():
            check_values(tensor)
        if any(map(torch._C._functorch.is_batchedtensor, tensors_in(given).values())):
            raise InputError("inside torch.vmap a layer sees one image at a time", do="give the model the whole batch")
        self._pass = _MeasuredPass.of(given, self._names, self.totals.images, self._convolves)
        self._names = None
        if not self.ops and not self._passes:
            self._modes.counts.clear()  # of a pass that failed
        if self.ranges:
            call = Call(INPUT_CALL, "input", 0, None)
            self.unseen(self._on_range, call, None, args, kwargs, joined_inputs(args, dict(kwargs)))

    def _end(self) -> None:
        # only here: a failed pass would leave some layers with more images than others
        assert self._watch is not None
        if not self.ops and not self._passes:
            self._counting.close()  # all passes do the same
            self.coverage.operations = self._modes.counts
        idle = self._watch.progress.did_not_run
        self.coverage.idle = tuple(name for name in (self.coverage.idle if self._passes else idle) if name in idle)
        running = [self.model.get_submodule(layer.names[0]) for layer in self._watch.progress.layers if layer.calls]
        used = self._modes.used | {id(parameter) for module in running for parameter in module._parameters.values()}
        own = {name: {*map(id, self.model.get_submodule(name).parameters())} for name in self.coverage.idle}
        self.coverage.unused = tuple(name for name, parameters in own.items() if parameters and not parameters & used)
        if self.ranges and not self._passes:
            self._held = held_by(self.model)
        self._pass.totals.held = self._held
        self._passes += 1
        if self._watch.selection.from_the_end:  # only now is it known which calls are wanted
            layers, unmeasured, wanted = self._pass.totals.layers, self.coverage.unmeasured, self._watch.wanted
            self._pass.totals.layers = {key: layer for key, layer in layers.items() if wanted(layer.call)}
            self.coverage.unmeasured = {key: why for key, why in unmeasured.items() if wanted(key[0])}
        self.totals.merge(self._pass.totals)
        self._pass = _MeasuredPass()

    def unseen(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function(*args)`` during a pass; its calculations are not operations of the model."""
        with one_thread():
            self._modes.paused(function, *args)

    def _on_call(self, call: Call, module: nn.Module | Operation, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(module, Operation) and not self.layers.is_explicit(call):
            has_values = not module.hands_on and any(map(_has_fractions, tensors_in(output).values()))
            if not has_values:  # a view of its input, positions or a mask
                return
        tensors = list(self._tensors_of(call, output))
        for tensor in tensors:
            self.unseen(self._measure, call, module, *tensor)
        if not tensors_in(output):
            self.coverage.unmeasured[call, ""] = "it returned no tensor"

    def _tensors_of(self, call: Call, output: Any) -> Iterator[tuple[str, Tensor, str | None]]:
        """Each tensor of an output, with its part; and with its image where the output lists a mapping for each.

        Whole numbers in such a mapping, and in what the model returns, are labels.
        """
        names = self._pass.names
        listed = isinstance(output, list) and len(output) == len(names)
        listed = listed and all(isinstance(item, Mapping) for item in output)
        for image, item in zip(names, output, strict=True) if listed else [(None, output)]:
            for part, tensor in tensors_in(item).items():
                if _has_fractions(tensor) or (call.name and not listed):
                    yield part, tensor, image

    def _measure(self, call: Call, module: nn.Module | Operation, part: str, tensor: Tensor, image: str | None) -> None:
        key, layers = key_of(call, part), self._pass.totals.layers
        known = self._pass.known.of(tensor)
        if known is not None and key not in layers:  # a container, or an Identity, hands on what another layer returned
            self.coverage.handed_on.add(key)
            if not call.name:
                self.coverage.with_channels.add(known[0])
            if self._handed_on:
                layer = layers[key] = copy(layers[known[0]])
                layer.call, layer.part, layer.bounds = call, part, bounds_of(module)
            return
        whole = as_float(tensor if _has_fractions(tensor) else tensor.double())
        values = by_channel(whole, None if isinstance(module, Operation) else module, self._pass.size)
        if whole.dim() == 1:  # a value for each image, or a list such as the labels of a detector
            one_each = image is None and len(whole) == len(self._pass.names)
            values = whole.reshape(-1, 1) if one_each else whole.reshape(1, 1, -1)
        before = self.totals.layers.get(key, layers.get(key))
        if before is not None and before.channels != values.shape[1] and has_fixed_channels(call):
            text = f"{key} returned {values.shape[1]} channels after {before.channels}"
            raise InputError(text, do="measure one size at a time")
        if self._has_channels(call, module):
            self.coverage.with_channels.add(key)
        rank = self.rank and values.shape[1] <= MOST_CHANNELS_FOR_RANK
        layer = LayerAccumulator(call, values.shape[1], bounds_of(module), rank, part)
        images = self._pass.images_of(len(values)) if image is None else [image] * len(values)
        moments = layer.update(values, images, self._pass.rotations_of(len(values)))
        if layers.setdefault(key, layer) is not layer:
            layers[key].merge(layer)
        self._pass.known.add(tensor, (key, moments if values.is_set_to(whole) else None))

    def _on_range(self, call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        read, tensor = (_values_in(value) for value in ((args, kwargs), output))
        if read is not None and read is not tensor and module and is_leaf(module) and not self._pass.has_range(read):
            self._add_range(call, module, read, READ)
        if tensor is not None and not (self._pass.has_range(tensor) and call.name):  # else a container handed it on
            self._add_range(call, module, tensor)
            if not call.name:
                self._add_range(call, module, tensor, ANSWERS)

    def _add_range(self, call: Call, module: nn.Module | None, tensor: Tensor, part: str = "") -> None:
        size, ranges, images = self._pass.size, self._pass.totals.ranges, len(self._pass.names)
        if module is None and tensor.dim() == 3 and size is not None:  # an image of a list
            tensor = tensor[None]
        values = by_channel(as_float(tensor), module, size)
        shape = (len(values) // images, *tensor.shape[1:])
        is_image = INPUT_CALL in ranges and shape == ranges[INPUT_CALL].shape
        if (
            key_of(call, part) in ranges
            or len(values) % images
            or (part == ANSWERS and (is_image or values.shape[1] == 1))
        ):
            return
        flat = values.reshape(*values.shape[:2], -1)
        ranges[key_of(call, part)] = CallRange.of(call, flat, images, shape, None if part else module, part)

    def _has_channels(self, call: Call, module: nn.Module | Operation) -> bool:
        """Whether the call computes channels: a convolution, a Linear layer, an activation function, or the model."""
        if isinstance(module, Operation):
            return bool(activation_class(call.type)) or call.type.startswith(("conv", "linear"))
        return not call.name or matches_type(class_names(module), ("_ConvNd", "Linear", *ACTIVATION_FUNCTIONS), False)

    def _on_batch_norm(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensor = next(iter([*args, *kwargs.values()]), None)
        if tensor is None or getattr(module, "running_mean", None) is None:
            return
        norm = self._pass.totals.batch_norms.setdefault(call.name, BatchNormAccumulator.of(module))
        _, moments = self._pass.known.of(tensor) or ("", None)
        if moments is not None and len(moments.count) == norm.channels:
            norm.moments.merge(moments)  # measured already as the output of the layer before
            return
        norm.update(tensor)


def _left_out(model: nn.Module, chosen: Selection) -> Counter[str]:
    layers = [(name, module) for name, module in model.named_modules() if name and is_single(name, module)]
    return Counter(type(module).__name__ for name, module in layers if not chosen.calls_by_name([name]))


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_quantized or tensor.is_complex()


def _values_in(value: Any) -> Tensor | None:
    """The first tensor that has fractions and more than one axis: a loss has none."""
    tensors = (tensor for tensor in tensors_in(value).values() if tensor.dim() > 1 and tensor.numel())
    return next(filter(_has_fractions, tensors), None)


def _names_of(model: nn.Module, types: Sequence[str]) -> list[str]:
    named = model.named_modules()
    return [name for name, module in named if matches_type(class_names(module), types, is_single(name, module))]


@dataclass
class _MeasuredPass:
    """One forward pass: the names of its images and its statistics so far.

    Of a measured tensor the key is ``known``, and its moments if the channels are its second axis.
    """

    names: Sequence[str] = ()
    size: InputSize | None = None
    totals: RunningStatistics = field(default_factory=RunningStatistics)
    known: KnownTensors[tuple[str, ChannelMoments | None]] = field(default_factory=KnownTensors)
    rotations: dict[int, Tensor] = field(default_factory=dict)
    ranged: KnownTensors[bool] = field(default_factory=KnownTensors)

    @classmethod
    def of(cls, inputs: Sequence[Any], names: Sequence[str] | None, first: int, convolves: bool) -> Self:
        """A pass on ``inputs``; images without names are numbered from ``first``."""
        # only the first argument: targets of a detector hold tensors too
        images = next((value for value in inputs if tensors_in(value)), None)
        if images is None:
            return cls(names or (str(first),))
        tensors = list(tensors_in(images).values())
        shape = tensors[0].shape
        listed = tensors[0] is not images
        # (3, H, W) is an image in a list or in a model with convolutions; otherwise three axes are tokens
        single = len(shape) == 3 and (listed or convolves)
        count = len(tensors) if single else int(shape[0]) if len(shape) else 1
        size = None
        if single or len(shape) > 3:
            frames = int(shape[2]) if len(shape) == 5 else 1
            size = InputSize(int(shape[-2]), int(shape[-1]), frames, listed or not single)
        if names is None or len(names) != count:
            names = [str(first + at) for at in range(count)]
        return cls(names, size, RunningStatistics(images=count))

    def has_range(self, tensor: Tensor) -> bool:
        """Whether another call has returned ``tensor``, which was not written to since; from now on one has."""
        before = self.ranged.of(tensor)
        self.ranged.add(tensor, True)
        return bool(before)

    def images_of(self, items: int) -> Sequence[str | None]:
        """The image of each item; None if items are not images, such as the proposals of a detector."""
        if items == len(self.names):
            return self.names
        return [self.names[0]] * items if len(self.names) == 1 else [None] * items

    def rotations_of(self, items: int) -> Tensor:
        """A rotation for each item; several items of one image, such as windows, are numbered."""
        if items not in self.rotations:
            count = -(-items // max(len(self.names), 1))
            names = self.names if count == 1 else [f"{self.names[at // count]} {at % count}" for at in range(items)]
            self.rotations[items] = rotations_of(names[:items])
        return self.rotations[items]
