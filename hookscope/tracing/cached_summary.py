"""The layers and calls of a model by its name, kept in the user's cache: the second answer needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookscope.errors import InputError
from hookscope.hooks import Shape
from hookscope.models import find_source, package_versions
from hookscope.system import cache
from hookscope.tracing.facts import Trace, TracedCall, TracedLayer

if TYPE_CHECKING:  # a cached list of layers needs no torch
    from torch import nn

Listing = tuple[tuple[int, int], Trace]


def listing(name: str, input_size: tuple[int, int] | None = None) -> Listing:
    """The input size and the trace of the model ``name``, from the cache if it is there.

    Args:
        name: A MODEL argument. A model that a factory builds is traced anew each time.
        input_size: ``(H, W)``; None for the size that the model is made for.

    Raises:
        ModelError: no such model.
        InputError: the model refuses the size.

    Example:
        >>> size, summary = listing("resnet18")
        >>> size, len(summary.calls)
        ((224, 224), 76)
    """
    cached = cached_listing(name, input_size)
    if cached is not None:
        return cached
    from hookscope.models import example_inputs, load_model
    from hookscope.tracing.summary import trace

    skeleton = find_source(name).skeleton(name)
    if skeleton is None:
        net = load_model(name, weights="none", device="cpu")
        size = input_size or net.preprocess.default_size
        return size, trace(net.model, example_inputs(net.model, size))
    size = input_size or skeleton.size
    traced = size, _traced(name, skeleton.model, size)
    cache.store("layers", _key(name, input_size), _packed(*traced))
    return traced


def cached_listing(name: str, input_size: tuple[int, int] | None = None) -> Listing | None:
    """The same from the cache alone, None if it is not there; never imports torch."""
    stored = cache.load("layers", _key(name, input_size))
    try:
        return None if stored is None else _unpacked(stored)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):  # damaged
        return None


def _key(name: str, input_size: tuple[int, int] | None) -> dict[str, Any]:
    return {"model": name, "input_size": list(input_size) if input_size else None, **package_versions()}


def _traced(name: str, model: nn.Module, size: tuple[int, int]) -> Trace:
    from hookscope.models import example_inputs, family_of, load_model
    from hookscope.tracing.summary import trace

    inputs = example_inputs(model, size)
    if family_of(model) != "detection":  # detectors need values in the middle of a pass
        try:
            return trace(model, inputs)
        except InputError as error:
            if not _wants_values(error.__cause__):
                raise
    return trace(load_model(name, weights="none", device="cpu").model, inputs, dry=False)


def _wants_values(error: BaseException | None) -> bool:
    """Whether a pass without values failed for the want of them, and not because of the input's size."""
    return isinstance(error, NotImplementedError) or "meta" in str(error)


def _packed(size: tuple[int, int], found: Trace) -> dict[str, Any]:
    layers = [[at.name, list(at.types), at.leaf, at.params, at.shared_with] for at in found.layers]
    calls = [[c.layer, c.input_shape, c.output_shape, c.macs, c.overwritten_by] for c in found.calls]
    totals = {"params": found.params, "macs": found.macs, "real": found.real}
    return {"size": list(size), "layers": layers, "calls": calls, **totals}


def _unpacked(kept: dict[str, Any]) -> Listing:
    high, wide = kept["size"]
    layers = tuple(TracedLayer(name, tuple(types), *rest) for name, types, *rest in kept["layers"])
    calls = tuple(TracedCall(at, _shape(i), _shape(o), macs, by) for at, i, o, macs, by in kept["calls"])
    if not all(0 <= call.layer < len(layers) for call in calls):
        raise IndexError("a call of no layer")
    return (high, wide), Trace(layers, calls, kept["params"], kept["macs"], kept["real"])


def _shape(kept: Any) -> Shape:
    if isinstance(kept, dict):
        return {str(part): tuple(shape) for part, shape in kept.items()}
    return None if kept is None else tuple(kept)
