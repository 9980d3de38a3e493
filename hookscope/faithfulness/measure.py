"""What one map of one image is worth: the score with pixels removed or shown in the order of the map."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from hookscope.display import Rows
from hookscope.errors import InputError, UsageError, check_whole
from hookscope.explain import (
    ClassActivationMap,
    first_batch,
    in_place_of,
    over_picture,
    picture_in,
    progress_counter,
)
from hookscope.faithfulness.facts import CENTRED, RANDOM, Faithfulness, Map, as_array
from hookscope.hooks import AnyModel, differentiable, module_of, names_of, output_of, repeated
from hookscope.models import takes_inputs
from hookscope.scores import Objective, check_finite_score, objectives

_NOISE = 0.01  # standard deviation, in units of the network's input: the authors' choice
_CLOSE = 0.2  # of the noise: a step of the solver below this ends it
_MOST_STEPS = 100  # about 8 are usual
_DAMPING = 0.8  # of Jacobi's method


def imputed(images: Tensor, known: Tensor, noise: float = _NOISE) -> Tensor:
    """``images`` ``(N, C, H, W)`` with each pixel that is not ``known`` ``(N, 1, H, W)`` from its neighbours.

    It is their weighted mean, 1/6 for the four nearest and 1/12 for the diagonal ones, plus ``noise``. Without any
    known pixel every pixel is the mean of the image.
    """
    empty = ~known.flatten(1).any(1)[:, None, None, None]
    images, known = torch.where(empty, images.mean((2, 3), keepdim=True), images), known | empty
    hole = (~known).to(images)
    right = hole * _spread(images * known)
    # conjugate gradients; multigrid, which needs about 8 steps for a hole of any size, is the preconditioner
    filled = torch.zeros_like(images)
    left = right
    towards = _coarse_to_fine(left, hole)
    step, size = towards, (left * towards).sum((2, 3), keepdim=True)
    for _ in range(_MOST_STEPS):
        moved = _operator(step, hole)
        length = size / (step * moved).sum((2, 3), keepdim=True).clamp_min(1e-30)
        ahead = length * step
        filled += ahead
        if float(ahead.abs().max()) < _CLOSE * _NOISE:
            break
        left = left - length * moved
        towards = _coarse_to_fine(left, hole)
        size, before = (left * towards).sum((2, 3), keepdim=True), size
        step = towards + size / before.clamp_min(1e-30) * step
    return torch.where(known, images, filled + noise * torch.randn_like(filled))


def _spread(values: Tensor) -> Tensor:
    """The weighted sum over the eight neighbours of each pixel; ten times as fast as a convolution."""
    padded = F.pad(values, (1, 1, 1, 1))
    rows = (padded[..., :-2] + padded[..., 2:]).add_(padded[..., 1:-1], alpha=2)
    whole = (rows[..., :-2, :] + rows[..., 2:, :]).add_(rows[..., 1:-1, :], alpha=2)
    return whole.sub_(values, alpha=4).div_(12)


def _operator(values: Tensor, hole: Tensor) -> Tensor:
    """By how much each pixel of the hole differs from its neighbours; ``values`` are 0 outside the hole."""
    change = _spread(values).neg_().add_(values)
    for axis, end in ((-1, 0), (-1, -1), (-2, 0), (-2, -1)):  # pixels at the edge have fewer neighbours
        change.select(axis, end).sub_(values.select(axis, end) / 3)
    for row, column in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        change[..., row, column] += values[..., row, column] / 12
    return change.mul_(hole)


def _coarse_to_fine(left: Tensor, hole: Tensor) -> Tensor:
    """What to add to the pixels of the hole, about, so that nothing is ``left``: one V-cycle."""
    height, width = left.shape[-2:]
    solution = _DAMPING * left
    if min(height, width) > 2:
        still = F.pad(left - _operator(solution, hole), (0, width % 2, 0, height % 2))
        inside = (F.avg_pool2d(F.pad(hole, (0, width % 2, 0, height % 2)), 2) == 1).to(hole)
        coarse = _coarse_to_fine(4 * F.avg_pool2d(still, 2) * inside, inside)
        solution.addcmul_(hole, F.interpolate(coarse, scale_factor=2.0, mode="nearest")[..., :height, :width])
    return solution.add_(left - _operator(solution, hole), alpha=_DAMPING)


Box = Sequence[float]
Progress = Callable[[int, int], None]
_SHARES = [share / 10 for share in range(1, 10)]  # of the pixels that ROAD removes
_BLUR = 20  # standard deviations of the blur in the shorter side
_SAME = 1e-5  # of the largest value
_TOGETHER = 2**20  # values that are imputed at a time: they stay in the cache
_COARSEST = 7  # cells of the random map that orders equal values


@takes_inputs
def measure_faithfulness(
    model: AnyModel,
    inputs: Any,
    maps: Any,
    target: Any = "top:1",
    *,
    boxes: Sequence[Box] = (),
    baselines: bool = True,
    fill: str | None = None,
    steps: int = 24,
    batch_size: int | None = None,
    categories: Sequence[str] | None = None,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Rows[Faithfulness]:
    """Measure how faithful maps of one image are to the model: by any method, of hookscope or not.

    Two baselines follow the maps, which a map must beat: ``random``, a random map of the coarsest map's size, and
    ``centred``, a Gaussian in the middle. Pixels with equal values are taken in the order of a random map. The model
    runs in eval mode and stays as it is.

    Args:
        model: Any eager module.
        inputs: The image ``(1, C, H, W)`` or the clip ``(1, C, T, H, W)``, or a tuple of one of them; for a detector
            ``([image],)`` with an image ``(C, H, W)``.
        maps: What to measure: arrays or tensors ``(h, w)`` over the whole input, or ``(T, h, w)`` over a clip, results
            of `class_activation_maps` or `saliency_maps`; one, several, or a dictionary by name.
        target: What the maps explain: a class index or name, a `ScoreTarget` or a function, see
            `class_activation_maps`.
        boxes: Where the object is: ``(left, top, right, bottom)`` in pixels of the network's input.
        baselines: Whether to measure the two baselines too.
        fill: What takes the place of pixels: ``mean``, the mean colour of the image, or ``blur``, the image after a
            Gaussian whose standard deviation is a 20th of the shorter side. None for ``mean`` in deletion, ``blur`` in
            insertion.
        steps: Steps of the deletion and the insertion curve.
        batch_size: Images in one forward pass; None for as many as fit well: 4 on a CPU, else 16.
        categories: Names of the classes.
        seed: Seed of the random map and of ROAD's noise.
        on_progress: Called with images done and in all.

    Raises:
        UsageError: for several classes, for a map of another shape, or for inputs without one image.
        InputError: for a map that is not finite, or a score that is not above the score of the mean colour.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2, bias=False))
        >>> with torch.no_grad():
        ...     _ = net[1].weight.copy_(torch.stack([torch.arange(64) < 8, torch.arange(64) > 99]))
        >>> image = torch.zeros(1, 1, 8, 8)
        >>> image[..., 0, :] = 1
        >>> found = measure_faithfulness(net, image, {"truth": image[0, 0], "wrong": -image[0, 0]}, target=0)
        >>> [each.name for each in sorted(found, key=lambda each: -each.road)][::3]
        ['truth', 'wrong']
    """
    model, categories = module_of(model), names_of(model, categories)
    if fill not in (None, "mean", "blur"):
        raise UsageError(f"no fill '{fill}'", do="there are mean and blur")
    for name, number in (("steps", steps), ("batch size", batch_size)):
        check_whole(name, number, optional=True)
    if len(image := picture_in(inputs)) != 1:
        raise UsageError(f"faithfulness needs one image, got {len(image)}", do="call it once for each image")
    image = image[0].detach()
    batch_size = batch_size or first_batch(image.device)
    named = {name: _checked(name, values, image) for name, values in named_maps(maps).items()}
    with differentiable(model), torch.no_grad():
        seed += zlib.crc32(image.cpu().float().numpy().tobytes())  # another random map for each image
        if baselines:
            named |= _baselines(min((values.shape[-2:] for values in named.values()), key=math.prod), image, seed)
        output = output_of(model, *in_place_of(inputs, image[None].clone()))
        height, width = image.shape[-2:]
        goals = objectives(target, output, categories, type(model).__name__, (height, width))
        if len(goals) != 1:
            raise UsageError(f"a map explains one score, and the target names {len(goals)}", do="name one class")
        check_finite_score(goals[0].score)
        fills = {"mean": partial(_mean, image), "blur": partial(_blurred, image)}
        both = fills[fill or "mean"](), fills[fill or "blur"]()
        again = repeated(model)
        run = lambda images: again(*in_place_of(inputs, images))  # noqa: E731
        return MapTest(image, *both, steps, goals[0], boxes, seed, batch_size, run).measured(named, on_progress)


def named_maps(maps: Any) -> dict[str, Any]:
    """The maps by name: from a dictionary, a sequence of results, or one map."""
    several = maps if isinstance(maps, Sequence | Mapping) else [maps]
    if not several:
        raise UsageError("no map to measure", do="give at least one")
    if isinstance(several, Mapping):
        return dict(several)
    named: dict[str, Any] = {}
    for at, result in enumerate(several):
        name = getattr(result, "method", f"map {at}" if len(several) > 1 else "map")
        if name in named and isinstance(result, ClassActivationMap):
            name = f"{name} {result.call.key}"
        named[f"{name} {at}" if name in named else name] = result
    return named


def _checked(name: str, given: Any, image: Tensor) -> Map:
    """The map as an array ``(h, w)``, or ``(T, h, w)`` over a clip."""
    array = as_array(given)
    if array.dtype.kind not in "fiub":
        raise UsageError(f"{name} has no numbers but {array.dtype}", do="give an array of real numbers")
    array = array.astype(np.float32, order="C")
    while array.ndim > 2 and len(array) == 1:
        array = array[0]
    if array.ndim not in (2, image.dim() - 1) or not array.size:
        shape = "x".join(map(str, array.shape)) or "one number"
        raise UsageError(f"{name} has the shape {shape}", do="give one value for each place of the image: (h, w)")
    if not np.isfinite(array).all():
        raise InputError(f"the map {name} is not finite")
    return array


def _baselines(cells: tuple[int, ...], image: Tensor, seed: int) -> dict[str, Map]:
    height, width = image.shape[-2:]
    y, x = (np.linspace(-1, 1, side, dtype=np.float32) for side in (height, width))
    centred = np.exp(-2 * (y[:, None] ** 2 + x**2))  # a standard deviation of a quarter of the side
    return {RANDOM: np.random.default_rng(seed).random(cells, np.float32), CENTRED: centred}


def _mean(image: Tensor) -> Tensor:
    return image.flatten(1).mean(1).reshape(-1, *[1] * (image.dim() - 1)).expand_as(image)


def _blurred(image: Tensor) -> Tensor:
    sides = image.shape[-2:]
    sigma = max(min(sides) / _BLUR, 0.5)
    sizes = [min(2 * math.ceil(3 * sigma) + 1, 2 * side - 1) for side in reversed(sides)]  # mirrored once at the edges
    frames = image.movedim(0, -3)
    blurred: Tensor = gaussian_blur(frames.float(), sizes, [sigma, sigma])
    return blurred.to(image).movedim(-3, 0)


@dataclass(frozen=True)
class MapTest:
    """The images of all measures of one image, and passes of them in batches."""

    image: Tensor
    removed: Tensor
    hidden: Tensor
    steps: int
    goal: Objective
    boxes: Sequence[Box]
    seed: int
    batch_size: int
    run: Callable[[Tensor], Any]

    def _values(self, images: Iterator[Tensor], advance: Callable[[int], None]) -> NDArray[np.float64]:
        """A number for each image."""
        numbers, read = list[Tensor](), self.goal.probability or self.goal.of
        while batch := list(islice(images, self.batch_size)):
            numbers.append(read(self.run(torch.stack(batch))).detach().cpu().double())
            if len(numbers[-1]) != len(batch):
                asked = f"the target gives {len(numbers[-1])} numbers for {len(batch)} images"
                raise UsageError(asked, do="give one for each")
            advance(len(batch))
        return torch.cat(numbers).numpy()

    def measured(self, maps: Mapping[str, Map], on_progress: Progress | None) -> Rows[Faithfulness]:
        ends = [self.image, self.removed, self.hidden, _mean(self.image)]
        passes = 2 * (self.steps - 1) + 2 * len(_SHARES) + 1
        spreads = dict[str, Tensor]()
        for name, values in maps.items():
            spread = over_picture(torch.from_numpy(values), self.image.shape[1:])
            spreads[name] = spread / spread.abs().max().clamp_min(1e-30)
        # methods often give the same map in other units
        first = {
            name: next(other for other in spreads if torch.allclose(spread, spreads[other], rtol=0, atol=_SAME))
            for name, spread in spreads.items()
        }
        total = len(ends) + sum(name == other for name, other in first.items()) * passes
        advance = progress_counter(on_progress, total)
        whole, removed, hidden, nothing = self._values(iter(ends), advance)
        scale = partial(_scaled, self.goal, whole, nothing)
        rows, known = Rows[Faithfulness](), dict[str, NDArray[np.float64]]()
        for name, values in maps.items():
            same_as = None if first[name] == name else first[name]
            if same_as is None:
                torch.manual_seed(self.seed)  # the same noise for each map
                known[name] = self._values(self._images(spreads[name]), advance)
            cuts = np.cumsum([self.steps - 1, self.steps - 1, len(_SHARES), len(_SHARES)])
            deletion, insertion, most, least, [masked] = np.split(known[first[name]], cuts)
            curves = {
                "deletion": scale(np.array([whole, *deletion, removed])),
                "insertion": scale(np.array([hidden, *insertion, whole])),
                "most": scale(most),
                "least": scale(least),
            }
            lost, gained = (float(np.trapezoid(curves[kind], dx=1 / self.steps)) for kind in ("deletion", "insertion"))
            road = float((curves["least"] - curves["most"]).mean() / 2)
            kept, all_of_it = float(scale(masked)), float(scale(whole))
            drop = max(0.0, (all_of_it - kept) / all_of_it) if all_of_it > 0 else 0.0
            more = *_in_boxes(spreads[name], self.boxes), curves, 0 if same_as else passes, None, same_as
            rows.append(Faithfulness(name, self.goal.score, values, lost, gained, road, drop, kept > all_of_it, *more))
        return rows

    def _images(self, spread: Tensor) -> Iterator[Tensor]:
        """The image with pixels removed, with pixels shown, without the most and the least important, and masked."""
        image, count = self.image, spread.numel()
        place = self._places(spread).to(image.device)
        marks = [round(count * step / self.steps) for step in range(1, self.steps)]
        yield from (torch.where(place < mark, self.removed, image) for mark in marks)
        yield from (torch.where(place < mark, image, self.hidden) for mark in marks)
        gone = [round(count * share) for share in _SHARES]
        known = [*(place >= number for number in gone), *(place < count - number for number in gone)]
        frames = image.movedim(0, -3)
        together = max(1, _TOGETHER // image.numel())
        for at in range(0, len(known), together):
            masks = torch.stack(known[at : at + together]).unsqueeze(-3)  # (N, 1, H, W), or (N, T, 1, H, W)
            filled = imputed(frames.float().expand(len(masks), *frames.shape).flatten(0, -4), masks.flatten(0, -4))
            yield from filled.to(image).reshape(len(masks), *frames.shape).movedim(-3, 1)
        positive = spread.clamp_min(0)
        yield image * (positive / positive.max().clamp_min(1e-30)).to(image)

    def _places(self, spread: Tensor) -> Tensor:
        """The place of each pixel in the order of the map, 0 for the most important; equal ones in a random order."""
        coarse = np.random.default_rng(self.seed).random((_COARSEST, _COARSEST), np.float32)
        ties = over_picture(torch.from_numpy(coarse), spread.shape)
        order = np.lexsort((-ties.flatten().numpy(), -spread.flatten().numpy()))
        places = torch.empty(spread.numel(), dtype=torch.int64)
        places[torch.from_numpy(order)] = torch.arange(spread.numel())
        return places.reshape(spread.shape)


def _scaled(goal: Objective, whole: float, nothing: float, values: Any) -> Any:
    """Probabilities as they are; other scores as shares of the way from the mean colour to the image."""
    if goal.probability is not None:
        return values
    if not whole > nothing:
        exists = f"it is {whole:.4g} for the image, and {nothing:.4g} for an image of its mean colour"
        asked = f"the score of {goal.score.name} does not fall without the image"
        raise InputError(asked, exists, "explain another target")
    return (values - nothing) / (whole - nothing)


def _in_boxes(spread: Tensor, boxes: Sequence[Box]) -> tuple[float | None, bool | None]:
    """The share of the positive values inside the boxes, and whether the highest lies there; None without boxes."""
    if not boxes:
        return None, None
    still = (spread.mean(0) if spread.dim() == 3 else spread).clamp_min(0).double()
    y, x = torch.arange(still.shape[0])[:, None] + 0.5, torch.arange(still.shape[1]) + 0.5
    inside = torch.zeros(still.shape, dtype=torch.bool)
    for left, top, right, bottom in boxes:
        inside |= (left <= x) & (x < right) & (top <= y) & (y < bottom)
    total = float(still.sum())
    points = total > 0 and bool(inside.flatten()[still.argmax()])
    return (float(still[inside].sum()) / total if total else 0.0), points
