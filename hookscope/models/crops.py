"""Which part of a photograph a network sees, so that what it shows can be laid over the photograph itself."""

from __future__ import annotations

from hookscope.models.preprocess import Preprocess

Box = tuple[float, float, float, float]


def seen_box(preprocess: Preprocess, width: int, height: int) -> Box:
    """``(left, top, right, bottom)`` in pixels of a photograph of that size, not rounded, of what the network sees.

    Torchvision's classification transforms resize the shorter side and cut out the middle; a photograph smaller than
    the cut is padded, and then the box reaches beyond it. What only resizes sees it all.

    Example:
        >>> from hookscope.models.preprocess import imagenet_transforms
        >>> seen_box(Preprocess("classification", imagenet_transforms(224, 256)), 512, 256)
        (144.0, 16.0, 368.0, 240.0)
    """
    whole = (0.0, 0.0, float(width), float(height))
    if preprocess.mode != "weights" or preprocess.family not in ("classification", "video"):
        return whole
    transforms = preprocess.transforms_for((height, width))
    crop, resize = getattr(transforms, "crop_size", None), getattr(transforms, "resize_size", None)
    if not crop or not resize:
        return whole
    high, wide = _resized(resize, height, width)
    top, bottom = _cut(high, crop[0])
    left, right = _cut(wide, crop[-1])
    across, down = width / wide, height / high
    return left * across, top * down, right * across, bottom * down


def _resized(resize: list[int], height: int, width: int) -> tuple[int, int]:
    """``(H, W)`` after torchvision's resize: one number is for the shorter side, the other is rounded down."""
    if len(resize) > 1:
        return resize[0], resize[1]
    short, long = sorted((height, width))
    other = int(resize[0] * long / short)
    return (other, resize[0]) if height > width else (resize[0], other)


def _cut(side: int, crop: int) -> tuple[int, int]:
    """Where torchvision's centre crop begins and ends along one side; outside it pads, the smaller half first."""
    begin = -((crop - side) // 2) if crop > side else round((side - crop) / 2.0)
    return begin, begin + crop
