"""Maps of a clip frame by frame: a strip of all frames, and an animation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from hookscope.display import Pictures
from hookscope.drawing import DARK, LIGHT, PALE, HeatPanel, HeatRow
from hookscope.errors import UsageError, all_of
from hookscope.explain.cam_maps import ClassActivationMap, maps_by_class
from hookscope.explain.page import (
    ONE_COLOUR,
    TWO_COLOURS,
    OverlaySource,
    answer_facts,
    percentile,
    why_unseen,
)
from hookscope.explain.saliency import Saliency
from hookscope.explain.saliency_methods import SALIENCY_METHODS
from hookscope.images import InputImage, as_picture
from hookscope.models import LoadedModel

Explained = Sequence[ClassActivationMap] | Saliency
_PAIRS, _WIDTH, _LARGE = 4, 200, 480  # frames in a row of a strip; widths of a panel


@dataclass(frozen=True)
class _Track:
    """The maps of one layer, or of the saliency, for every frame: ``values`` ``(T, h, w)``, and words about each."""

    name: str
    about: str
    values: NDArray[np.float32]
    top: float
    words: Sequence[Sequence[str]]


def draw_clip(
    maps: Explained,
    photograph: InputImage | Image.Image | Sequence[Image.Image],
    net: LoadedModel | nn.Module | None = None,
    *,
    scale_of: Sequence[ClassActivationMap | Saliency] = (),
    cmap: str | None = None,
    width: int | None = None,
) -> Image.Image:
    """Draw maps of a clip as a strip: every frame of the clip beside its map, in the order of time, on one scale.

    A layer that merges frames has one map for several of them: `ClassActivationMap.at_frame` says which, and the words
    under each map too. The scale of a layer ends at its highest value in any frame; of saliency it is clipped at the
    99.5th percentile of all frames. The image holds the facts as JSON in ``image.info["hookscope"]``.

    Args:
        maps: Maps of one class, from `class_activation_maps`, or from `saliency_maps`.
        photograph: The frames of the clip, of one size; one picture alone is repeated.
        net: The model, as for `draw_cam`.
        scale_of: Further maps that the scale includes.
        cmap: A colour map of matplotlib.
        width: Width of a panel in pixels, 200 by default.

    Raises:
        UsageError: for maps of a picture, maps of several classes, another number of frames than the clip has, or a
            page of more than 200 million pixels.

    Example:
        >>> import hookscope, torch
        >>> from PIL import Image
        >>> net = torch.nn.Sequential(torch.nn.Conv3d(3, 2, 3), torch.nn.AdaptiveAvgPool3d(1), torch.nn.Flatten())
        >>> maps = hookscope.class_activation_maps(net, torch.rand(1, 3, 8, 16, 16))
        >>> frames = [Image.new("RGB", (64, 64), (30 * at, 0, 0)) for at in range(8)]
        >>> draw_clip(maps, frames).width
        1712
    """
    page, photographs, tracks = _clip_of(maps, photograph, net, scale_of, cmap)
    rows = []
    for words, maps_of_frames in tracks:
        pairs = list(zip(photographs, maps_of_frames, strict=True))
        for begin in range(0, len(pairs), _PAIRS):
            panels = [panel for pair in pairs[begin : begin + _PAIRS] for panel in pair]
            rows.append(HeatRow(panels, [] if begin else words))
    return page(rows=rows, width=width or _WIDTH)


def animate_clip(
    maps: Explained,
    photograph: InputImage | Image.Image | Sequence[Image.Image],
    net: LoadedModel | nn.Module | None = None,
    *,
    scale_of: Sequence[ClassActivationMap | Saliency] = (),
    cmap: str | None = None,
    width: int | None = None,
) -> list[Image.Image]:
    """Draw each frame of a clip beside its maps, all on one scale: the pictures of an animation, of one size.

    The arguments, errors and facts are as in `draw_clip`; the width of a panel is the clip's, at most 480
    pixels. Pillow writes the animation: ``first.save("clip.gif", save_all=True, append_images=rest, loop=0)``.

    Example:
        >>> import hookscope, torch
        >>> from PIL import Image
        >>> net = torch.nn.Sequential(torch.nn.Conv3d(3, 2, 3), torch.nn.AdaptiveAvgPool3d(1), torch.nn.Flatten())
        >>> maps = hookscope.class_activation_maps(net, torch.rand(1, 3, 8, 16, 16))
        >>> len(animate_clip(maps, Image.new("RGB", (64, 64))))
        8
    """
    page, photographs, tracks = _clip_of(maps, photograph, net, scale_of, cmap)
    own = photographs[0].photograph
    width = width or (_LARGE if own is not None and own.width > _LARGE else None)
    words = [": ".join(said) for said, _ in tracks]
    frames = zip(photographs, *(panels for _, panels in tracks), strict=True)
    pages = [page(rows=[HeatRow(panels, words)], width=width) for panels in frames]
    height = max(page.height for page in pages)
    return Pictures(_padded(page, height) for page in pages)


def _padded(page: Image.Image, height: int) -> Image.Image:
    whole = Image.new("RGB", (page.width, height), "white")
    whole.paste(page)
    whole.info = page.info
    return whole


def _clip_of(
    maps: Explained,
    photograph: InputImage | Image.Image | Sequence[Image.Image],
    net: LoadedModel | nn.Module | None,
    others: Sequence[ClassActivationMap | Saliency],
    cmap: str | None,
) -> tuple[Callable[..., Image.Image], list[HeatPanel], list[tuple[Sequence[str], list[HeatPanel]]]]:
    """The page, a panel of each photograph, and words about each track with a panel of each of its maps."""
    kinds: tuple[type[ClassActivationMap | Saliency], ...] = (ClassActivationMap, Saliency)
    given = all_of(kinds, maps, "class_activation_maps or saliency_maps")
    if not given:
        raise UsageError("no map to draw", do="choose layers that have maps")
    first = given[0]
    maps = first if isinstance(first, Saliency) else [cam for cam in given if isinstance(cam, ClassActivationMap)]
    if not isinstance(maps, Saliency) and len(maps_by_class(maps)) > 1:
        raise UsageError("maps of several classes", do="draw a strip for each class: maps_by_class")
    states = net.preprocess.frames if isinstance(net, LoadedModel) else 1  # with the frames before the channels
    count = states if states > 1 else first.frames
    if count < 2:
        raise UsageError("the input has no frames", "a map of a clip has several", "use draw_cam or draw_saliency")
    pictures = _frames_of(photograph, count)
    still = photograph if isinstance(photograph, InputImage) else pictures[0]
    source = OverlaySource.of(still, net)
    if source.photograph.size != pictures[0].size or source.photograph.tobytes() != pictures[0].tobytes():
        pictures = [source.photograph] * count  # what the user's own preprocessing made of the first frame
    if isinstance(maps, Saliency):
        signed = SALIENCY_METHODS[maps.method].signed
        tracks = [_saliency_track(maps, count, [other for other in others if isinstance(other, Saliency)])]
        scale, ground = "share of the 99.5th percentile", LIGHT if signed else DARK
        cmap = cmap or (TWO_COLOURS if signed else ONE_COLOUR)
    else:
        signed, scale, ground, cmap = False, "share of the layer's highest value", PALE, cmap or ONE_COLOUR
        tracks = [_cam_track(replace(cam, frames=count), others) for cam in maps]
    words, alarm = source.answer_lines(first.prediction), why_unseen(first.prediction)
    heading = source.heading(words, first.method, alarm, scale=scale, signed=signed)
    facts = {
        "method": first.method,
        **answer_facts(first.prediction),
        "frames": count,
        "maps": [{"layer": track.name, "top": track.top, "shape": list(track.values.shape)} for track in tracks],
    }
    page = partial(source.page, heading, method=first.method, cmap=cmap, facts=facts, ground=ground)
    photographs = [
        HeatPanel(None, [f"frame {at} of {count}"], photograph=picture) for at, picture in enumerate(pictures, 1)
    ]

    def panel(track: _Track, at: int) -> HeatPanel:
        values = track.values[at]
        is_shown = values.any() if signed else (values > 0).any()
        alarm = "" if is_shown else "all zero" if signed else "no value above 0"
        return HeatPanel(source.heat(values, track.top, signed), track.words[at], alarm, photograph=pictures[at])

    return page, photographs, [((t.name, t.about), [panel(t, at) for at in range(count)]) for t in tracks]


def _frames_of(photograph: InputImage | Image.Image | Sequence[Image.Image], count: int) -> list[Image.Image]:
    frames = list(photograph) if isinstance(photograph, list | tuple) else list(as_picture(photograph, count).frames)
    if len(frames) not in (1, count):
        raise UsageError(f"{len(frames)} frames of a clip", f"the model was given {count}", "give these, or one")
    return [frame.convert("RGB") for frame in (frames * count if len(frames) == 1 else frames)]


def _cam_track(cam: ClassActivationMap, others: Sequence[ClassActivationMap | Saliency]) -> _Track:
    same = [other for other in others if isinstance(other, ClassActivationMap) and other.call.key == cam.call.key]
    top = max(float(item.values.max()) for item in (cam, *same))
    values = np.stack([cam.at_frame(at) for at in range(cam.frames)])
    own = len(cam.values) if cam.values.ndim == 3 else 1
    height, width = values.shape[1:]
    stride = f"{own} frames of {height}×{width}, stride {cam.frames / own:.3g} in time"
    if own == 1:
        stride = f"one map of {height}×{width} for all frames"
    about = f"{cam.call.type}, {stride}, highest value {max(top, 0.0):.3g}"
    words = [[f"map {at * own // cam.frames + 1} of {own}", *_extremes(values[at])] for at in range(cam.frames)]
    return _Track(cam.call.key, about, values, max(top, 0.0), words)


def _saliency_track(saliency: Saliency, count: int, others: Sequence[Saliency]) -> _Track:
    values = saliency.by_frame
    if len(values) != count:
        raise UsageError(f"a map of {len(values)} frames", f"the clip has {count}")
    top = max(percentile(item.by_frame) for item in (saliency, *others))
    about = f"{SALIENCY_METHODS[saliency.method].caption}; 99.5th percentile of all frames {top:.3g}"
    words = [[f"map {at + 1} of {count}", *_extremes(frame)] for at, frame in enumerate(values)]
    return _Track(saliency.method, about, values, top, words)


def _extremes(values: NDArray[np.float32]) -> list[str]:
    lowest = float(values.min())
    return [f"highest value {float(values.max()):.2e}", *([f"lowest {lowest:.2e}"] if lowest < 0 else [])]
