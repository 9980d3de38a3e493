"""Maps from files, whoever made them, over the network's input."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from hookscope.errors import InputError, UsageError
from hookscope.faithfulness.facts import Map

PixelBox = tuple[float, float, float, float]
MAP_SUFFIXES = (".npy", ".npz", ".png")


def read_maps(path: str, word: str) -> dict[str, NDArray[Any]]:
    """The maps in a file by name: one of ``.npy`` or ``.png``, several of ``.npz``.

    Of a ``.npz`` file with keys such as ``cat/layer4/281``, as ``cam --raw`` writes it, those of the image called
    ``word``; of a folder the file that is called ``word``.
    """
    name = os.path.splitext(os.path.basename(os.path.normpath(path)))[0]
    if os.path.isdir(path):
        files = [os.path.join(path, word + suffix) for suffix in MAP_SUFFIXES]
        if not (found := [file for file in files if os.path.exists(file)]):
            raise InputError(f"{path} has no map of {word}", do=f"name it {word}.npy, .npz or .png")
        path = found[0]
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
        reason = getattr(error, "strerror", None) or f"it is no {kind} file"
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
    cut = whole.transform(size[::-1], Image.Transform.EXTENT, box, Image.Resampling.BILINEAR)
    found: Map = np.asarray(cut)
    return found


def read_boxes(path: str) -> dict[str, list[Sequence[float]]]:
    """The boxes ``(left, top, right, bottom)`` of each image in a JSON file, in pixels of the photograph.

    Each file name has a box, a list of boxes, or an object with ``box`` or ``boxes``.
    """
    do = 'write {"cat.jpg": [left, top, right, bottom]}'
    try:
        with open(path, encoding="utf-8-sig") as stream:
            content = json.load(stream)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise UsageError(f"the boxes {path} cannot be read: {reason}", do=do) from error
    boxes: dict[str, list[Sequence[float]]] = {}
    for image, given in content.items() if isinstance(content, dict) else ():
        found = given.get("box", given.get("boxes")) if isinstance(given, dict) else given
        several: list[Any] = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
        if not all(map(_is_box, several)):
            raise UsageError(f"'{image}' in {path} has no box", do=do)
        boxes[image] = several
    if not boxes:
        raise UsageError(f"{path} has no boxes", do=do)
    return boxes


def _is_box(given: Any) -> bool:
    return isinstance(given, list) and len(given) == 4 and all(isinstance(side, int | float) for side in given)
