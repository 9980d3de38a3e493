"""The layers and calls of a model by its name, kept in the user's cache: the second answer needs no torch."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

from hookscope import models
from hookscope.errors import InputError
from hookscope.geometry import ReceptiveField
from hookscope.system import cache
from hookscope.tracing.facts import Trace, TracedCall, TracedLayer

if TYPE_CHECKING:  # a cached list of layers needs no torch
    from torch import nn

_VERSION = 7  # of what is stored: raise it when `Trace` changes
Listing = tuple[tuple[int, ...], Trace]


def listing(name: str, input_size: tuple[int, ...] | None = None, sources: bool = False) -> Listing:
    """The input size and the trace of the model ``name``, from the cache if it is there.

    A model that a factory builds is traced anew each time. With ``sources`` each call knows what it read.

    Raises:
        ModelError: no such model.
        InputError: the model refuses the size.
    """
    cached = cached_listing(name, input_size, sources)
    if cached is not None:
        return cached
    from hookscope.tracing.summary import first_accepted

    source = models.find_source(name)
    skeleton = source.skeleton()
    if skeleton is None:
        import torch

        net = models.load_model(source, weights="none", device="cpu", input_size=input_size)
        channels, *sides = net.preprocess.input_shape
        counts = dict.fromkeys([channels, models.first_channels(net.model)])
        pictures = (torch.zeros(count, *sides, dtype=net.preprocess.dtype) for count in counts)
        traced = first_accepted(net.model, map(net.inputs, pictures), name, fields=True, sources=sources)
        return tuple(sides if len(input_size or ()) == 3 else sides[-2:]), replace(traced, notes=net.notes)
    models.check_size(skeleton.model, input_size)
    size = input_size or skeleton.size
    listed = size, _traced(name, skeleton.model, size, sources)
    cache.store("layers", _key(name, input_size, sources), _packed(*listed))
    return listed


def cached_listing(name: str, input_size: tuple[int, ...] | None = None, sources: bool = False) -> Listing | None:
    """The size and the trace from the cache alone, None if they are not there; never imports torch."""
    stored = cache.load("layers", _key(name, input_size, sources))
    try:
        return None if stored is None else _unpacked(stored)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):  # damaged
        return None


def _key(name: str, input_size: tuple[int, ...] | None, sources: bool) -> dict[str, Any]:
    size = list(input_size) if input_size else None
    return {"model": name, "input_size": size, "sources": sources, "trace": _VERSION, **models.package_versions()}


def _traced(name: str, model: nn.Module, size: tuple[int, ...], sources: bool) -> Trace:
    from hookscope.tracing.summary import trace

    inputs = models.example_inputs(model, size)
    if models.family_of(model) != "detection":  # detectors need values in the middle of a pass
        try:
            return trace(model, inputs, name=name, fields=True, sources=sources)
        except InputError as error:
            cause = error.__cause__  # with values it may run; another size is what it needs otherwise
            if not isinstance(cause, NotImplementedError) and "meta" not in str(cause):
                raise
    net = models.load_model(name, weights="none", device="cpu")
    return trace(net.model, inputs, on_meta=False, fields=True, sources=sources)


def _packed(size: tuple[int, ...], traced: Trace) -> dict[str, Any]:
    layers, calls = [astuple(layer) for layer in traced.layers], [astuple(call) for call in traced.calls]
    others = {name: getattr(traced, name) for name in ("sizes", "real", "answer")}
    return {"size": list(size), "layers": layers, "calls": calls, **others}


def _unpacked(stored: dict[str, Any]) -> Listing:
    stored = _as_tuples(stored)
    layers = tuple(TracedLayer(*layer) for layer in stored["layers"])
    calls = tuple(
        TracedCall(layer, depth, read, made, macs, by, field and ReceptiveField(*field), reads, settings)
        for layer, depth, read, made, macs, by, field, reads, settings in stored["calls"]
    )
    traced = Trace(layers, calls, stored["sizes"], stored["real"], answer=stored["answer"])
    if not all(0 <= call.layer < len(layers) for call in calls):
        raise IndexError("a call of no layer")
    if traced.params != traced.params_of(range(len(layers))):
        raise ValueError("a parameter of no layer")
    if len(stored["size"]) not in (2, 3):
        raise ValueError(f"no size: {stored['size']}")
    return stored["size"], traced


def _as_tuples(value: Any) -> Any:
    """``value`` with tuples in the place of lists, as they were before they were stored."""
    if isinstance(value, dict):
        return {name: _as_tuples(part) for name, part in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
