"""Drawn pictures of 40 by 40: digits in clutter, arrow signs, berries to count, two cloths, landscapes."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

SIDE = 40
BIG = 2 * SIDE
_TTF = Path(matplotlib.get_data_path(), "fonts", "ttf")
FONTS = sorted(str(path) for path in _TTF.glob("DejaVu*.ttf") if "Display" not in path.name)  # Display has no digits
SIGN = np.array([(200, 35, 35), (35, 75, 200), (230, 190, 30)])
ARROW = np.array([(-0.62, 0), (-0.1, -0.5), (-0.1, -0.2), (0.6, -0.2), (0.6, 0.2), (-0.1, 0.2), (-0.1, 0.5)])
PAIRS = [(above, below) for above in range(4) for below in range(4) if above != below]
Drawn = tuple[Image.Image, Any]
_font = cache(ImageFont.truetype)


def _rgb(colour: Any) -> Any:
    return tuple(int(value) for value in np.clip(colour, 0, 255))


def _soft(rng: Generator, low: Any, high: Any) -> Image.Image:
    """A smooth random ground in colours."""
    small = rng.uniform(low, high, (4, 4, 3)).astype(np.uint8)
    return Image.fromarray(small).resize((BIG, BIG), Image.Resampling.BICUBIC)


def _finish(rng: Generator, picture: Image.Image, noise: float = 6.0) -> Image.Image:
    small = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BOX)).astype(np.float32)
    return Image.fromarray(np.clip(small + rng.normal(0, noise, small.shape), 0, 255).astype(np.uint8))


def digits(rng: Generator, label: int) -> Drawn:
    """A bright digit of any colour on a dark ground with lines and specks."""
    picture = _soft(rng, 0, 110)
    pen = ImageDraw.Draw(picture)
    for _ in range(rng.integers(2, 6)):
        line = tuple(rng.uniform(0, BIG, 4))
        pen.line(line, fill=_rgb(rng.uniform(40, 150, 3)), width=int(rng.integers(1, 4)))
    for _ in range(rng.integers(2, 8)):
        x, y, r = *rng.uniform(0, BIG, 2), rng.uniform(1, 4)
        pen.ellipse((x - r, y - r, x + r, y + r), fill=_rgb(rng.uniform(40, 190, 3)))
    stencil = Image.new("L", (BIG, BIG), 0)
    x, y = rng.uniform(0.4, 0.6, 2) * BIG
    size = int(rng.integers(44, 66))
    font = _font(FONTS[rng.integers(len(FONTS))], size)
    ImageDraw.Draw(stencil).text((x, y), str(label), fill=255, font=font, anchor="mm")
    stencil = stencil.rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR, center=(x, y))
    picture.paste(_rgb(rng.uniform(150, 255, 3)), (0, 0), stencil)
    return _finish(rng, picture), None


def signs(rng: Generator, label: int) -> Drawn:
    """A round, square or eight-cornered sign: its colour (red, blue, yellow) and its arrow (left, up, right)."""
    picture = _soft(rng, (70, 80, 70), (190, 200, 210))
    pen = ImageDraw.Draw(picture)
    for _ in range(rng.integers(1, 5)):
        x, y, w, h = *rng.uniform(0, BIG, 2), *rng.uniform(4, 30, 2)
        pen.rectangle((x, y, x + w, y + h), fill=_rgb(rng.uniform(40, 220, 3)))
    r = rng.uniform(20, 30)
    x, y = rng.uniform(r + 2, BIG - r - 2, 2)
    pen.rectangle((x - 2, y, x + 2, BIG), fill=_rgb(np.full(3, rng.uniform(90, 150))))
    colour = SIGN[label // 3] + rng.uniform(-30, 30, 3)
    corners = (40, 4, 8)[int(rng.integers(3))]
    turns = [math.pi / corners + 2 * math.pi * i / corners for i in range(corners)]
    pen.polygon([(x + r * math.cos(turn), y + r * math.sin(turn)) for turn in turns], fill=_rgb(colour))
    angle = (0, math.pi / 2, math.pi)[label % 3] + rng.uniform(-0.2, 0.2)
    c, s = math.cos(angle), math.sin(angle)
    shape = ARROW * rng.uniform(0.8, 1.0) * r @ np.array([(c, s), (-s, c)])
    colour = np.full(3, 245 if label // 3 < 2 else 25) + rng.uniform(-10, 10, 3)
    pen.polygon([(x + a, y + b) for a, b in shape], fill=_rgb(colour))
    light = rng.uniform(0.75, 1.1)
    return _finish(rng, picture.point(lambda value: min(255, int(value * light)))), None


def berries(rng: Generator, label: int) -> Drawn:
    """One to five red berries among green leaves and blue berries that do not count."""
    picture = _soft(rng, (20, 50, 10), (90, 120, 60))
    pen = ImageDraw.Draw(picture)
    for _ in range(rng.integers(3, 8)):
        x, y, w, h = *rng.uniform(0, BIG, 2), *rng.uniform(6, 14, 2)
        pen.ellipse((x - w, y - h, x + w, y + h), fill=_rgb(rng.uniform((30, 90, 20), (110, 180, 70))))
    placed: list[tuple[float, float, float]] = []
    for red in [True] * (label + 1) + [False] * int(rng.integers(0, 5)):
        for _ in range(60):
            r = rng.uniform(5.5, 8.5)
            x, y = rng.uniform(r, BIG - r, 2)
            if all(math.hypot(x - a, y - b) > r + q + 1 for a, b, q in placed):
                break
        else:
            continue
        placed.append((x, y, r))
        colour = rng.uniform((170, 10, 20), (240, 60, 60)) if red else rng.uniform((30, 40, 140), (80, 90, 230))
        pen.ellipse((x - r, y - r, x + r, y + r), fill=_rgb(colour))
        pen.ellipse((x - r * 0.5, y - r * 0.6, x - r * 0.1, y - r * 0.2), fill=_rgb(colour + 90))
    return _finish(rng, picture), None


def _pattern(rng: Generator, kind: int) -> NDArray[Any]:
    """Level lines, upright lines, checks or dots in two colours."""
    yy, xx = np.mgrid[:BIG, :BIG].astype(float)
    period = rng.uniform(9, 15)
    a = rng.uniform(-0.12, 0.12)
    u = (xx * math.cos(a) + yy * math.sin(a) + rng.uniform(0, period)) / period % 1
    v = (-xx * math.sin(a) + yy * math.cos(a) + rng.uniform(0, period)) / period % 1
    shape = (v < 0.5, u < 0.5, (u < 0.5) ^ (v < 0.5), (u - 0.5) ** 2 + (v - 0.5) ** 2 < 0.09)[kind]
    one = rng.uniform(0, 255, 3)
    two = rng.uniform(0, 255, 3)
    while abs(one - two).mean() < 60:
        two = rng.uniform(0, 255, 3)
    return np.where(shape[..., None], one, two)


def cloth(rng: Generator, label: int) -> Drawn:
    """Two cloths: the class is which pattern is above and which below."""
    above, below = PAIRS[label]
    edge = rng.uniform(0.4, 0.6) * BIG + rng.uniform(-0.15, 0.15) * (np.arange(BIG) - BIG / 2)
    top = (np.arange(BIG)[:, None] < edge[None])[..., None]
    picture = Image.fromarray(np.where(top, _pattern(rng, above), _pattern(rng, below)).astype(np.uint8))
    return _finish(rng, picture, 8.0), None


def landscape(rng: Generator, label: int) -> Drawn:
    """Sky 0, grass 1, wall 2, roof 3, tree 4, sun 5 for every pixel: drawn in colour and as a map."""
    mark = Image.new("L", (BIG, BIG), 0)
    dull = label % 3 == 2
    sky = rng.uniform((150, 155, 160), (200, 205, 210)) if dull else rng.uniform((90, 150, 210), (150, 200, 255))
    fade = np.linspace(0, 1, BIG)[:, None, None] * rng.uniform(10, 60) * np.ones((BIG, BIG, 3))
    picture = Image.fromarray(np.clip(sky + fade, 0, 255).astype(np.uint8))
    pens = ImageDraw.Draw(picture), ImageDraw.Draw(mark)

    def both(kind: str, shape: Any, colour: Any, index: int) -> None:
        getattr(pens[0], kind)(shape, fill=_rgb(colour))
        getattr(pens[1], kind)(shape, fill=index)

    if not dull or rng.random() < 0.3:
        x, y, r = rng.uniform(8, BIG - 8), rng.uniform(6, 26), rng.uniform(5, 9)
        both("ellipse", (x - r, y - r, x + r, y + r), rng.uniform((235, 200, 60), (255, 240, 150)), 5)
    level = rng.uniform(0.55, 0.75) * BIG
    green = rng.uniform((60, 130, 40), (120, 180, 80))
    left, right = (0, level + rng.uniform(-8, 8)), (BIG, level + rng.uniform(-8, 8))
    both("polygon", [left, right, (BIG, BIG), (0, BIG)], green, 1)
    for what in rng.permutation(["house"] * int(rng.integers(1, 3)) + ["tree"] * int(rng.integers(1, 4))):
        x, base = rng.uniform(8, BIG - 8), level + rng.uniform(2, 16)
        if what == "house":
            w, h = rng.uniform(9, 15), rng.uniform(12, 22)
            both("rectangle", (x - w, base - h, x + w, base), rng.uniform((190, 180, 160), (245, 235, 215)), 2)
            roof = [(x - w - 3, base - h), (x + w + 3, base - h), (x, base - h - rng.uniform(8, 14))]
            both("polygon", roof, rng.uniform((130, 40, 30), (200, 80, 60)), 3)
        else:
            h, r = rng.uniform(8, 16), rng.uniform(6, 11)
            both("rectangle", (x - 2, base - h, x + 2, base), rng.uniform((70, 45, 20), (110, 75, 45)), 4)
            crown = (x - r, base - h - 1.6 * r, x + r, base - h + 0.3 * r)
            both("ellipse", crown, rng.uniform((15, 60, 15), (60, 110, 45)), 4)
    small = mark.resize((SIDE, SIDE), Image.Resampling.NEAREST)
    return _finish(rng, picture), np.asarray(small).astype(np.int64)


TASKS: dict[str, tuple[Callable[[Generator, int], Drawn], int]] = {"digits": (digits, 10), "signs": (signs, 9)}
TASKS |= {"berries": (berries, 5), "cloth": (cloth, 12), "landscape": (landscape, 6)}


def pictures(task: str, count: int, seed: int) -> list[Image.Image]:
    """Pictures to inspect; their classes take turns."""
    draw, classes = TASKS[task]
    step, rng = {9: 5, 12: 5, 10: 3}.get(classes, 1), np.random.default_rng([seed, 77])
    return [draw(rng, number * step % classes)[0] for number in range(count)]


@cache
def labelled(task: str, count: int, seed: int) -> tuple[list[Image.Image], NDArray[np.int64]]:
    """Pictures of random classes, and these classes; of a landscape, the maps ``(N, H, W)``."""
    draw, classes = TASKS[task]
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    drawn = [draw(rng, int(label)) for label in labels]
    return [picture for picture, _ in drawn], np.stack([kind for _, kind in drawn]) if drawn[0][
        1
    ] is not None else labels
