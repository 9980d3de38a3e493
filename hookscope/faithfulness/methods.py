"""Maps to measure: of all methods of class activation mapping, and of random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hookscope.display import Rows
from hookscope.errors import HookscopeError, InputError, ModelError, TargetError, UsageError, check_whole, kind_of
from hookscope.explain import ATTENTION_METHODS, CAM_METHODS, ClassActivationMap, class_activation_maps
from hookscope.faithfulness.facts import BASELINES, Faithfulness, as_array
from hookscope.faithfulness.measure import Progress, measure_faithfulness
from hookscope.hooks import AnyModel, Layers, Observer, enclosing, module_of, names_of, random_states_kept
from hookscope.models import takes_inputs


@dataclass(frozen=True, slots=True)
class RandomizedWeights:
    """How far a map is still the same when the weights of the last layers are random.

    Attributes:
        layer: The first of the layers whose weights are random: it and all after it.
        layers: How many these are.
        correlation: Spearman's rank correlation of the map with the model's own, -1 to 1; 0 for a map of equal values.
    """

    layer: str
    layers: int
    correlation: float


def sanity_check(
    model: AnyModel, explain: Callable[[], Any], steps: int = 8, *, seed: int = 0
) -> Rows[RandomizedWeights]:
    """Randomise the weights of ``model`` layer by layer from the last one, and compare the map after each step.

    This is the cascading randomisation of Adebayo et al. (arXiv:1810.03292). A map that stays the same does not show
    what the model has learned. Weights are drawn from a normal distribution with mean 0 and the root mean square of
    the parameter's own values; vectors, such as biases, are shuffled. Afterwards the model has its weights back, also
    after an error.

    Args:
        model: Any eager module.
        explain: Returns the map of the model as it is now: an array, a tensor, or a result of
            `class_activation_maps` or `saliency_maps`. Name one class in it: the best class changes with the weights.
        steps: Number of steps; each randomises about as many layers.
        seed: Seed of the random weights.

    Raises:
        ModelError: for a model without parameters in layers that run.

    Example:
        >>> import torch
        >>> from hookscope import class_activation_maps, sanity_check
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> image = torch.rand(1, 3, 16, 16)
        >>> [step] = sanity_check(net, lambda: class_activation_maps(net, image, "0", target=2)[0])
        >>> step.layer, step.layers, step.correlation < 0.99
        ('0', 1, True)
    """
    model = module_of(model)
    if not callable(explain):
        do = "give a function: lambda: class_activation_maps(net, image)[0]"
        raise UsageError(f"expected a function that makes a map, got {kind_of(explain)}", do=do)
    check_whole("steps", steps)
    ran: dict[str, int] = {}
    with Observer(model, "*", ("all",), lambda call, *rest: ran.update({call.name: len(ran)})):
        first = _values(explain())
    layers = [name for name, layer in model.named_modules() if any(True for _ in layer.parameters(recurse=False))]
    # a layer whose weights the one around it uses without calling it stands where that one does
    around = {name: [outer for outer in enclosing(name) if outer in ran and (outer or not name)] for name in layers}
    order = {name: ran[names[0]] for name, names in around.items() if names}
    layers = sorted(order, key=lambda name: -order[name])
    if not layers:
        raise ModelError(f"{type(model).__name__} has no weights to randomise", do="give a model with parameters")
    rows, done = Rows[RandomizedWeights](), 0
    for part in np.array_split(np.arange(len(layers)), min(steps, len(layers))):
        done += len(part)
        with random_weights(model, layers[:done], seed):
            rows.append(RandomizedWeights(layers[done - 1], done, rank_correlation(first, _values(explain()))))
    return rows


def _values(result: Any) -> NDArray[np.float32]:
    return as_array(result[0] if isinstance(result, list) and len(result) == 1 else result).astype(np.float32)


@contextmanager
def random_weights(model: nn.Module, layers: Sequence[str] | None = None, seed: int = 0) -> Iterator[None]:
    """Random values of the same size in each parameter of ``layers``, by default all; afterwards as before."""
    chosen = [model] if layers is None else [model.get_submodule(name) for name in layers]
    parameters = {id(tensor): tensor for layer in chosen for tensor in layer.parameters(recurse=layers is None)}
    before = [(tensor, tensor.detach().clone()) for tensor in parameters.values()]
    try:
        with torch.no_grad(), random_states_kept():
            torch.manual_seed(seed)
            for parameter, values in before:
                if values.dim() > 1:
                    parameter.normal_().mul_(values.float().square().mean().sqrt().to(values.dtype))
                else:
                    parameter.copy_(values[torch.randperm(values.numel())] if values.dim() else values)
        yield
    finally:
        with torch.no_grad():
            for parameter, values in before:
                parameter.copy_(values)


def rank_correlation(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Spearman's rank correlation of two maps of one shape; 0 where one has only equal values."""
    if first.shape != second.shape:
        raise HookscopeError(f"maps of {first.shape} and {second.shape} values cannot be compared")
    a, b = _ranks(first), _ranks(second)
    below = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / below if below else 0.0


def _ranks(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """The ranks about their mean; equal values share the mean of theirs."""
    _, group, counts = np.unique(values.reshape(-1), return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return ranks[group.reshape(-1)] - (values.size + 1) / 2


@takes_inputs
def cam_faithfulness(
    model: AnyModel,
    inputs: Any,
    layers: Layers | None = None,
    target: Any = "top:1",
    methods: Iterable[str] | None = None,
    *,
    maps: Mapping[str, Any] | None = None,
    types: Iterable[Any] | None = None,
    categories: Sequence[str] | None = None,
    batch_size: int | None = None,
    on_progress: Progress | None = None,
    on_skip: Callable[[str, HookscopeError], None] = lambda method, error: None,
    **options: Any,
) -> Rows[Faithfulness]:
    """Measure the maps of all methods of `class_activation_maps` for one image, and the two baselines.

    Each map also has `Faithfulness.randomized`: its rank correlation with the map of a model with random weights,
    unless its method runs the model once per channel.

    Args:
        model: Any eager module with a score for each class.
        inputs: The image, see `measure_faithfulness`.
        layers: The layers, as in `class_activation_maps`; with several, each method has a map of each.
        target: What is explained: one class, a `ScoreTarget` or a function.
        methods: Names of the methods; None for all that the model has a map for.
        maps: Further maps by name, see `measure_faithfulness`.
        types: Class names that indices in ``layers`` count.
        categories: Names of the classes.
        batch_size: Images in one forward pass; None for as many as fit well.
        on_progress: Called with images done and in all, once the maps are there.
        on_skip: Called with a method that the model has no map for, and the reason; not for methods of attention.
        **options: ``boxes``, ``baselines``, ``fill``, ``steps`` and ``seed`` of `measure_faithfulness`.

    Raises:
        UsageError: for an unknown method, for several classes, or for no map at all.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> found = cam_faithfulness(net, torch.rand(1, 3, 16, 16), methods=["gradcam", "layercam"])
        >>> [each.name for each in found]
        ['gradcam', 'layercam', 'random', 'centred']
    """
    model, categories = module_of(model), names_of(model, categories)
    if methods is not None and (isinstance(methods, str) or not isinstance(methods, Iterable)):
        methods = [methods]
    chosen = [*CAM_METHODS, *ATTENTION_METHODS] if methods is None else list(methods)
    shared: dict[str, Any] = {"categories": categories, "batch_size": batch_size}
    maps_of: Any = partial(class_activation_maps, model, inputs, layers, types=types, **shared)
    cams, errors = dict[str, list[ClassActivationMap]](), list[HookscopeError]()
    for method in chosen:
        try:
            cams[method] = maps_of(target, method)
        except HookscopeError as error:
            if methods is not None or isinstance(error, InputError | TargetError):
                raise
            errors.append(error)
            if method in CAM_METHODS:
                on_skip(method, error)
    if errors and not cams:
        raise errors[0]
    if any(len({cam.prediction.key for cam in of_image}) > 1 for of_image in cams.values()):
        raise UsageError("a map explains one score, and the target names several", do="name one class")
    several = any(len(of_image) > 1 for of_image in cams.values())

    def name_of(cam: ClassActivationMap) -> str:
        return f"{cam.method} {cam.call.key}" if several else cam.method

    named: dict[str, Any] = {name_of(cam): cam for of_image in cams.values() for cam in of_image}
    if clash := [name for name in maps or {} if name in named or name in BASELINES]:
        raise UsageError(f"a map is named {clash[0]}", "a method has this name", "choose another name")
    explained = next((cam.prediction for cam in named.values()), None)
    of = target if explained is None or explained.target else explained.index  # the best class changes with the weights
    correlations: dict[str, float] = {}
    with random_weights(model, seed=options.get("seed", 0)):
        for method in (name for name in cams if name not in CAM_METHODS or not CAM_METHODS[name].passes):
            with suppress(HookscopeError):  # such as a score that is not finite
                for cam, other in zip(cams[method], maps_of(of, method), strict=True):
                    correlations[name_of(cam)] = rank_correlation(cam.values, other.values)
    every = {**(maps or {}), **named}
    measured = measure_faithfulness(model, inputs, every, target, on_progress=on_progress, **shared, **options)
    return Rows(replace(test, randomized=correlations.get(test.name)) for test in measured)
