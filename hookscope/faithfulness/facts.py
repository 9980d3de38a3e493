"""What one map of one image is worth, and maps and boxes from files."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from hookscope.display import Cells, Picture, Shown
from hookscope.drawing import map_png
from hookscope.errors import InputError, UsageError
from hookscope.explain import ClassActivationMap, Saliency
from hookscope.scores import Score

RANDOM, CENTRED = "random", "centred"
BASELINES = {RANDOM: "a random map", CENTRED: "a bright spot in the middle"}
"""The maps that know nothing of the model, and what they are."""

NUMBERS = ("road", "insertion", "deletion", "drop", "increase", "points", "in_box", "randomized", "passes")
"""The fields of `Faithfulness` that are numbers or yes and no."""

Map = NDArray[np.float32]
PixelBox = tuple[float, float, float, float]
MAP_SUFFIXES = (".npy", ".npz", ".png")


def as_array(given: Any) -> NDArray[Any]:
    """The values of a map: an array, a tensor, or a result of `class_activation_maps` or `saliency_maps`."""
    values = given.map if isinstance(given, Saliency) else given
    values = given.values if isinstance(given, ClassActivationMap) else values
    return np.asarray(values.detach().cpu().float() if isinstance(values, Tensor) else values)


@dataclass(frozen=True, repr=False)
class Faithfulness(Shown):
    """How faithful one map of one image is to the model: what happens to the score when its pixels are removed.

    The score is the probability of a class, 0 to 1. The score of another target is scaled: 1 for the image, 0 for
    an image of its mean colour.

    Attributes:
        name: Name of the map, such as its method; ``random`` and ``centred`` are the baselines.
        prediction: What is explained: mostly a class, its score and probability.
        values: The map ``(h, w)``, or ``(T, h, w)`` of a clip, as it was given.
        deletion: Area under the score while the most important pixels are removed first (RISE, arXiv:1806.07421);
            lower is better.
        insertion: Area under the score while the most important pixels are shown first (RISE); higher is better.
        road: ROAD (arXiv:2202.00449): half the difference of the score without the least and without the most
            important 10, 20, ... 90 % of the pixels, -0.5 to 0.5; higher is better.
        drop: Share of the score lost when the image is multiplied by the map, 0 to 1 (average drop of Grad-CAM++,
            arXiv:1710.11063); lower is better.
        increase: Whether the score rises instead.
        in_box: Share of the map inside the boxes, 0 to 1; None without boxes.
        points: Whether the highest value of the map lies in a box (pointing game, arXiv:1608.00507).
        randomized: Rank correlation, -1 to 1, with the map of the same model with random weights: a map near 1 does
            not depend on what the model has learned (arXiv:1810.03292). None where it was not computed.
        curves: The score at each step by name: ``deletion`` and ``insertion`` ``(steps + 1,)``; ``most`` and ``least``
            ``(9,)``, without the most and the least important pixels.
        passes: Number of images that the model saw for it; 0 if an earlier map is the same.
        same_as: Name of the earlier map that is the same in other units; None if there is none.
    """

    name: str
    prediction: Score
    values: Map
    deletion: float
    insertion: float
    road: float
    drop: float
    increase: bool
    in_box: float | None
    points: bool | None
    curves: Mapping[str, NDArray[np.float64]]
    passes: int
    randomized: float | None = None
    same_as: str | None = None

    def _cells(self) -> Cells:
        cells = {"map": self.name, **self.prediction._cells(), "road": self.road, "insertion": self.insertion}
        cells |= {"deletion": self.deletion, "drop": self.drop, "in_box": self.in_box, "randomized": self.randomized}
        return cells | {"picture": Picture(partial(map_png, self.still), self.name)}

    @property
    def still(self) -> Map:
        """The map ``(h, w)`` that is drawn: of a clip the mean over its frames."""
        return self.values.mean(0) if self.values.ndim == 3 else self.values


def read_maps(path: str, word: str) -> dict[str, NDArray[Any]]:
    """The maps in a file by name: one of ``.npy`` or ``.png``, several of ``.npz``.

    A ``.npz`` file that the command ``cam`` wrote has keys such as ``cat/layer4/281``: only maps of the image called
    ``word`` are read. In a folder the file called ``word`` is read.
    """
    name = os.path.splitext(os.path.basename(os.path.normpath(path)))[0]
    if os.path.isdir(path):
        files = [os.path.join(path, word + suffix) for suffix in MAP_SUFFIXES]
        if not (paths := [file for file in files if os.path.exists(file)]):
            raise InputError(f"{path} has no map of {word}", do=f"name it {word}.npy, .npz or .png")
        path = paths[0]
    kind = os.path.splitext(path)[1].lower()
    try:
        if kind == ".png":
            with Image.open(path) as image:
                return {name: np.asarray(image.convert("L"), np.float32)}
        with open(path, "rb") as stream:  # not by NumPy, which leaves a damaged file open
            loaded: Any = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {name: loaded}
            arrays = dict(loaded)
        if not arrays:
            raise InputError(f"{path} holds no map", do="save one by name: np.savez(path, mine=values)")
    except (OSError, ValueError, EOFError, SyntaxError, zipfile.BadZipFile, UnidentifiedImageError) as error:
        reason = getattr(error, "strerror", None) or f"it is not a {kind} file"
        raise InputError(f"the map {path} cannot be read: {reason}", do="check the path") from error
    if any("/" in key for key in arrays):
        of_image = {key.partition("/")[2]: values for key, values in arrays.items() if key.startswith(f"{word}/")}
        if not of_image:
            images = ", ".join(dict.fromkeys(key.partition("/")[0] for key in arrays))
            raise InputError(f"{path} has no map of {word}", f"it has maps of {images}", "give the same images")
        arrays = of_image
    return {name: next(iter(arrays.values()))} if len(arrays) == 1 else arrays


def over_input(values: NDArray[Any], photograph: tuple[int, int], box: PixelBox, size: tuple[int, int]) -> NDArray[Any]:
    """A map with a value for each pixel of the ``photograph`` ``(W, H)``, cut to ``box``, which the network saw.

    A map of another shape covers the input ``size`` ``(H, W)`` already.
    """
    if values.shape != photograph[::-1] or (values.shape == size and box == (0, 0, *photograph)):
        return values
    whole = Image.fromarray(values.astype(np.float32))
    return np.asarray(whole.transform(size[::-1], Image.Transform.EXTENT, box, Image.Resampling.BILINEAR))


def read_boxes(path: str) -> dict[str, list[Sequence[float]]]:
    """The boxes ``(left, top, right, bottom)`` of each image in a JSON file, in pixels of the photograph.

    Each file name has a box, a list of boxes, or an object with ``box`` or ``boxes``.
    """
    do = 'write {"cat.jpg": [left, top, right, bottom]}'
    try:
        with open(path, encoding="utf-8-sig") as stream:
            content = json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise UsageError(f"the boxes {path} cannot be read: {reason}", do=do) from error
    boxes: dict[str, list[Sequence[float]]] = {}
    for image, given in content.items() if isinstance(content, dict) else ():
        box = given.get("box", given.get("boxes")) if isinstance(given, dict) else given
        several: list[Any] = box if isinstance(box, list) and box and isinstance(box[0], list) else [box]
        if not all(isinstance(b, list) and len(b) == 4 and all(isinstance(x, int | float) for x in b) for b in several):
            raise UsageError(f"'{image}' in {path} has no box", do=do)
        boxes[image] = several
    if not boxes:
        raise UsageError(f"{path} has no boxes", do=do)
    return boxes
