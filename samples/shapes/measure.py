"""Measure the model `shapes` on freshly drawn pictures, trained and untrained: accuracy, and the pointing game.

    python samples/shapes/measure.py
    python samples/shapes/measure.py --stream 2 --count 2000

The second shows it the 2,000 held-out pictures of training; 200 pictures take about a quarter of a minute.

The pointing game (Zhang et al., arXiv:1608.00507) counts the pictures in which the highest value of the map of the true
class lies in the box of the object; a map in which nothing is above 0 points nowhere, and misses.
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


def measure(
    weights: str, numbers: Sequence[int], method: str = "gradcam", layer: str | None = None, stream: int = FRESH
) -> Measured:
    """Show pictures of ``stream`` to the model, one by one."""
    net = hookscope.load_model("shapes", weights=weights, device="cpu")
    right = hits = 0
    covered = 0.0
    for number in numbers:
        drawn = draw.draw(stream, number)
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
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], formatter_class=shown)
    parser.add_argument("--count", type=int, default=200, help="how many pictures")
    parser.add_argument("--stream", type=int, default=FRESH, help="which; 1 is what it was trained on, 2 held out")
    parser.add_argument("--method", default="gradcam", help="as `hookscope cam` takes it")
    parser.add_argument("--layer", help="likewise; without one the last with a map, classifier.2")
    options = parser.parse_args()
    print("weights\tpictures\taccuracy\tpointing\tchance")
    for weights in ("default", "none"):
        found = measure(weights, range(options.count), options.method, options.layer, options.stream)
        print(f"{weights}\t{found.pictures}\t{found.accuracy:.4f}\t{found.pointing:.4f}\t{found.chance:.4f}")


if __name__ == "__main__":
    main()
