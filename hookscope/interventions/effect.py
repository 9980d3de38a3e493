"""The effect of interventions: a pass without and a pass with them, how far activations moved, and which classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.display import Cells, RowTuple, Shown
from hookscope.hooks import (
    AnyModel,
    Call,
    Layers,
    Observer,
    Selection,
    Shape,
    as_float,
    buffers_kept,
    capture,
    holder_of,
    layers_with_weights,
    map_tensors,
    module_of,
    output_of,
    random_states_kept,
    shape_of,
    tensors_in,
)
from hookscope.interventions.context import Changes, intervene, pairs_of
from hookscope.models import takes_inputs
from hookscope.scores import Target, check_categories, class_label, class_scores, one_picture, probabilities

_BEST = Target("top:5")
_FOLLOWING = 2  # calls after a changed one that are kept with it


@dataclass(frozen=True, slots=True)
class ClassChange:
    """A class in the passes without and with interventions.

    Attributes:
        index: Index of the class.
        label: Its name, None without names.
        target: Whether `class_changes` was asked about the class.
        score: The logit without interventions; ``score_after`` is the logit with them.
        change: ``score_after - score``.
        probability: Softmax probability without interventions, 0 to 1; ``probability_after`` is the one with them.
        rank: Place by score without interventions, from 1; ``rank_after`` is the place with them.
    """

    index: int
    label: str | None
    target: bool
    score: float
    score_after: float
    change: float
    probability: float
    probability_after: float
    rank: int
    rank_after: int


def class_changes(
    before: Any,
    after: Any,
    target: Target | str | int = "top:1",
    categories: Sequence[str] | None = None,
    model: str = "the model",
) -> list[ClassChange]:
    """Compare the five best classes of both outputs and the target: first the order of ``before``, then of ``after``.

    Example:
        >>> import torch
        >>> changes = class_changes(torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
        >>> [(change.index, change.target, change.change, change.rank_after) for change in changes]
        [(0, True, -2.0, 2), (1, False, 0.0, 1)]
    """
    tensors = [one_picture(class_scores(output, model)) for output in (before, after)]
    if categories:
        check_categories(categories, len(tensors[0]), model)
    scores = [tensor.detach().cpu().double().tolist() for tensor in tensors]
    shares = [probabilities(tensor).tolist() for tensor in tensors]
    orders = [Target(f"top:{len(values)}").indices(values, None) for values in scores]
    ranks = [{index: rank for rank, index in enumerate(order, 1)} for order in orders]
    targets = Target.of(target).indices(scores[0], categories)
    shown = dict.fromkeys([*_BEST.indices(scores[0], None), *_BEST.indices(scores[1], None), *targets])
    changes = []
    for index in shown:
        score, share = (scores[0][index], scores[1][index]), (shares[0][index], shares[1][index])
        rank, label = (ranks[0][index], ranks[1][index]), class_label(index, categories)
        changes.append(ClassChange(index, label, index in targets, *score, score[1] - score[0], *share, *rank))
    return changes


@dataclass(frozen=True, slots=True, repr=False)
class MovedLayer(Shown):
    """A call, and how far its activation moved.

    Attributes:
        call: The call.
        shape: Shape of its output with the interventions.
        changed: Whether an intervention acted on this call itself, or on a direct parameter of its layer.
        relative_l2: Norm of the difference divided by the norm before, from 0; None if the shapes differ, inf if the
            output was 0 before, NaN if values are not finite.
        cosine: Cosine of the angle between before and after, -1 to 1; None if one of them is 0 or not finite, or the
            shapes differ.
        nonfinite: Number of NaN and Inf afterwards.
        before: The output without interventions, if it was kept.
        after: The output with the interventions, if it was kept.
    """

    call: Call
    shape: Shape
    changed: bool
    relative_l2: float | None
    cosine: float | None
    nonfinite: int
    before: Any = None
    after: Any = None

    def _cells(self) -> Cells:
        names = ("shape", "changed", "relative_l2", "cosine", "nonfinite")
        return {"index": self.call.index, "name": self.call.key} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, repr=False)
class Effect(Shown, rows="layers"):
    """A pass without and a pass with interventions.

    Attributes:
        before: Output of the model without interventions.
        after: Output with them.
        layers: The chosen calls from the first changed one on, in order of execution.
        changed: How often each call and parameter was changed, by key and name.
        missing: Keys of chosen calls in only one of the passes, such as calls of a head for another number of boxes.
        changes: Where each intervention acts, and what it is: ``conv3 Zero``.
    """

    before: Any
    after: Any
    layers: RowTuple[MovedLayer]
    changed: dict[str, int]
    missing: tuple[str, ...]
    changes: tuple[str, ...] = ()

    def _cells(self) -> Cells:
        return {"changed": ", ".join(self.changed), "layers": len(self.layers), "missing": ", ".join(self.missing)}


@takes_inputs
def intervention_effect(
    model: AnyModel,
    inputs: tuple[Any, ...],
    changes: Changes,
    layers: Layers | None = None,
    types: Iterable[Any] | None = None,
    *,
    seed: int | None = None,
    keep: Layers | None = None,
    keep_changed: bool = False,
) -> Effect:
    """Run ``model`` without and with ``changes``, and measure how far the activations of chosen calls moved.

    Both passes draw the same random numbers, apart from the interventions' own. The model and the random state
    stay as they are.

    Args:
        model: Any eager module in its current mode.
        inputs: Its positional inputs.
        changes: Interventions as `hookscope.intervene` takes them.
        layers: Calls to measure; None for changed calls and layers with a weight of two or more dimensions.
        types: Class names that indices count; None for Conv2d (Conv3d in models of clips).
        seed: Seed of the random numbers in both passes; None continues from the current random state.
        keep: Calls whose activations are kept for drawing.
        keep_changed: Whether to keep the activations of changed calls, of layers with changed parameters, and of two
            measured calls after each, which show the effect.

    Raises:
        LayerError: for an unknown layer or parameter.
        UsageError: for an intervention that a tensor cannot take.

    Example:
        >>> import torch
        >>> from hookscope.interventions import Scale
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1, bias=False), torch.nn.Conv2d(1, 1, 1, bias=False))
        >>> effect = intervention_effect(net, (torch.ones(1, 1, 2, 2),), {0: Scale(3.0)})
        >>> [(layer.call.name, layer.changed, round(layer.relative_l2, 5)) for layer in effect.layers]
        [('0', True, 2.0), ('1', False, 2.0)]
    """
    model = module_of(model)
    given = list(pairs_of(changes))
    pairs = list(from_the_start(model, inputs, given, types, seed))
    called, owners = _changed_layers(model, pairs)
    drawn = [*([] if keep is None else [Selection.of(keep)]), *([*called, *owners] if keep_changed else [])]
    measured = [layers_with_weights(model), *called] if layers is None else [Selection.of(layers)]
    chosen = Selection([*measured, *drawn])
    with torch.no_grad(), random_states_kept(), buffers_kept(model), ExitStack() as stack:
        before = stack.enter_context(capture(model, chosen, types, ordered=True))
        calls: list[Call] = []
        if drawn:
            keeper = stack.enter_context(Observer(model, Selection(drawn), types, lambda call, *_: calls.append(call)))
        output = _run(model, inputs, seed)
    # an index from the end is known only after a pass
    kept = {call.key for call in calls if keeper.wanted(call)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    block, moved, new = intervene(model, pairs, types), list[MovedLayer](), list[Call]()
    following = 0

    def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal following
        if block.changed and call.key not in before:
            new.append(call)
        elif block.changed:
            changes = {id(parameters[key]) for key in block.changed if key in parameters}
            own = any(id(parameter) in changes for parameter in module.parameters(recurse=False))
            own = own or call.key in block.changed
            following = _FOLLOWING + 1 if own else following - 1
            layer = _moved(call, before[call.key], output, own, call.key in kept or (keep_changed and following > 0))
            # a parameter is changed before the pass: layers before its own are not affected
            if moved or layer.changed or layer.relative_l2 != 0 or not block.changed.keys() <= parameters.keys():
                moved.append(layer)

    # the hooks of the comparison come after the hooks of the block, so that they see changed values
    second = Observer(model, chosen, types, on_call, ordered=True)
    with torch.no_grad(), random_states_kept(), buffers_kept(model), block, second:
        changed_output = _run(model, inputs, seed)
    order, ran = list(before), {layer.call.key for layer in moved}
    missing = [key for key in order[order.index(moved[0].call.key) :] if key not in ran] if moved else []
    missing += [call.key for call in new if second.wanted(call)]
    words = tuple(f"{where} {getattr(change, '__name__', change)}" for where, change in given if block.changed)
    return Effect(output, changed_output, RowTuple(moved), dict(block.changed), tuple(missing), words)


def _run(model: nn.Module, inputs: tuple[Any, ...], seed: int | None) -> Any:
    """Run the model on copies of the inputs: its first layer may work in place."""
    if seed is not None:
        torch.manual_seed(seed)
    return output_of(model, *map_tensors(inputs, torch.clone))


def from_the_start(
    model: nn.Module,
    inputs: tuple[Any, ...],
    changes: Iterable[tuple[str | Selection, Any]],
    types: Iterable[Any] | None = None,
    seed: int | None = None,
) -> Iterator[tuple[str | Selection, Any]]:
    """Replace the indices in ``changes`` that are known only after a pass by the calls that they select in one.

    These are indices from the end, and calls on inputs: blocks of the chosen types begin before the layers in them, and
    are counted when they end.
    """
    for where, change in changes:
        place = Selection.of(where)
        if not place.from_the_end and not (place.counts and getattr(change, "on", "output") == "input"):
            yield where, change
            continue
        capturing = capture(model, where, types, transform=lambda _: None)
        with torch.no_grad(), random_states_kept(), capturing as activations:
            _run(model, inputs, seed)
        yield from ((Selection.of_names([call.name], call.call), change) for call in activations.calls)


def _changed_layers(
    model: nn.Module, pairs: Iterable[tuple[str | Selection, Any]]
) -> tuple[list[Selection], list[Selection]]:
    layers = [name for name, _ in model.named_modules(remove_duplicate=False)]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    called, owners = [], []
    for where, _ in pairs:
        place = Selection.of(where)
        if place.counts or place.calls_by_name(layers, in_all=True):
            called.append(place)
        elif names := [name for name in parameters if name == str(where) or place.calls_by_name([name])]:
            owners.append(Selection.of_names(dict.fromkeys(holder_of(name) for name in names)))
    return called, owners


def _moved(call: Call, before: Any, after: Any, changed: bool, is_drawn: bool) -> MovedLayer:
    old, new = list(tensors_in(before).values()), list(tensors_in(after).values())
    relative, cosine = None, None
    if [tensor.shape for tensor in old] == [tensor.shape for tensor in new]:
        relative, cosine = _distance([as_float(tensor) for tensor in old], [as_float(tensor) for tensor in new])
    nonfinite = sum(int((~as_float(tensor).isfinite()).sum()) for tensor in new)
    copied = map_tensors(after, torch.clone) if is_drawn else None
    return MovedLayer(call, shape_of(after), changed, relative, cosine, nonfinite, before if is_drawn else None, copied)


def _distance(before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """Relative L2 distance and cosine of all values together, summed in double precision."""
    before_squared = after_squared = moved_squared = product = 0.0
    for tensor_before, tensor_after in zip(before, after, strict=True):
        old, new = tensor_before.double().flatten(), tensor_after.double().flatten()
        moved = new - old
        before_squared += float(old @ old)
        after_squared += float(new @ new)
        moved_squared += float(moved @ moved)
        product += float(old @ new)
    if not math.isfinite(before_squared + after_squared + moved_squared):
        return math.nan, None
    if moved_squared == 0:
        return 0.0, 1.0 if before_squared else None
    length_before, length_after = math.sqrt(before_squared), math.sqrt(after_squared)
    relative = math.sqrt(moved_squared) / length_before if length_before else math.inf
    both = length_before * length_after
    return relative, max(-1.0, min(1.0, product / both)) if both else None
