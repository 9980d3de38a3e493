"""All methods of class activation mapping on one image, each with its faithfulness."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from hookscope.display import Rows
from hookscope.errors import HookscopeError, InputError, TargetError, UsageError
from hookscope.explain import ATTENTION_METHODS, CAM_METHODS, ClassActivationMap, class_activation_maps
from hookscope.faithfulness.facts import BASELINES, Faithfulness
from hookscope.faithfulness.measure import Progress, measure_faithfulness
from hookscope.faithfulness.sanity import random_weights, rank_correlation
from hookscope.hooks import Layers


def cam_faithfulness(
    model: nn.Module,
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

    Each map also has `Faithfulness.randomized`: its rank correlation with that of the same model with random weights,
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
        on_skip: Called with a method that the model has no map for, and the reason; not for those of attention.
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
    chosen = [*CAM_METHODS, *ATTENTION_METHODS] if methods is None else list(methods)
    maps_of = partial(
        class_activation_maps, model, inputs, layers, types=types, categories=categories, batch_size=batch_size
    )
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
    if any(len({cam.prediction.key for cam in found}) > 1 for found in cams.values()):
        raise UsageError("a map explains one score, and the target names several", do="name one class")
    several = any(len(found) > 1 for found in cams.values())

    def name_of(cam: ClassActivationMap) -> str:
        return f"{cam.method} {cam.call.key}" if several else cam.method

    named: dict[str, Any] = {name_of(cam): cam for found in cams.values() for cam in found}
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
    measured = measure_faithfulness(
        model,
        inputs,
        {**(maps or {}), **named},
        target,
        categories=categories,
        batch_size=batch_size,
        on_progress=on_progress,
        **options,
    )
    return Rows(replace(each, randomized=correlations.get(each.name)) for each in measured)
