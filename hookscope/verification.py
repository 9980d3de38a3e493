"""Does hookscope tell the truth about this model on this machine? Six checks, each against an independent judge."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hookscope.differences import largest_difference, same_bits
from hookscope.errors import HookscopeError, ModelError
from hookscope.layers import Call, Layers, call_key
from hookscope.node_by_node import run_node_by_node
from hookscope.observe import Observer
from hookscope.recorder import TracedCall
from hookscope.tensors import Shape, tensors_in
from hookscope.trace import Trace, rows_of_type, trace
from hookscope.untouched import Change, State, random_states, random_states_kept
from hookscope.witness import Witness

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookscope.models import Net

__all__ = ["TOLERANCE", "Check", "noise_pictures", "verify"]

TOLERANCE = 0.0
"""How far a value may be from its judge's, relative to the largest absolute value of the output."""


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found.

    Attributes:
        name: ``feature-extractor``, ``re-computation``, ``model-output``, ``inputs``, ``untouched`` or ``shapes``.
        holds: Whether all is as it must be; None where the check is not possible for this model.
        compared: How many things were compared.
        largest_difference: The largest absolute difference among them, None where nothing was compared.
        layer: Where it is, as ``name`` or ``name#call``: the first offence where the check fails, else the largest
            difference; empty where there is none.
        note: What else is to be known, such as why the check is not possible.
    """

    name: str
    holds: bool | None
    compared: int
    largest_difference: float | None
    layer: str = ""
    note: str = ""


def verify(
    net: Net, pictures: Sequence[Tensor], layers: Layers = "all", types: Iterable[Any] = ("all",)
) -> Iterator[Check]:
    """Check what hookscope says of ``net`` against independent judges; yields each `Check` as soon as it is known.

    1. ``feature-extractor``: captured outputs equal those of torchvision's feature extractor, one node at a time.
    2. ``re-computation``: the recorded input of each call, through a deep copy of its layer, gives the recorded output.
    3. ``model-output``: the model's outputs with and without hooks are the same to the bit.
    4. ``inputs``: recorded inputs equal the recorded outputs that fed them, where the graph of 1 says so.
    5. ``untouched``: hooks, modes, parameters, flags, gradients, buffers and random states are as before, after a whole
       pass and after one that was left by an exception.
    6. ``shapes``: `hookscope.trace.trace`, which ``list-layers`` prints, tells the calls and shapes of the real pass.

    Args:
        net: What `hookscope.models.load_model` returned.
        pictures: Prepared pictures, as `noise_pictures` or ``net.preprocess`` make them: one, or two for optical flow.
        layers: A selection, see `hookscope.layers.Selection`.
        types: Class names that indices count; every leaf by default.

    Raises:
        LayerError: for names, types and indices that the model does not have.
        InputError: when the model refuses the pictures.

    Example:
        >>> from hookscope.models import load_model
        >>> net = load_model("squeezenet1_1", weights="none", input_size=(32, 32))
        >>> [(check.name, check.holds) for check in verify(net, noise_pictures(net))][:2]
        [('feature-extractor', True), ('re-computation', True)]
    """
    seen = Witness(net, list(pictures), layers, tuple(types))
    with _quiet_pass():
        seen.take()
    for check in (_feature_extractor, _recomputation, _model_output, _inputs, _untouched, _shapes):
        with _quiet_pass():
            found = check(seen)
        yield found


def noise_pictures(net: Net, seed: int = 0) -> list[Tensor]:
    """Prepared pictures of seeded noise in the size ``net`` is made for; the global random state is not touched.

    Returns:
        One tensor ``(3, H, W)``, or ``(3, T, H, W)`` for clips, two for optical flow; uniform in 0..1 for detection
        and in -1..1 for optical flow, standard normal for the others.
    """
    import torch

    wanted = net.preprocess
    frames = [wanted.frames] if net.family == "video" else []
    shape = [wanted.channels, *frames, *(wanted.size or wanted.default_size)]
    generator = torch.Generator().manual_seed(seed)
    count = 2 if net.family == "optical_flow" else 1
    if net.family == "detection":
        noise = [torch.rand(shape, generator=generator)]
    elif net.family == "optical_flow":
        noise = [torch.rand(shape, generator=generator) * 2 - 1 for _ in range(count)]
    else:
        noise = [torch.randn(shape, generator=generator)]
    return [picture.to(wanted.device, wanted.dtype) for picture in noise]


@contextmanager
def _quiet_pass() -> Iterator[None]:
    """No gradients, no random number missed by anybody, and on a GPU the same algorithm every time."""
    import torch

    cudnn = torch.backends.cudnn
    same = cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32)
    with torch.inference_mode(False), torch.no_grad(), random_states_kept(), same:
        yield


class _Tally:
    """Counts comparisons, and remembers the largest difference and the first that is too large."""

    def __init__(self, name: str, tolerance: float = 0.0) -> None:
        self.name, self.tolerance = name, tolerance
        self.compared = 0
        self.offences: list[str] = []
        self.largest: float | None = None
        self.layer = ""
        self.notes: list[str] = []

    def compare(self, layer: str, recorded: Any, truth: Any) -> bool:
        """Count one comparison; whether the two are equal, or near enough."""
        difference = largest_difference(recorded, truth)
        near = difference == 0 or difference <= self.tolerance * _largest_value(truth)
        self.add(layer, difference, near)
        return near

    def add(self, layer: str, difference: float | None, near: bool) -> None:
        """Count one comparison that was made elsewhere."""
        self.compared += 1
        if difference is not None and (self.largest is None or difference > self.largest):
            self.largest = difference
            self.layer = layer if difference else ""
        if not near:
            self.offences.append(layer)

    def check(self, nothing: str) -> Check:
        """What was found; ``nothing`` says why there was nothing to compare."""
        if not self.compared:
            return Check(self.name, None, 0, None, note="; ".join([nothing, *self.notes]))
        if not self.offences:
            return Check(self.name, True, self.compared, self.largest, self.layer, "; ".join(self.notes))
        note = f"{len(self.offences)} of {self.compared} differ"
        return Check(self.name, False, self.compared, self.largest, self.offences[0], "; ".join([note, *self.notes]))


def _largest_value(value: Any) -> float:
    """The largest finite absolute value in a layer's output."""
    sizes = [_magnitude(tensor) for tensor in tensors_in(value).values()]
    return max(sizes, default=0.0)


def _magnitude(tensor: Tensor) -> float:
    tensor = (tensor.dequantize() if tensor.is_quantized else tensor).detach()
    return float(tensor.abs().double().nan_to_num(0, 0, 0).max()) if tensor.numel() else 0.0


def _feature_extractor(seen: Witness) -> Check:
    tally = _Tally("feature-extractor")

    def compare(key: str, output: Any) -> None:
        if key in seen.forms and key in seen.kept:
            tally.compare(key, seen.kept[key], output)

    try:
        seen.edges = run_node_by_node(seen.model, seen.inputs(), compare)
    except ModelError as error:
        if not tally.offences:
            return Check(tally.name, None, 0, None, note=error.asked)
    idle = len(seen.calls) - tally.compared
    if tally.compared and idle:
        tally.notes.append(f"{idle} of {len(seen.calls)} calls are no node of the graph")
    return tally.check("no wanted call is a node of the graph")


def _recomputation(seen: Witness) -> Check:
    tally = _Tally("re-computation", TOLERANCE)
    layers = dict(seen.model.named_modules())
    for call in seen.calls:
        key = call.key

        def recompute(key: str = key, layer: nn.Module = layers[call.name]) -> Any:
            args, kwargs = seen.forms[key].copied(seen.recorded(key))
            return copy.deepcopy(layer)(*args, **kwargs)

        found = recompute()
        near = tally.compare(key, seen.kept[key], found)
        if not near and len(tally.offences) == 1 and largest_difference(found, recompute()):
            tally.notes.append(f"'{key}' is random: two re-computations differ too")
    return tally.check("no wanted layer ran")


def _model_output(seen: Witness) -> Check:
    tally = _Tally("model-output")
    plain, hooked = tensors_in(seen.plain), tensors_in(seen.hooked)
    for part in dict.fromkeys([*plain, *hooked]):
        one, other = plain.get(part), hooked.get(part)
        same = same_bits(one, other)
        tally.add("", largest_difference(one, other), same)
        if not same and part:
            tally.notes.append(f"part '{part}' of the output")
    if tally.offences and not same_bits(seen.plain, seen.run()):
        tally.notes.append("two passes without hooks differ too: the model is random or keeps a state")
    seen.plain = seen.hooked = None
    return tally.check("the model puts out no tensor")


def _inputs(seen: Witness) -> Check:
    tally = _Tally("inputs")
    for edge in seen.edges.edges if seen.edges is not None else ():
        if edge.source in seen.kept and edge.target in seen.kept:
            tally.compare(edge.target, _input_part(seen, edge.target, edge.argument), seen.kept[edge.source])
    if seen.edges is not None and seen.edges.overwritten:
        tally.notes.append(f"{seen.edges.overwritten} inputs were overwritten on the way, and are not compared")
    seen.kept.clear()
    return tally.check("there is no graph" if seen.edges is None else "no wanted call feeds another")


def _input_part(seen: Witness, key: str, argument: int | str) -> Any:
    args, kwargs = seen.forms[key].given(seen.recorded(key))
    if isinstance(argument, int):
        return args[argument] if argument < len(args) else None
    return kwargs.get(argument)


def _untouched(seen: Witness) -> Check:
    state = State(seen.model)
    with random_states_kept():
        seen.leave_early()
        left = state.changes()
    tally = _Tally("untouched")
    tally.compared = seen.facts + len(state)
    changes = [*seen.changes, *left]
    tally.largest = max((change.difference for change in changes if change.difference is not None), default=0.0)
    for change in changes:
        drawn = change.what.startswith("random state")
        tally.offences.append(_who_draws(seen) if drawn else change.layer)
    if changes:
        tally.notes.append(_about(changes[0], seen))
    return tally.check("")


def _about(change: Change, seen: Witness) -> str:
    own = any((other.layer, other.what) == (change.layer, change.what) for other in seen.by_itself)
    when = "" if seen.changes else " by a pass left half-way"
    return f"{change.what} changed{when}" + (", without hooks too: the layer does it" if own else "")


def _who_draws(seen: Witness) -> str:
    """The first leaf that draws a random number; empty when none of them does."""
    drew: list[str] = []

    def note(call: Call, *rest: Any) -> None:
        if observer.input != random_states():
            drew.append(call.key)

    observer = Observer(seen.model, "all", ("all",), note, on_input=lambda *call: random_states())
    with random_states_kept(), observer:
        seen.run()
    return next(iter(drew), "")


def _shapes(seen: Witness) -> Check:
    tally = _Tally("shapes")
    try:
        found = trace(seen.model, seen.inputs())
    except HookscopeError as error:
        return Check(tally.name, None, 0, None, note=str(error)[:160])
    tally.notes += ["traced by a real pass: the model wants values"] if found.real else []
    told, indices = _calls_of(found), _indices(seen, found)
    for call in seen.calls:
        row, real = told.get((call.name, call.call)), seen.shapes[call.key]
        shapes = (*_flat(row.input_shape), *_flat(row.output_shape)) if row is not None else ()
        known = row is not None and indices.get((call.name, call.call)) == call.index
        tally.add(call.key, _apart(real, shapes), known and real == shapes)
    if seen.total is not None and seen.total != len(indices):
        tally.notes.append(f"the trace has {len(indices)} calls, the pass {seen.total}")
        tally.add(tally.offences[0] if tally.offences else _first_lost(seen, indices), None, False)
    return tally.check("no wanted layer ran")


def _first_lost(seen: Witness, indices: dict[tuple[str, int], int]) -> str:
    """The first call that the trace has and the pass has not."""
    ran = {(call.name, call.call) for call in seen.calls}
    return next((call_key(*call) for call in indices if call not in ran), "")


def _calls_of(found: Trace) -> dict[tuple[str, int], TracedCall]:
    times: Counter[int] = Counter()
    calls = {}
    for call in found.calls:
        calls[found.layers[call.layer].name, times[call.layer]] = call
        times[call.layer] += 1
    return calls


def _indices(seen: Witness, found: Trace) -> dict[tuple[str, int], int]:
    """The index that ``list-layers`` prints for each call; empty where the selection counts none."""
    if seen.total is None:
        return {}
    rows = rows_of_type(found, seen.types)
    return {(row.name, row.call): row.index for row in rows if row.index is not None and row.call is not None}


def _flat(shape: Shape) -> tuple[tuple[int, ...], ...]:
    if shape is None:
        return ()
    return tuple(shape.values()) if isinstance(shape, dict) else (shape,)


def _apart(some: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> float:
    """The largest difference between two sides of shapes of the same tensors; infinite for other tensors."""
    if [len(shape) for shape in some] != [len(shape) for shape in others]:
        return math.inf
    pairs = zip(some, others, strict=True)
    return float(max((abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True)), default=0))
