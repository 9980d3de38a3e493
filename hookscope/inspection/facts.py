"""What an inspection found: the page, the rows and the lines on a terminal are views of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from hookscope.comparison import AgainstReference
from hookscope.display import Cells, Picture, RowTuple, Shown
from hookscope.drawing import Heat, Tiles, draw_heat, image_bytes
from hookscope.explain import ClassActivationMap
from hookscope.findings import Finding
from hookscope.hooks import OPERATION, Call, Shape, enclosing
from hookscope.inspection.answers import Answer
from hookscope.models import LoadedModel, is_random
from hookscope.parameters import ParameterStatistics
from hookscope.scores import Prediction
from hookscope.statistics import LayerStatistics, RunningStatistics
from hookscope.tracing import Trace

_MOST_IMAGES = 3  # that an inspection shows of itself


@dataclass(frozen=True, repr=False)
class InspectedImage(Shown):
    """One image, and what the model answered.

    Attributes:
        name: The file, or how the caller named it.
        sha256: Of the file; empty for an image that is not a file.
        seen: The image as the network received it, ``(H, W)`` RGB; the middle frame of a clip.
        frames: Number of frames.
        predictions: The best classes, the best first; empty for a model without scores of classes.
        cam: The Grad-CAM of the best class at the last layer with a map; None if there is none.
        without_cam: Why there is none, else empty.
        answer: What the model answered beside scores of classes; None for scores of classes alone.
    """

    name: str
    sha256: str
    seen: Image.Image
    frames: int
    predictions: tuple[Prediction, ...]
    cam: ClassActivationMap | None
    without_cam: str = ""
    answer: Answer | None = None

    @property
    def classes(self) -> tuple[Prediction, ...]:
        """The best classes; empty where the answer says more: which pixels, or the only number of the output."""
        said = self.answer is not None and (self.answer.kind == "pixels" or len(self.predictions) == 1)
        return () if said else self.predictions

    def _cells(self) -> Cells:
        answer = dict(self.classes[0]._cells()) if self.classes else {}
        if self.answer is not None and not answer:
            answer = {"answer": self.answer.words()}
        return {"image": self.name, **answer, "picture": Picture(partial(_seen_png, self), f"Grad-CAM of {self.name}")}


@dataclass(frozen=True, slots=True)
class CallFacts:
    """One call of a layer, measured over all images.

    Attributes:
        call: The call; a block of other layers has no ``order``.
        shape: Of its output, for one image.
        params: Number of parameters of the layer, without the layers in it.
        macs: Multiply-accumulates of the call, without the layers in it.
        low, mean, high: Of the finite values, None if there are none.
        zeros: Share of values that are exactly 0, from 0 to 1; None without values.
        nonfinite: Number of NaN and Inf.
        histogram: Numbers of finite values in equal intervals from ``low`` to ``high``; empty without values.
    """

    call: Call
    shape: Shape
    params: int
    macs: int
    low: float | None
    mean: float | None
    high: float | None
    zeros: float | None
    nonfinite: int
    histogram: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class ImageMaps(Shown):
    """The feature maps of one part of one call for one image.

    Attributes:
        tiles: All channels as palette indices; each channel has its own scale, and ``low`` and ``high``. Maps of one
            position have exact ``values`` instead.
        mean: ``(C,)`` mean of the finite values of each channel.
        zeros: ``(C,)`` share of values that are exactly 0.
        answer: ``(C,)`` gradient × activation of the score of the best class, summed over positions; None without
            gradient.
        cam: ``(h, w)`` Grad-CAM of the best class at this call; None without gradient, or for maps of one position.
    """

    tiles: Tiles
    mean: NDArray[np.float64]
    zeros: NDArray[np.float64]
    answer: NDArray[np.float64] | None = None
    cam: NDArray[np.float32] | None = None

    def _cells(self) -> Cells:
        return {"maps": self.tiles.levels.shape, "scale": self.tiles.scale}


@dataclass(frozen=True, repr=False)
class InspectedLayer(Shown):
    """A call whose maps are on the page.

    Attributes:
        call: The call.
        part: Name of the tensor if the output has several with maps, else empty.
        axes: Its recognised axes, such as ``N C H W``.
        frames: Number of frames that stand side by side in each map.
        images: The maps for each image of the inspection, None where there are none.
        filters: ``(C, h, w)`` or ``(C, h, w, 3)`` weights of each channel if they can be drawn, else None.
        names: Names of all channels, such as classes; or empty.
    """

    call: Call
    part: str
    axes: str
    frames: int
    images: tuple[ImageMaps | None, ...]
    filters: NDArray[np.float32] | None = None
    names: tuple[str, ...] = ()

    def _cells(self) -> Cells:
        maps = next((image.tiles.levels.shape for image in self.images if image is not None), None)
        return {"layer": self.key, "type": self.call.type, "axes": self.axes, "maps": maps, "images": len(self.images)}

    @property
    def key(self) -> str:
        """The key of the call, and the part if there are several."""
        return f"{self.call.key} {self.part}" if self.part else self.call.key


@dataclass(frozen=True, slots=True, repr=False)
class Place(Shown):
    """A place to look at.

    Attributes:
        kind: Name of a finding, or another reason, such as ``carries-answer``.
        severity: ``error``, ``warning`` or ``note``.
        layer: Key of the call or name of the parameter; empty for the input or the whole model.
        reason: Why, in one sentence with its numbers.
        channels: The channels that it is about, the most important first; None if it is not about channels.
        image: Position of the image that it is about; None if it is about all.
        numbers: The evidence by name.
        meaning: What it means and what to do about it.
        finding: The finding that it tells; None for another reason.
    """

    kind: str
    severity: str
    layer: str
    reason: str
    channels: tuple[int, ...] | None = None
    image: int | None = None
    numbers: Mapping[str, float | int | str | None] = field(default_factory=dict)
    meaning: str = ""
    finding: Finding | None = None

    def _cells(self) -> Cells:
        return {"severity": self.severity, "place": self.kind, "layer": self.layer, "reason": self.reason}


@dataclass(frozen=True, repr=False)
class Inspection(Shown, rows="places"):
    """What `inspect` found.

    Attributes:
        model: The MODEL argument, or the class of the module.
        weights: Label of the weights; begins with ``random`` for a network that is not trained.
        images: The images, in their order.
        places: At most twelve places to look at, the most important first.
        calls: Every call of a layer without layers in it, and of each drawn block, in order of execution.
        layers: The calls whose maps are kept, in order of execution.
        findings: All findings, the most severe first.
        provenance: Versions, command line, preprocessing, SHA-256 of images and checkpoint; JSON.
        notes: What the reader should know, such as layers without maps.
        trace: Every call with what it read, as the graph on the page shows it; None where it was not recorded.
        against: How far each call is from the reference; None without one.
    """

    model: str
    weights: str
    images: RowTuple[InspectedImage]
    places: RowTuple[Place]
    calls: RowTuple[CallFacts]
    layers: RowTuple[InspectedLayer]
    findings: RowTuple[Finding]
    provenance: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    trace: Trace | None = None
    against: AgainstReference | None = None

    def _cells(self) -> Cells:
        cells: dict[str, Any] = {"model": self.model, "weights": self.weights, "layers": len(self.layers)}
        if self.is_random:
            cells["warning"] = "the weights are random: this network knows nothing"
        for number, image in enumerate(self.images[:_MOST_IMAGES]):
            best = [f"{p.name} {p.probability:.1%}" for p in image.predictions[: 3 if len(self.images) == 1 else 1]]
            cells[f"image {number}"] = ": ".join(filter(None, [os.path.basename(image.name), ", ".join(best)]))
            cells[f"Grad-CAM {number}"] = image._cells()["picture"]
        left = len(self.images) - _MOST_IMAGES
        return cells | ({"more images": left} if left > 0 else {})

    @property
    def is_random(self) -> bool:
        """Whether the weights are random: such a network knows nothing."""
        return is_random(self.weights)


def _seen_png(image: InspectedImage) -> bytes:
    """What the network saw in few colours, with the Grad-CAM over it if there is one."""
    heat, picture = None, image.seen.convert("RGB")
    if image.cam is not None:
        values = np.nan_to_num(image.cam.still, posinf=0.0, neginf=0.0)
        heat = Heat(values, (0, 0, *picture.size), float(values.max()) or 1.0)
    return image_bytes(draw_heat(picture, heat, min(224, picture.width), "inferno").quantize(128))


@dataclass(frozen=True)
class InspectionEvidence:
    """What was recorded.

    Attributes:
        net: The model.
        inputs: The prepared images; ``net.inputs(*inputs[0])`` are the positional inputs of a pass of the first.
        images: The images, with predictions and Grad-CAM.
        scores: Of each image the logits ``(1, K)``; None for a model without scores of classes.
        calls: Every call of a layer without layers in it, and of each drawn block, in order of execution.
        layers: The drawn calls with their maps, channel means, and gradient × activation.
        totals: What a `StatisticsCollector` measured over all images: BatchNorms, and the layers of ``statistics``.
        statistics: Of convolutions, Linear layers, activation functions and the model.
        parameters: Statistics of the parameters.
        findings: On activations and parameters, the most severe first.
        changes: Of each block, by the key of its call, ``(images,)`` norm of output minus input over norm of input; NaN
            where their shapes differ. Blocks have layers inside, and are members of a Sequential or a ModuleList.
        trace: Every call of a layer and of an operation, with what it read.
        pictures: The images as they were read, upright and RGB.
        against: Where the model is outside the range of the reference, if there is one.
        softmax: Whether the model returns probabilities, of which ``scores`` are the logits.
    """

    net: LoadedModel
    inputs: tuple[tuple[Tensor, ...], ...]
    images: tuple[InspectedImage, ...]
    scores: tuple[Tensor | None, ...]
    calls: tuple[CallFacts, ...]
    layers: tuple[InspectedLayer, ...]
    totals: RunningStatistics
    statistics: tuple[LayerStatistics, ...]
    parameters: tuple[ParameterStatistics, ...]
    findings: tuple[Finding, ...]
    changes: Mapping[str, NDArray[np.float64]]
    trace: Trace = field(default_factory=lambda: Trace((), (), ()))
    pictures: tuple[Image.Image, ...] = ()
    against: AgainstReference | None = None
    softmax: bool = False

    def feeders(self) -> dict[str, str]:
        """The layer with weights right before each BatchNorm."""
        kinds = {row.layer: row for row in self.parameters}
        feeders, last = {}, ""
        for facts in self.calls:
            row = kinds.get(facts.call.name)
            if row is None:
                continue
            if row.name.endswith(("running_mean", "running_var")):
                feeders[facts.call.name] = last
            else:
                last = facts.call.name
        return feeders

    def is_bypassed(self, layer: str) -> bool:
        """Whether a skip connection goes around a layer: it may be dead in a sound network."""
        names = {layer.name for layer in self.trace.layers}
        return any(f"{outer}{OPERATION}add" in names for outer in enclosing(layer) if outer)
