"""A small inspection made by hand, with names that would do harm if they were more than text."""

from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from hookscope.drawing import reduce_maps
from hookscope.explain import ClassActivationMap
from hookscope.findings import Finding
from hookscope.hooks import Call
from hookscope.inspection import CallFacts, ImageMaps, InspectedImage, InspectedLayer, Inspection, Place
from hookscope.scores import Prediction

HOSTILE = "</script><img src=x onerror=alert(1)>\"'`{{7*7}}{% x %}<!--\u202e\u2028\x1b[31m\x07&amp;"


def example(*, name: str = "star", images: int = 1, weights: str = "shapes.safetensors") -> Inspection:
    """Three layers, three of whose calls have maps; ``name`` is part of every name."""
    noise = np.random.default_rng(0)
    layers = (
        _layer(Call(f"features.{name}", "Conv2d", 0, 0, 0), (8, 16, 16), images, noise),
        _layer(Call("features.3.squeeze", "Conv2d", 0, 1, 3), (4, 8, 8), images, noise),
        _layer(Call("classifier.1", "Conv2d", 0, 2, 5), (10, 4, 4), images, noise),
    )
    calls = (
        _facts(layers[0].call, (8, 16, 16), 224, 57_344),
        _facts(Call("features.1", "ReLU", 0, None, 1), (8, 16, 16), 0, 0),
        _facts(Call("features.2", "MaxPool2d", 0, None, 2), (8, 8, 8), 0, 0),
        _facts(layers[1].call, (4, 8, 8), 36, 2_304),
        _facts(Call("features.3.squeeze_activation", "ReLU", 0, None, 4), (4, 8, 8), 0, 0, zeros=0.5),
        _facts(Call("features.3", "Fire", 0, None), (4, 8, 8), 0, 0),
        _facts(layers[2].call, (10, 4, 4), 50, 640),
        CallFacts(Call(name, "Empty", 0, None, 6), None, 0, 0, None, None, None, None, 0, ()),
    )
    finding = Finding("dead-channels", layers[0].call.key, "1 of 8 channels never leaves 0", "Look.", channels=(3,))
    places = (
        Place("dead-channels", "warning", layers[0].call.key, finding.evidence, (3,), None, {}, "Look.", finding),
        Place("carries-answer", "note", layers[2].call.key, f"Channel 7 carries {name}.", (7, 2), 0, {"share": 0.5}),
        Place("wrong-input", "error", "", f"The values of {name} are outside the usual range.", meaning="Check it."),
    )
    return Inspection(
        model=f"shapes {name}" if name == HOSTILE else "shapes",
        weights=weights,
        images=tuple(_image(f"{name}-{at}.png", layers[2].call, name) for at in range(images)),
        places=places,
        calls=calls,
        layers=layers,
        findings=(finding,),
        provenance={"hookscope": "1.0", "command": f"hookscope inspect shapes {name}.png", "images": [{"name": name}]},
        notes=(f"The layer {name} has no maps.",),
    )


def layer_of(*images: np.ndarray | None, name: str = "layer", answer: object = None, **facts: object) -> InspectedLayer:
    """A layer with these values ``(C, H, W)`` for each image, and gradient × activation ``(C,)`` alike for all."""
    options: dict = {"part": "", "axes": "N C H W", "frames": 1} | facts
    maps = tuple(None if values is None else _reduced(values, answer) for values in images)
    return InspectedLayer(Call(name, "Conv2d", 0, 0, 0), images=maps, **options)


def inspection_of(*layers: InspectedLayer) -> Inspection:
    """An inspection that draws these layers."""
    return replace(example(images=len(layers[0].images)), layers=layers, places=())


def _reduced(values: np.ndarray, answer: object = None) -> ImageMaps:
    flat = np.where(np.isfinite(values), values, np.nan).reshape(len(values), -1).astype(float)
    none = np.isnan(flat).all(1)
    means = np.array([np.nan if bad else np.nanmean(row) for row, bad in zip(flat, none, strict=True)])
    zeros = (flat == 0).mean(1)
    return ImageMaps(reduce_maps(torch.from_numpy(values)), means, zeros, None if answer is None else np.array(answer))


def _layer(call: Call, shape: tuple[int, int, int], images: int, noise: np.random.Generator) -> InspectedLayer:
    return InspectedLayer(call, "", "N C H W", 1, tuple(_maps(shape, noise) for _ in range(images)))


def _maps(shape: tuple[int, int, int], noise: np.random.Generator) -> ImageMaps:
    values = noise.normal(size=shape).astype(np.float32)
    values[0] = 0
    tiles = reduce_maps(torch.from_numpy(values))
    means, zeros = values.mean((1, 2), np.float64), (values == 0).mean((1, 2), dtype=np.float64)
    cam = np.maximum(noise.normal(size=shape[1:]), 0).astype(np.float32)
    return ImageMaps(tiles, means, zeros, noise.normal(size=shape[0]), cam)


def _facts(call: Call, shape: tuple[int, ...], params: int, macs: int, zeros: float = 0.0) -> CallFacts:
    return CallFacts(call, shape, params, macs, -1.5, 0.25, 4.0, zeros, 0, (1, 4, 9, 25, 9, 4, 1, 0))


def _image(name: str, call: Call, label: str) -> InspectedImage:
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    seen = Image.fromarray(np.stack(np.broadcast_arrays(ramp, ramp[:, None], ramp[::-1]), -1))
    best = (
        Prediction(7, label, 9.5, 0.91, 0.91),
        Prediction(2, "circle", 6.25, 0.06, 0.91),
        Prediction(0, None, 1, 0.01),
    )
    cam = ClassActivationMap(call, best[0], "gradcam", np.eye(4, dtype=np.float32), 10, (64, 64))
    return InspectedImage(name, "ab" * 32, seen, 1, best, cam)
