"""The cost of running a model: memory, arithmetic and time, of each call and in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hookscope.display import Cells, RowTuple, Shown
from hookscope.hooks import Call, Pixels, Shape


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of repeated passes: the median, and the range of the middle half."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, repr=False)
class CallCost(Shown):
    """What one call costs for the whole batch, without the calls inside it.

    Attributes:
        call: The call; an operation outside of modules where its ``name`` has ``::``.
        input_shape: With the batch axis.
        output_shape: Shape of the first output tensor, in the same form.
        params: Parameters that the layer holds itself; a layer that is called twice counts at its first call.
        macs: Multiply-accumulates.
        bytes_moved: Inputs, outputs and parameters of each operation of torch in the call, without views.
        saved: Bytes that autograd keeps for the backward pass and that no earlier call kept; 0 for inference.
        bound: ``memory`` or ``arithmetic``: what limits the speed of the call on the device; empty without MACs and
            bytes.
        receptive_field: Height and width in pixels of the part of the input that a unit of the output depends on, as in
            `LayerCall`; None where it is not known.
        stride: Pixels of the input from one unit to the next, down and to the right; None without positions.
        effective_field: Side in pixels of a square with as many pixels as the middle unit reacts to: those with a
            gradient above 4.55 % of the largest (arXiv:1701.04128). None where it was not measured.
        forward: Measured time of the forward pass of the call; None if it was not measured.
        backward: The same of the backward pass.
    """

    call: Call
    input_shape: Shape
    output_shape: Shape
    params: int
    macs: int
    bytes_moved: int
    saved: int
    bound: str = ""
    receptive_field: Pixels | None = None
    stride: Pixels | None = None
    effective_field: float | None = None
    forward: Timing | None = None
    backward: Timing | None = None

    def _cells(self) -> Cells:
        names = ("output_shape", "params", "macs", "bytes_moved", "saved", "receptive_field")
        cells = {"layer": self.call.key, "type": self.call.type} | {name: getattr(self, name) for name in names}
        return cells | {"forward": self.forward.median if self.forward else None}


@dataclass(frozen=True, slots=True, repr=False)
class MemoryPlan(Shown):
    """Bytes of one step, by what they hold.

    Attributes:
        parameters: Of the model, each once.
        buffers: Such as the running statistics of BatchNorm.
        gradients: Of the parameters, 0 for inference.
        optimizer: State of the optimizer, 0 for inference.
        input: The batch.
        saved: Activations that autograd keeps for the backward pass, each storage once and without the parameters,
            buffers and the batch, 0 for inference.
        temporary: Other bytes at the peak: outputs that are not kept, and gradients of activations.
        peak: The largest sum at any time of a step. Not all of the above exist at that time.
        at_peak: What exists at that time, by the names above; adds up to ``peak``.
        peak_in: The part of the step that reaches the peak: ``forward``, ``backward`` or ``optimizer``.
        peak_call: Key of the call that runs then; in ``backward``, of the call whose gradient is computed. Empty if not
            known.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    input: int
    saved: int
    temporary: int
    peak: int
    at_peak: Mapping[str, int] = field(default_factory=dict)
    peak_in: str = ""
    peak_call: str = ""

    def _cells(self) -> Cells:
        return {name: getattr(self, name) for name in type(self).__slots__ if name != "at_peak"}


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan beside what was measured on the device.

    Attributes:
        device: Its name.
        saved: Bytes that autograd kept, 0 for inference.
        peak: Largest number of bytes of tensors at any time; None if the device does not report it.
        forward: Time of the whole forward pass.
        backward: Time of the whole backward pass; None for inference.
        optimizer: Time of one step of the optimizer; None for inference.
        repeats: Number of timed passes, after ``warm_up`` passes that were not timed.
        warm_up: Number of passes before them.
        macs_per_second: Multiply-accumulates of a large matrix product in a second.
        bytes_per_second: Bytes that a large copy reads and writes in a second.
    """

    device: str
    saved: int
    peak: int | None
    forward: Timing
    backward: Timing | None
    optimizer: Timing | None
    repeats: int
    warm_up: int
    macs_per_second: float = 0.0
    bytes_per_second: float = 0.0


@dataclass(frozen=True, repr=False)
class Plan(Shown, rows="calls"):
    """What `plan` found.

    Attributes:
        model: The MODEL argument, or the class of the module.
        input_shape: Of the batch.
        dtype: Data type of parameters and activations, such as ``float32``.
        device: For which it was planned.
        optimizer: Name of the optimizer in lower case; empty for inference.
        checkpointed: Names of blocks that are computed again in the backward pass.
        calls: Every call of a leaf and every call that computes itself, in order of execution.
        memory: Bytes of one step.
        limit: The memory of the device in bytes; None if it was not given.
        largest_batch: The largest batch that fits into ``limit``; 0 if not even one image does, None without ``limit``.
        real: Whether the plan needed a pass with values.
        measured: What was measured, if it was wanted.
        notes: What the reader should know.
    """

    model: str
    input_shape: Shape
    dtype: str
    device: str
    optimizer: str
    checkpointed: tuple[str, ...]
    calls: RowTuple[CallCost]
    memory: MemoryPlan
    limit: int | None = None
    largest_batch: int | None = None
    real: bool = False
    measured: Measured | None = None
    notes: tuple[str, ...] = ()

    def _cells(self) -> Cells:
        return {
            "model": self.model,
            "input": self.input_shape,
            "params": sum(call.params for call in self.calls),
            "macs": sum(call.macs for call in self.calls),
            "peak": self.memory.peak,
            "largest_batch": self.largest_batch,
        }
