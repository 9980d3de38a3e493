"""Measure the model `shapes` on freshly drawn pictures, trained and untrained: accuracy, and the pointing game.

    python samples/shapes/measure.py

The pointing game (Zhang et al., arXiv:1608.00507) counts the pictures in which the highest value of the map of the true
class lies in the box of the object.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import draw

import hookscope

FRESH = 3  # a stream of pictures that neither training nor the held-out accuracy has seen


@dataclass(frozen=True)
class Measured:
    """Shares from 0 to 1 over so many pictures; ``chance`` is the mean share of a picture that its box covers."""

    pictures: int
    accuracy: float
    pointing: float
    chance: float


def measure(weights: str, numbers: Sequence[int], method: str = "gradcam", layer: str | None = None) -> Measured:
    """Show the pictures of the stream `FRESH` to the model, one by one."""
    net = hookscope.load_model("shapes", weights=weights, device="cpu")
    right = hits = 0
    covered = 0.0
    for number in numbers:
        drawn = draw.draw(FRESH, number)
        inputs = net.inputs(net.preprocess(drawn.image))
        [best] = hookscope.class_activation_maps(net.model, inputs, layer, "top:1", method)
        right += best.prediction.index == drawn.label
        [found] = hookscope.class_activation_maps(net.model, inputs, layer, drawn.label, method)
        hits += _points_into(found.peak, drawn)
        left, top, right_edge, bottom = drawn.box
        covered += (right_edge - left) * (bottom - top) / (drawn.image.width * drawn.image.height)
    count = len(numbers)
    return Measured(count, right / count, hits / count, covered / count)


def _points_into(peak: tuple[float, float] | None, drawn: draw.Drawn) -> bool:
    """Whether the peak, in shares of height and width, lies in the box; a map that is all zero points nowhere."""
    if peak is None:
        return False
    y, x = peak[0] * drawn.image.height, peak[1] * drawn.image.width
    left, top, right, bottom = drawn.box
    return left <= x < right and top <= y < bottom


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--method", default="gradcam")
    parser.add_argument("--layer")
    options = parser.parse_args()
    print("weights\tpictures\taccuracy\tpointing\tchance")
    for weights in ("default", "none"):
        found = measure(weights, range(options.count), options.method, options.layer)
        print(f"{weights}\t{found.pictures}\t{found.accuracy:.3f}\t{found.pointing:.3f}\t{found.chance:.3f}")


if __name__ == "__main__":
    main()
