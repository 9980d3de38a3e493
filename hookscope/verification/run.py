"""Does hookscope tell the truth about this model on this machine? Six checks, each against an independent judge."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import HookscopeError, LayerError, ModelError, is_out_of_memory
from hookscope.hooks import (
    Call,
    Layers,
    ModelSnapshot,
    Observer,
    Shape,
    StateChange,
    call_key,
    largest_difference,
    random_states,
    random_states_kept,
    same_bits,
    tensors_in,
)
from hookscope.models import LoadedModel
from hookscope.tracing import Trace, TracedCall, rows_of_type, trace
from hookscope.verification.checks import Check, Comparison
from hookscope.verification.fx_reference import run_fx_graph
from hookscope.verification.paired_passes import PairedPasses

TOLERANCE = 1e-5
"""How far an output may be from its judge's on a GPU, relative to its largest absolute value: there a layer may choose
another algorithm. On the CPU every output of torchvision's models is exact, and nothing less passes."""


def verify(
    net: LoadedModel, pictures: Sequence[Tensor], layers: Layers = "all", types: Iterable[Any] = ("all",)
) -> Iterator[Check]:
    """Check what hookscope says of ``net`` against independent judges; yields each `Check` as soon as it is known.

    1. ``feature-extractor``: captured outputs equal those of torchvision's feature extractor, one node at a time.
    2. ``re-computation``: the recorded input of each call, through a deep copy of its layer, gives the recorded output.
    3. ``model-output``: the model's outputs with and without hooks are the same to the bit.
    4. ``inputs``: recorded inputs equal the recorded outputs that fed them, where the graph of 1 says so.
    5. ``untouched``: hooks, modes, parameters, flags, gradients, buffers and random states are as before, after a whole
       pass and after one that was left by an exception.
    6. ``shapes``: `trace`, which ``list-layers`` prints, tells the calls and shapes of the real pass.

    Args:
        net: What `load_model` returned.
        pictures: Prepared pictures, as `noise_pictures` or ``net.preprocess`` make them: one, or two for optical flow.
        layers: A selection, see `Selection`.
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
    seen = PairedPasses(net, list(pictures), layers, tuple(types))
    with _quiet_pass():
        seen.take()
    for check in (_feature_extractor, _recomputation, _model_output, _inputs, _untouched, _shapes):
        with _quiet_pass():
            found = check(seen)
        yield found


@contextmanager
def _quiet_pass() -> Iterator[None]:
    """No gradients, no random number missed by anybody, and on a GPU the same algorithm every time."""
    cudnn = torch.backends.cudnn
    same = cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32)
    with torch.inference_mode(False), torch.no_grad(), random_states_kept(), same:
        yield


def _tolerance(seen: PairedPasses) -> float:
    return 0.0 if seen.net.device == "cpu" else TOLERANCE


def _feature_extractor(seen: PairedPasses) -> Check:
    comparison = Comparison("feature-extractor", _tolerance(seen))

    def compare(key: str, output: Any) -> None:
        if key in seen.forms:
            comparison.compare(key, seen.kept.get(key), output)

    try:
        seen.edges = run_fx_graph(seen.model, seen.inputs(), compare)
    except ModelError as error:
        if not comparison.offences:
            return Check(comparison.name, None, 0, None, note=error.asked)
    idle = len(seen.calls) - comparison.compared
    if comparison.compared and idle:
        comparison.notes.append(f"{idle} of {len(seen.calls)} calls are no node of the graph")
    return comparison.check("no wanted call is a node of the graph")


def _recomputation(seen: PairedPasses) -> Check:
    comparison = Comparison("re-computation", _tolerance(seen))
    layers = dict(seen.model.named_modules())
    uncopied = 0
    for call in seen.calls:
        layer = _copied(layers[call.name])
        if layer is None:
            uncopied += 1
        elif not _compare_again(comparison, seen, call.key, layer) and len(comparison.offences) == 1:
            comparison.notes += _why_not(seen, call.key, layers[call.name])
    if uncopied:
        comparison.notes.append(f"{uncopied} of {len(seen.calls)} calls are of layers that cannot be copied")
    return comparison.check("nothing can be computed again" if uncopied else "no wanted layer ran")


def _copied(layer: nn.Module) -> nn.Module | None:
    """A copy of a layer; None where it holds something that has none, such as a tensor in an autograd graph."""
    try:
        return copy.deepcopy(layer)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None


def _compare_again(comparison: Comparison, seen: PairedPasses, key: str, layer: nn.Module) -> bool:
    """Compare what ``layer`` makes of the recorded input with the recorded output; whether they agree."""
    if key not in seen.kept:
        comparison.add(key, math.inf, False)
        return False
    args, kwargs = seen.forms[key].copied(seen.recorded(key))
    return comparison.compare(key, seen.kept[key], layer(*args, **kwargs))


def _why_not(seen: PairedPasses, key: str, layer: nn.Module) -> list[str]:
    """What is to be known of a layer whose re-computation differs: two of them may differ from each other."""
    if key not in seen.kept:
        return [f"'{key}' was not recorded"]
    two = [copy.deepcopy(layer), copy.deepcopy(layer)]
    inputs = [seen.forms[key].copied(seen.recorded(key)) for _ in two]
    one, other = (twin(*args, **kwargs) for twin, (args, kwargs) in zip(two, inputs, strict=True))
    return [f"'{key}' is random: two re-computations differ too"] if largest_difference(one, other) else []


def _model_output(seen: PairedPasses) -> Check:
    comparison = Comparison("model-output")
    plain, hooked = tensors_in(seen.plain), tensors_in(seen.hooked)
    for part in dict.fromkeys([*plain, *hooked]):
        one, other = plain.get(part), hooked.get(part)
        same = same_bits(one, other)
        comparison.add("", largest_difference(one, other), same)
        if not same and part:
            comparison.notes.append(f"part '{part}' of the output")
    if comparison.offences and not same_bits(seen.plain, seen.run()):
        comparison.notes.append("two passes without hooks differ too: the model is random or keeps a state")
    seen.plain = seen.hooked = None
    return comparison.check("the model puts out no tensor")


def _inputs(seen: PairedPasses) -> Check:
    comparison = Comparison("inputs")
    for edge in seen.edges.edges if seen.edges is not None else ():
        if edge.source in seen.kept and edge.target in seen.kept:
            comparison.compare(edge.target, _input_part(seen, edge.target, edge.argument), seen.kept[edge.source])
    if seen.edges is not None and seen.edges.overwritten:
        comparison.notes.append(f"{seen.edges.overwritten} inputs were overwritten on the way, and are not compared")
    seen.kept.clear()
    return comparison.check("there is no graph" if seen.edges is None else "no wanted call feeds another")


def _input_part(seen: PairedPasses, key: str, argument: int | str) -> Any:
    args, kwargs = seen.forms[key].given(seen.recorded(key))
    if isinstance(argument, int):
        return args[argument] if argument < len(args) else None
    return kwargs.get(argument)


def _untouched(seen: PairedPasses) -> Check:
    state = ModelSnapshot(seen.model)
    with random_states_kept():
        seen.leave_early()
        left = state.changes()
    comparison = Comparison("untouched")
    comparison.compared = seen.facts + len(state)
    changes = [*seen.changes, *left]
    comparison.largest = max((change.difference for change in changes if change.difference is not None), default=0.0)
    for change in changes:
        drawn = change.what.startswith("random state")
        comparison.offences.append(_who_draws(seen) if drawn else change.layer)
    if changes:
        comparison.notes.append(_about(changes[0], seen))
    return comparison.check("")


def _about(change: StateChange, seen: PairedPasses) -> str:
    own = any((other.layer, other.what) == (change.layer, change.what) for other in seen.by_itself)
    when = "" if seen.changes else " by a pass left half-way"
    return f"{change.what} changed{when}" + (", without hooks too: the layer does it" if own else "")


def _who_draws(seen: PairedPasses) -> str:
    """The first leaf that draws a random number; empty when none of them does."""
    drew: list[str] = []

    def note(call: Call, *rest: Any) -> None:
        if observer.input != random_states():
            drew.append(call.key)

    observer = Observer(seen.model, "all", ("all",), note, on_input=lambda *call: random_states())
    with random_states_kept(), observer:
        seen.run()
    return next(iter(drew), "")


def _shapes(seen: PairedPasses) -> Check:
    comparison = Comparison("shapes")
    try:
        found = trace(seen.model, seen.inputs())
    except HookscopeError as error:
        return Check(comparison.name, None, 0, None, note=str(error)[:160])
    comparison.notes += ["traced by a real pass: the model wants values"] if found.real else []
    told, indices = _calls_of(found), _indices(seen, found)
    for call in seen.calls:
        row, real = told.get((call.name, call.call)), seen.shapes[call.key]
        shapes = (*_flat(row.input_shape), *_flat(row.output_shape)) if row is not None else ()
        known = row is not None and indices.get((call.name, call.call)) == call.index
        comparison.add(call.key, _apart(real, shapes), known and real == shapes)
    if seen.total != len(indices):
        comparison.notes.append(f"the trace has {len(indices)} calls, the pass {seen.total}")
        comparison.add(comparison.offences[0] if comparison.offences else _first_lost(seen, indices), None, False)
    return comparison.check("no wanted layer ran")


def _first_lost(seen: PairedPasses, indices: dict[tuple[str, int], int]) -> str:
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


def _indices(seen: PairedPasses, found: Trace) -> dict[tuple[str, int], int]:
    """The index that ``list-layers`` prints for each call of the types."""
    try:
        rows = rows_of_type(found, seen.types)
    except LayerError:  # no layer of the types: all were selected by name
        return {}
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
