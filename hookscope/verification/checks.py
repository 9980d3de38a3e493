"""Six checks of what hookscope reports about a model on this machine, each against an independent judge."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.display import Rows
from hookscope.errors import HookscopeError, LayerError, ModelError, first_line
from hookscope.findings import counted
from hookscope.hooks import (
    AnyModel,
    Call,
    Layers,
    Observer,
    Selection,
    Shape,
    call_key,
    largest_difference,
    largest_value,
    random_states,
    random_states_kept,
    same_bits,
    tensors_in,
)
from hookscope.images import as_picture, list_pictures
from hookscope.models import as_loaded
from hookscope.tracing import Trace, rows_of_type, trace
from hookscope.verification.paired_passes import (
    Edge,
    PairedPasses,
    Shapes,
    attempted,
    inputs_of,
    run_fx_graph,
    run_model,
    shapes_in,
)

TOLERANCE = 1e-5
"""The largest difference from the judge that passes on a GPU, which may choose another algorithm, as a share of the
largest absolute value of the judge. On the CPU every output of torchvision's models is exact, and must be equal."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: ``feature-extractor``, ``re-computation``, ``model-output``, ``inputs``, ``untouched`` or ``shapes``.
        holds: Whether the check passes; None where it is not possible for this model.
        compared: How many values were compared.
        largest_difference: The largest absolute difference among them, None where nothing was compared.
        layer: The call, as ``name`` or ``name#call``, of the first offence where the check fails, else of the largest
            difference; empty where no value differs.
        note: More about the result, such as why the check is not possible.
    """

    name: str
    holds: bool | None
    compared: int
    largest_difference: float | None
    layer: str = ""
    note: str = ""


class CheckComparison:
    """Counts comparisons, and keeps the largest difference and the offences.

    An offence is a difference above ``tolerance`` times the largest absolute value of the judge.
    """

    def __init__(self, name: str, tolerance: float = 0.0) -> None:
        self.name, self.tolerance = name, tolerance
        self.compared = 0
        self.offences: list[str] = []
        self.largest: float | None = None
        self.layer = ""
        self.notes: list[str] = []

    def compare(self, layer: str, recorded: Any, truth: Any) -> bool:
        """Count one comparison; returns whether the two are equal, or near enough."""
        difference = largest_difference(recorded, truth)
        near = difference == 0 or difference <= self.tolerance * largest_value(truth)
        self.add(layer, difference, near)
        return near

    def add(self, layer: str, difference: float | None, near: bool) -> None:
        """Count a comparison made by the caller."""
        self.compared += 1
        if difference is not None and (self.largest is None or difference > self.largest):
            self.largest = difference
            self.layer = layer if difference else ""
        if not near:
            self.offences.append(layer)

    def check(self, nothing: str) -> Check:
        """The result; ``nothing`` is the note of a check that compared nothing."""
        if not self.compared:
            return Check(self.name, None, 0, None, note="; ".join([nothing, *self.notes]))
        layer, notes = self.layer, self.notes
        if self.offences:
            layer, notes = self.offences[0], [f"{len(self.offences)} of {self.compared} differ", *notes]
        return Check(self.name, not self.offences, self.compared, self.largest, layer, "; ".join(notes))


def verify(net: AnyModel, pictures: Any, layers: Layers = "all", types: Iterable[Any] | None = None) -> Rows[Check]:
    """Check what hookscope reports about ``net`` against independent judges.

    1. ``feature-extractor``: captured outputs equal the outputs of torchvision's feature extractor, one node at a time.
    2. ``re-computation``: the recorded input of each call, through a deep copy of its layer, gives the recorded output.
    3. ``model-output``: the model's outputs with and without hooks are the same to the bit.
    4. ``inputs``: recorded inputs equal the recorded outputs that fed them, where the graph of 1 says so.
    5. ``untouched``: hooks, modes, parameters, flags, gradients, buffers and random states are as before, after a whole
       pass and after one that an exception ended.
    6. ``shapes``: `trace`, which ``list-layers`` prints, has the calls and shapes of the real pass.

    Args:
        net: What `load_model` returned.
        pictures: Images: one, or two for optical flow; prepared, ``(3, H, W)``, or files and images of Pillow.
        layers: A selection, see `Selection`.
        types: Class names that indices and ``all`` count. None for Conv2d (Conv3d in models of clips); ``all`` then
            means every layer without children or with own parameters.

    Raises:
        LayerError: for names, types and indices that the model does not have.
        InputError: when the model refuses the pictures.

    Example:
        >>> import torch
        >>> from hookscope import load_model
        >>> net = load_model("squeezenet1_1", weights="none", device="cpu", input_size=(32, 32))
        >>> [(check.name, check.holds) for check in verify(net, [torch.rand(3, 32, 32)])][:2]
        [('feature-extractor', True), ('re-computation', True)]
    """
    return Rows(each_check(net, pictures, layers, types))


def each_check(net: AnyModel, pictures: Any, layers: Layers, types: Iterable[Any] | None) -> Iterator[Check]:
    """The checks of `verify`, each once it is known."""
    net = as_loaded(net)
    is_one = isinstance(pictures, Tensor) and pictures.dim() == len(net.preprocess.input_shape)
    given = [pictures] if is_one else pictures
    given = given if isinstance(given, Tensor) or tensors_in(given) else list_pictures(given)
    prepared = [item if isinstance(item, Tensor) else net.prepare(as_picture(item)) for item in given]
    net_tolerance = 0.0 if net.device == "cpu" else TOLERANCE
    with _quiet_pass():
        passes = PairedPasses(net, prepared, Selection.of(layers), None if types is None else tuple(types))
    check, edges = _feature_extractor(passes, net_tolerance)
    yield check
    yield _recomputation(passes, net_tolerance)
    yield _model_output(passes)
    yield _inputs(passes, edges)
    yield _untouched(passes)
    yield _shapes(passes)


@contextmanager
def _quiet_pass() -> Iterator[None]:
    """No gradients, random states put back, and on a GPU the same algorithm every time."""
    cudnn = torch.backends.cudnn
    same = cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32)
    with torch.inference_mode(False), torch.no_grad(), random_states_kept(), same:
        yield


@_quiet_pass()
def _feature_extractor(passes: PairedPasses, tolerance: float) -> tuple[Check, list[Edge] | None]:
    """The check, and which calls feed which; no edges where the graph does not run."""
    comparison = CheckComparison("feature-extractor", tolerance)
    edges = None

    def compare(key: str, output: Any) -> None:
        if key in passes.signatures:
            comparison.compare(key, passes.activations.get(key), output)

    try:
        edges = run_fx_graph(passes.model, inputs_of(passes.net, passes.pictures), compare)
    except ModelError as error:
        if not comparison.offences:
            return Check(comparison.name, None, 0, None, note=error.asked), None
    missed = len(passes.calls) - comparison.compared
    if comparison.compared and missed:
        comparison.notes.append(f"{missed} of {len(passes.calls)} calls are not nodes of the graph")
    return comparison.check("no chosen call is a node of the graph"), edges


@_quiet_pass()
def _recomputation(passes: PairedPasses, tolerance: float) -> Check:
    comparison = CheckComparison("re-computation", tolerance)
    layers = dict(passes.model.named_modules())
    uncopied = 0
    refused: list[str] = []
    for call in passes.calls:
        key = call.key
        layer, _ = attempted(partial(copy.deepcopy, layers[call.name]))
        if layer is None:
            uncopied += 1
        elif key not in passes.activations:
            comparison.add(key, math.inf, False)
            if len(comparison.offences) == 1:
                comparison.notes.append(f"'{key}' was not recorded")
        else:

            def recompute(layer: nn.Module, key: str = key) -> Any:
                args, kwargs = passes.signatures[key].copied_arguments(passes.activations.inputs[key])
                return layer(*args, **kwargs)

            again, error = attempted(partial(recompute, layer))
            if error is not None:
                refused.append(f"'{key}' cannot run alone: {first_line(error, 120)}")
                continue
            agrees = comparison.compare(key, passes.activations[key], again)
            if not agrees and len(comparison.offences) == 1:
                first, second = (recompute(copy.deepcopy(layers[call.name])) for _ in range(2))
                if largest_difference(first, second):
                    comparison.notes.append(f"'{key}' is random: two re-computations differ too")
    if refused:
        more = f", nor can {len(refused) - 1} more" if len(refused) > 1 else ""
        comparison.notes.append(refused[0] + more)
    if uncopied:
        comparison.notes.append(f"{uncopied} of {len(passes.calls)} calls are of layers that cannot be copied")
    return comparison.check("nothing can be computed again" if uncopied or refused else "no chosen layer ran")


@_quiet_pass()
def _model_output(passes: PairedPasses) -> Check:
    comparison = CheckComparison("model-output")
    plain_tensors, hooked_tensors = tensors_in(passes.plain), tensors_in(passes.hooked)
    for part in dict.fromkeys([*plain_tensors, *hooked_tensors]):
        pair = plain_tensors.get(part), hooked_tensors.get(part)
        same = same_bits(*pair)
        comparison.add("", largest_difference(*pair), same)
        if not same and part:
            comparison.notes.append(f"part '{part}' of the output")
    if comparison.offences and not same_bits(passes.plain, run_model(passes.net, passes.pictures)):
        comparison.notes.append("two passes without hooks differ too: the model is random or keeps a state")
    return comparison.check("the model returns no tensor")


def _inputs(passes: PairedPasses, edges: list[Edge] | None) -> Check:
    comparison, kept = CheckComparison("inputs"), passes.activations
    if edges is None:
        return comparison.check("there is no graph")
    for edge in edges:
        if not edge.overwritten and edge.source in kept and edge.target in kept:
            args, kwargs = passes.signatures[edge.target].arguments(kept.inputs[edge.target])
            named = dict(enumerate(args)) | kwargs
            comparison.compare(edge.target, named.get(edge.argument), kept[edge.source])
    if overwritten := sum(edge.overwritten for edge in edges):
        comparison.notes.append(f"{counted(overwritten, 'input')} overwritten in place, not compared")
    return comparison.check("no chosen call feeds another")


@_quiet_pass()
def _untouched(passes: PairedPasses) -> Check:
    comparison = CheckComparison("untouched")
    changes = [*passes.changes, *passes.changes_after_exception()]
    comparison.compared = 2 * passes.parts
    comparison.largest = max((change.difference for change in changes if change.difference is not None), default=0.0)
    for change in changes:
        drawn = change.what.startswith("random state")
        comparison.offences.append(_first_random_leaf(passes) if drawn else change.layer)
    if changes:
        layer, what = changes[0].layer, changes[0].what
        when = "" if passes.changes else " by a pass left half-way"
        own = any((other.layer, other.what) == (layer, what) for other in passes.own_changes)
        comparison.notes.append(f"{what} changed{when}" + ", without hooks too: the layer itself changes it" * own)
    return comparison.check("")


def _first_random_leaf(passes: PairedPasses) -> str:
    """The first leaf that draws a random number; empty when no leaf does."""
    keys: list[str] = []

    def note(call: Call, *rest: Any) -> None:
        if observer.input != random_states():
            keys.append(call.key)

    observer = Observer(passes.model, "all", ("all",), note, on_input=lambda *call: random_states())
    with random_states_kept(), observer:
        run_model(passes.net, passes.pictures)
    return next(iter(keys), "")


@_quiet_pass()
def _shapes(passes: PairedPasses) -> Check:
    comparison = CheckComparison("shapes")
    try:
        traced = trace(passes.model, inputs_of(passes.net, passes.pictures))
    except HookscopeError as error:
        return Check(comparison.name, None, 0, None, note=str(error)[:160])
    comparison.notes += ["traced by a real pass: the model needs values"] if traced.real else []
    rows = {(row.name, row.call): row for row in rows_of_type(traced, ("*",))}
    indices = _indices(traced, passes.types)
    for call in passes.calls:
        row = rows.get((call.name, call.call))
        real = (*passes.signatures[call.key].shapes, *shapes_in(passes.activations.get(call.key)))
        shapes = (*_flat(row.input_shape), *_flat(row.output_shape)) if row is not None else ()
        same_call = row is not None and indices.get((call.name, call.call)) == call.index
        comparison.add(call.key, _largest_shape_difference(real, shapes), same_call and real == shapes)
    if passes.total != len(indices):
        comparison.notes.append(f"the trace has {len(indices)} calls, the pass {passes.total}")
        ran = {(call.name, call.call) for call in passes.calls}
        lost = next((call_key(*call) for call in indices if call not in ran), "")
        comparison.add(comparison.offences[0] if comparison.offences else lost, None, False)
    return comparison.check("no chosen layer ran")


def _indices(traced: Trace, types: Iterable[Any] | None) -> dict[tuple[str, int], int]:
    """The index that ``list-layers`` prints for each call of the types."""
    try:
        rows = rows_of_type(traced, types)
    except LayerError:  # no layer of the types: all were selected by name
        return {}
    return {(row.name, row.call): row.index for row in rows if row.index is not None and row.call is not None}


def _flat(shape: Shape) -> Shapes:
    if shape is None:
        return ()
    return tuple(shape.values()) if isinstance(shape, dict) else (shape,)


def _largest_shape_difference(shapes: Shapes, others: Shapes) -> float:
    """The largest difference between two sides of the same tensors; infinite for other numbers of axes."""
    if [len(shape) for shape in shapes] != [len(shape) for shape in others]:
        return math.inf
    pairs = zip(shapes, others, strict=True)
    return float(max((abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True)), default=0))
