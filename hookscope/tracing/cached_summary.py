"""The trace of a model by its name, kept in the user's cache: the second answer needs no torch."""

from __future__ import annotations

from typing import Any

from hookscope.errors import InputError
from hookscope.hooks import Shape
from hookscope.models import package_versions
from hookscope.system import cache
from hookscope.tracing.recorder import TracedCall
from hookscope.tracing.summary import Trace, TracedLayer, trace

Listing = tuple[tuple[int, int], Trace]


def listing(name: str, input_size: tuple[int, int] | None = None) -> Listing:
    """The input size and the trace of the model ``name``, from the cache where it is there.

    Args:
        name: One of `model_names`.
        input_size: ``(H, W)``; None for what the model is made for.

    Raises:
        ModelError: no such model.
        InputError: when the model refuses the size.

    Example:
        >>> size, found = listing("resnet18")
        >>> size, len(found.calls)
        ((224, 224), 76)
    """
    found = cached_listing(name, input_size)
    if found is None:
        found = _traced(name, input_size)
        cache.store("layers", _key(name, input_size), _packed(*found))
    return found


def cached_listing(name: str, input_size: tuple[int, int] | None = None) -> Listing | None:
    """The same from the cache alone, None where it is not there; never imports torch."""
    kept = cache.load("layers", _key(name, input_size))
    try:
        return None if kept is None else _unpacked(kept)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):  # damaged: as good as none
        return None


def _key(name: str, input_size: tuple[int, int] | None) -> dict[str, Any]:
    return {"model": name, "input_size": list(input_size) if input_size else None, **package_versions()}


def _traced(name: str, input_size: tuple[int, int] | None) -> Listing:
    from hookscope.models import build_listed, build_real, example_inputs, family_of, listing_size

    model = build_listed(name)
    size = input_size or listing_size(name, model)
    inputs = example_inputs(model, size)
    if family_of(model) != "detection":  # detectors want values half-way: no use in trying
        try:
            return size, trace(model, inputs)
        except InputError as error:
            if not _wants_values(error.__cause__):
                raise
    return size, trace(build_real(name), inputs, dry=False)


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
