"""Maps of a clip frame by frame: which map belongs to which frame, one scale, and the files that are written."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hookscope.drawing.files import write_animation
from hookscope.errors import UsageError
from hookscope.explain.cam import class_activation_maps
from hookscope.explain.cam_maps import fuse_maps
from hookscope.explain.clip import animate_clip, draw_clip
from hookscope.explain.saliency import saliency_maps
from hookscope.images.reader import read_picture
from tests.nets import named

FRAMES = [Image.new("RGB", (40, 40), (0, 12 * at, 100)) for at in range(8)]
SIDE = 320  # of a panel of an animation: 40 pixels, magnified


def net(kernel: int, padding: int, stride: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    conv = nn.Conv3d(3, 4, (kernel, 1, 1), (stride, 1, 1), (padding, 0, 0), bias=False)
    return named(conv=conv, mean=nn.AdaptiveAvgPool3d(1), flat=nn.Flatten())


def flash(frame: int) -> torch.Tensor:
    """A clip of eight frames, black but for one."""
    clip = torch.zeros(1, 3, 8, 4, 4)
    clip[:, :, frame] = 1
    return clip


@pytest.mark.parametrize(("kernel", "padding", "stride"), [(2, 0, 2), (3, 1, 2), (1, 0, 1), (4, 0, 4), (8, 0, 8)])
def test_a_map_is_shown_with_the_frames_that_it_is_made_of(kernel: int, padding: int, stride: int) -> None:
    model = net(kernel, padding, stride)
    for frame in range(0, 8, stride):  # the middle of the window
        clip = flash(frame)
        [cam] = class_activation_maps(model, clip, "conv", 0, "layercam")
        reacts = model.conv(clip).detach().abs().amax((0, 1, 3, 4)).numpy()  # for each frame of the layer
        assert cam.frames == 8
        assert reacts[frame * len(reacts) // 8] > 0
        shown = cam.at_frame(frame)
        own = cam.values if cam.values.ndim == 3 else cam.values[None]
        assert np.array_equal(shown, own[frame // stride])


def test_every_frame_stands_beside_its_map_on_one_scale() -> None:
    model = net(2, 0)
    with torch.no_grad():
        model.conv.weight.fill_(1)
    clip = torch.zeros(1, 3, 8, 4, 4)
    clip[:, :, 2:4], clip[:, :, 6:8] = 1, 2  # the second and the fourth map of the layer, the last the highest
    [cam] = class_activation_maps(model, clip, "conv", 0)
    assert (cam.values[:, 0, 0] / cam.values.max()).round(3).tolist() == [0, 0.5, 0, 1]
    pages = animate_clip([cam], FRAMES)
    assert len(pages) == 8 and len({page.size for page in pages}) == 1
    for at, page in enumerate(pages):
        row = next(y for y in range(page.height) if page.getpixel((14, y)) == (0, 12 * at, 100))
        assert page.getpixel((14 + SIDE - 1, row + SIDE - 1)) == (0, 12 * at, 100)
    maps = [page.crop((14 + SIDE + 12, row, 14 + 2 * SIDE + 12, row + SIDE)) for page in pages]
    brightness = [float(np.asarray(panel.convert("L"), float).mean()) for panel in maps]  # grows with the value
    assert brightness[6] > brightness[2] + 20 > brightness[0] + 40
    assert max(abs(brightness[at] - brightness[at + 1]) for at in (0, 2, 4, 6)) < 10  # two frames have one map
    facts = json.loads(pages[5].info["hookscope"])
    assert (facts["frames"], facts["maps"][0]["top"]) == (8, pytest.approx(float(cam.values.max())))
    assert pages[0].width - animate_clip([cam], FRAMES, width=100)[0].width == 2 * (SIDE - 100)


def test_a_strip_has_all_frames_in_the_order_of_time() -> None:
    [cam] = class_activation_maps(net(2, 0), torch.rand(1, 3, 8, 4, 4), "conv", 0)
    strip = draw_clip([cam], FRAMES, width=50)
    pixels = np.asarray(strip)
    places = []
    for frame in FRAMES:
        y, x = np.argwhere((pixels == np.array(frame.getpixel((0, 0)))).all(-1))[0]
        places.append((int(y), int(x)))
    assert places == sorted(places) and len({y for y, _ in places}) == 2
    assert {x for _, x in places} == {14 + 2 * (50 + 12) * at for at in range(4)}


def test_saliency_has_a_map_for_each_frame_and_signs_two_colours() -> None:
    clip = torch.rand(1, 3, 8, 4, 4)
    for method in ("gradient", "gradient-input"):
        [saliency] = saliency_maps(net(2, 0), clip, 0, method)
        assert saliency.frames == 8
        assert np.allclose(saliency.by_frame.mean(0), saliency.still)
        assert len(animate_clip(saliency, FRAMES, scale_of=[saliency])) == 8
    assert saliency.by_frame.shape == (8, 4, 4)


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_an_animation_is_read_back_as_its_frames(suffix: str, tmp_path: Path) -> None:
    [cam] = class_activation_maps(net(2, 0), torch.rand(1, 3, 8, 4, 4), "conv", 0)
    pages, path = animate_clip([cam], FRAMES), tmp_path / f"clip{suffix}"
    write_animation(pages, path)
    back = read_picture(path, frames=8).frames
    assert [frame.size for frame in back] == [page.size for page in pages]
    worst = max(np.abs(np.asarray(a, float) - np.asarray(b, float)).mean() for a, b in zip(back, pages, strict=True))
    assert worst < (4 if suffix == ".gif" else 1e-9)  # a GIF has 256 colours
    with Image.open(io.BytesIO(path.read_bytes())) as file:
        text = file.getexif()[0x010E] if suffix == ".webp" else file.info["comment"]
    assert json.loads(text)["method"] == "gradcam"


def test_bad_clips_are_one_line_each() -> None:
    [cam] = class_activation_maps(net(2, 0), torch.rand(1, 3, 8, 4, 4), "conv", 0)
    still = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for maps, frames, words in (
        ([cam], FRAMES[:3], "3 frames of a clip; the model was given 8"),
        (class_activation_maps(still, torch.rand(1, 3, 8, 8), "0", 0), FRAMES[0], "the input has no frames"),
        (class_activation_maps(net(2, 0), torch.rand(1, 3, 8, 4, 4), "conv", "top:2"), FRAMES, "several classes"),
        ([], FRAMES, "no map to draw"),
    ):
        with pytest.raises(UsageError, match=words):
            draw_clip(maps, frames)
    [fused] = fuse_maps([cam, cam])
    assert fused.frames == 8 and len(animate_clip([fused], FRAMES[0])) == 8
