"""Draw pictures of one shape or texture each over a cluttered background, with the box around it known.

    python samples/shapes/draw.py --count 20 --seed 7 --into drawn

writes `checkerboard.png`, `checkerboard-2.png` and so on, and `boxes.json`. Every picture follows from its seed and
number alone.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIDE = 128
FINE = 2  # drawn so many times larger, then made smaller: smooth edges

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Drawn:
    """A picture, the number of its class, and the box ``(left, top, right, bottom)`` around its object in pixels."""

    image: Image.Image
    label: int
    box: tuple[int, int, int, int]


def draw(seed: int, number: int, label: int | None = None, side: int = SIDE) -> Drawn:
    """Picture ``number`` of the stream ``seed``; its class follows from the number unless ``label`` is given.

    Example:
        >>> drawn = draw(0, 13)
        >>> CLASSES[drawn.label], drawn.image.size
        ('triangle', (128, 128))
    """
    rng = np.random.default_rng((seed, number))
    label = number % len(CLASSES) if label is None else label
    size = side * FINE
    picture = _background(rng, size)
    _clutter(rng, picture, size)
    mask = Image.new("L", (size, size))
    radius = rng.uniform(0.14, 0.27) * size
    centre = rng.uniform(radius, size - radius, 2)
    _PAINTERS[label](rng, ImageDraw.Draw(mask), centre, radius)
    picture.paste(_filling(rng, picture, mask, size), mask=mask)
    _scratches(rng, picture, size, int(rng.integers(0, 4)))
    left, top, right, bottom = _object_box(mask)
    small = picture.resize((side, side), Image.Resampling.BOX)
    noisy = np.asarray(small, np.float32) + rng.normal(0, rng.uniform(1, 8), (side, side, 3))
    image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    return Drawn(image, label, (left // FINE, top // FINE, -(-right // FINE), -(-bottom // FINE)))


def _object_box(mask: Image.Image) -> tuple[int, int, int, int]:
    box = mask.getbbox()
    assert box is not None
    return box


def _background(rng: np.random.Generator, size: int) -> Image.Image:
    """Soft blots of two colours."""
    coarse = rng.random((int(rng.integers(2, 6)),) * 2)
    weight = Image.fromarray((255 * coarse).astype(np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
    one, other = (Image.new("RGB", (size, size), _colour(rng)) for _ in range(2))
    return Image.composite(one, other, weight)


def _clutter(rng: np.random.Generator, picture: Image.Image, size: int) -> None:
    """Crooked scraps and bent lines, none of them one of the classes."""
    pen = ImageDraw.Draw(picture)
    for _ in range(rng.integers(4, 14)):
        pen.polygon(_scrap(rng, size), fill=_colour(rng))
    _scratches(rng, picture, size, int(rng.integers(3, 12)))


def _scrap(rng: np.random.Generator, size: int) -> Points:
    """A thin crooked quadrangle."""
    x, y = rng.uniform(0, size, 2)
    long, thin, turn = rng.uniform(0.06, 0.2) * size, rng.uniform(0.01, 0.035) * size, rng.uniform(0, math.tau)
    first = (long * rng.uniform(0.3, 1), -thin * rng.uniform(0, 2))
    last = (-long * rng.uniform(0.3, 1), thin * rng.uniform(0, 2))
    corners = [(-long, -thin), first, (long, thin), last]
    return _placed(corners, (x, y), 1, turn)


def _scratches(rng: np.random.Generator, picture: Image.Image, size: int, count: int) -> None:
    pen = ImageDraw.Draw(picture)
    for _ in range(count):
        knots = rng.uniform(0, size, 2) + np.cumsum(rng.normal(0, 0.12 * size, (int(rng.integers(2, 5)), 2)), axis=0)
        pen.line([tuple(knot) for knot in knots], fill=_colour(rng), width=int(rng.integers(1, 4)))


def _filling(rng: np.random.Generator, picture: Image.Image, mask: Image.Image, size: int) -> Image.Image:
    """One colour that stands out from what lies behind the object."""
    behind = np.asarray(picture.resize((32, 32)), np.float32)
    around = behind[np.asarray(mask.resize((32, 32))) > 0].mean(0) if mask.getbbox() else behind.mean((0, 1))
    colour = _colour(rng)
    while np.abs(np.subtract(colour, around)).max() < 90:
        colour = _colour(rng)
    return Image.new("RGB", (size, size), colour)


def _colour(rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = rng.integers(0, 256, 3)
    return int(red), int(green), int(blue)


def _placed(points: Sequence[tuple[float, float]], centre: Sequence[float], radius: float, turn: float) -> Points:
    cos, sin = math.cos(turn) * radius, math.sin(turn) * radius
    return [(centre[0] + x * cos - y * sin, centre[1] + x * sin + y * cos) for x, y in points]


def _polar(count: int, radii: Sequence[float]) -> Points:
    """Points around the centre, equally far in angle, their radii taken in turn."""
    turns = [(radii[at % len(radii)], math.tau * at / count) for at in range(count)]
    return [(radius * math.cos(angle), radius * math.sin(angle)) for radius, angle in turns]


def _round(pen: ImageDraw.ImageDraw, centre: Sequence[float], radius: float, fill: int) -> None:
    x, y = centre
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)


def _polygon(points: Points) -> Callable[..., None]:
    def paint(rng: np.random.Generator, pen: ImageDraw.ImageDraw, centre: Sequence[float], radius: float) -> None:
        pen.polygon(_placed(points, centre, radius, rng.uniform(0, math.tau)), fill=255)

    return paint


def _circle(rng: np.random.Generator, pen: ImageDraw.ImageDraw, centre: Sequence[float], radius: float) -> None:
    _round(pen, centre, radius, 255)


def _ring(rng: np.random.Generator, pen: ImageDraw.ImageDraw, centre: Sequence[float], radius: float) -> None:
    _round(pen, centre, radius, 255)
    _round(pen, centre, radius * rng.uniform(0.45, 0.65), 0)


def _crescent(rng: np.random.Generator, pen: ImageDraw.ImageDraw, centre: Sequence[float], radius: float) -> None:
    turn = rng.uniform(0, math.tau)
    _round(pen, centre, radius, 255)
    bite = (centre[0] + 0.55 * radius * math.cos(turn), centre[1] + 0.55 * radius * math.sin(turn))
    _round(pen, bite, 0.8 * radius, 0)


def _stripes(rng: np.random.Generator, pen: ImageDraw.ImageDraw, centre: Sequence[float], radius: float) -> None:
    turn, count = rng.uniform(0, math.tau), int(rng.integers(4, 7))
    for at in range(count):
        low, high = -1 + 2 * at / count, -1 + (2 * at + 1.1) / count
        pen.polygon(_placed([(low, -0.9), (high, -0.9), (high, 0.9), (low, 0.9)], centre, radius, turn), fill=255)


def _checkerboard(rng: np.random.Generator, pen: ImageDraw.ImageDraw, centre: Sequence[float], radius: float) -> None:
    turn, count = rng.uniform(0, math.tau), int(rng.integers(4, 6))
    step = 1.7 / count
    for row in range(count):
        for column in range(row % 2, count, 2):
            x, y = -0.85 + column * step, -0.85 + row * step
            field = [(x, y), (x + step, y), (x + step, y + step), (x, y + step)]
            pen.polygon(_placed(field, centre, radius, turn), fill=255)


def _dots(rng: np.random.Generator, pen: ImageDraw.ImageDraw, centre: Sequence[float], radius: float) -> None:
    turn = rng.uniform(0, math.tau)
    places = _placed([(x, y) for x in (-0.75, 0, 0.75) for y in (-0.75, 0, 0.75)], centre, radius, turn)
    for place in places:
        _round(pen, place, radius * 0.24, 255)


_ARM = 0.3
_CROSS = [
    *((_ARM, _ARM), (_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM)),
    *((-_ARM, -_ARM), (-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM)),
]

_BY_CLASS: dict[str, Callable[..., None]] = {
    "checkerboard": _checkerboard,
    "circle": _circle,
    "crescent": _crescent,
    "cross": _polygon(_CROSS),
    "dots": _dots,
    "ring": _ring,
    "square": _polygon(_polar(4, [1])),
    "star": _polygon(_polar(10, [1, 0.42])),
    "stripes": _stripes,
    "triangle": _polygon(_polar(3, [1])),
}
CLASSES = tuple(_BY_CLASS)
_PAINTERS = tuple(_BY_CLASS.values())


def write(folder: Path, seed: int, numbers: Sequence[int], by_class: bool = False) -> None:
    """Pictures as PNG files, ``by_class`` in folders, and their classes and boxes in ``boxes.json``."""
    for name in CLASSES if by_class else ("",):
        (folder / name).mkdir(parents=True, exist_ok=True)
    boxes: dict[str, dict[str, object]] = {}
    for number in numbers:
        drawn = draw(seed, number)
        before = sum(facts["class"] == CLASSES[drawn.label] for facts in boxes.values())
        name = CLASSES[drawn.label] + (f"-{before + 1}" if before else "") + ".png"
        name = f"{CLASSES[drawn.label]}/{name}" if by_class else name
        drawn.image.save(folder / name)
        boxes[name] = {"class": CLASSES[drawn.label], "box": list(drawn.box), "seed": seed, "number": number}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(facts)}" for name, facts in boxes.items())
    (folder / "boxes.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def main() -> None:
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], formatter_class=shown)
    parser.add_argument("--count", type=int, default=12, help="how many pictures, from number 0")
    parser.add_argument("--seed", type=int, default=5, help="which stream of pictures")
    parser.add_argument("--into", type=Path, required=True, help="folder, made when missing")
    parser.add_argument("--by-class", action="store_true", help="a folder for each class")
    options = parser.parse_args()
    write(options.into, options.seed, range(options.count), options.by_class)


if __name__ == "__main__":
    main()
