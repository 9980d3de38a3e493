"""The box is judged by a picture whose red and green are its own coordinates, sent through the real transforms."""

import numpy as np
import pytest
from PIL import Image

from hookscope.models.crops import seen_box
from hookscope.models.preprocess import Preprocess, imagenet_transforms


def coordinates(width, height):
    """Red rises from 0 to 255 from left to right, green from top to bottom."""
    x, y = (np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height
    pixels = np.zeros((height, width, 3))
    pixels[..., 0], pixels[..., 1] = x[None] * 255, y[:, None] * 255
    return Image.fromarray(pixels.round().astype(np.uint8))


def edges_seen(preprocess, width, height):
    """Left, top, right, bottom as the prepared tensor tells them, by a line through its middle."""
    tensor = preprocess(coordinates(width, height)).double()
    tensor = tensor[:, 0] if tensor.dim() == 4 else tensor
    if preprocess.mode == "weights":
        mean, std = preprocess.transforms.mean, preprocess.transforms.std
        tensor = np.array(std)[:, None, None] * tensor.numpy() + np.array(mean)[:, None, None]
    else:
        tensor = tensor.numpy()
    high, wide = tensor.shape[-2:]

    def line(values, length):
        # away from the edges, where filters see less
        inner = slice(length // 5, -(length // 5))
        slope, begin = np.polyfit(np.arange(length)[inner] + 0.5, values[inner], 1)
        return begin, begin + slope * length

    left, right = line(tensor[0, high // 2] * width, wide)
    top, bottom = line(tensor[1, :, wide // 2] * height, high)
    return left, top, right, bottom


@pytest.mark.parametrize("size", [(451, 300), (300, 451), (256, 256), (640, 427), (90, 70), (1000, 240)])
@pytest.mark.parametrize(
    ("mode", "input_size"), [("weights", None), ("weights", (96, 160)), ("weights", (64, 64)), ("stretch", None)]
)
def test_the_box_is_what_the_transforms_see(size, mode, input_size):
    preprocess = Preprocess("classification", imagenet_transforms(224, 256), mode, input_size)
    box = seen_box(preprocess, *size)
    assert box == pytest.approx(edges_seen(preprocess, *size), abs=max(size) / 120)


def test_clips_are_resized_without_their_proportions():
    from hookscope.models.preprocess import usual_transforms

    preprocess = Preprocess("video", usual_transforms("video"), frames=2)
    assert seen_box(preprocess, 451, 300) == pytest.approx(edges_seen(preprocess, 451, 300), abs=4)


def test_a_picture_smaller_than_the_crop_is_padded():
    preprocess = Preprocess("classification", imagenet_transforms(224, 112))
    box = seen_box(preprocess, 112, 112)
    assert box == (-56.0, -56.0, 168.0, 168.0)
    tensor = preprocess(Image.new("RGB", (112, 112), "white"))
    assert int((tensor[0] > 0).sum()) == 112 * 112 and float(tensor[0, 56, 56]) > 0 and float(tensor[0, 55, 55]) < 0


@pytest.mark.parametrize("family", ["detection", "segmentation", "optical_flow"])
def test_what_only_resizes_sees_it_all(family):
    assert seen_box(Preprocess(family, None), 30, 20) == (0, 0, 30, 20)
