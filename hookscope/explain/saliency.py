"""Saliency: the pixels that a score depends on, from the gradient with respect to the image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.transforms.functional import gaussian_blur

from hookscope.display import Cells, Picture, Rows, Shown
from hookscope.drawing import map_png
from hookscope.errors import InputError, ModelError, UsageError, kind_of, spelled
from hookscope.explain.cam import class_activation_maps, progress_counter
from hookscope.explain.cam_maps import in_place_of, over_picture, picture_in
from hookscope.explain.cam_methods import gradient_free, method_named, name_methods
from hookscope.explain.saliency_methods import SALIENCY_METHODS, wide
from hookscope.explain.saliency_settings import SaliencySettings
from hookscope.findings import counted
from hookscope.gradients import ClampGradientSign, change_gradients
from hookscope.hooks import AnyModel, Selection, differentiable, graph_nodes, leaves_of, module_of, names_of, repeated
from hookscope.models import takes_inputs
from hookscope.scores import FIND_NON_FINITE, Objective, Score, check_finite_score, objectives

_GAP = 0.05  # relative difference of the sum of the shares and the score
_ROUNDING = 1e-5  # relative rounding error of the score difference
_SIGMAS = 64  # standard deviations of the usual smoothing in the shorter side


@dataclass(frozen=True, repr=False)
class Saliency(Shown):
    """How much the score of one class depends on each value of the image.

    Attributes:
        prediction: What is explained: mostly a class, its score and probability.
        method: As `saliency_maps` takes it.
        values: Tensor ``(C, H, W)``, signed, in units of the score; for gradients per unit of the prepared image.
        expected: What the sum of ``values`` should be: the score minus the score of an image of zeros for Integrated
            Gradients, the score for lrp; None for other methods.
        unguided: Number of ReLU functions in a ``forward``, which guided methods cannot hook.
        steps: Points of Integrated Gradients that were taken; None for other methods.
    """

    prediction: Score
    method: str
    values: Tensor
    expected: float | None = None
    unguided: int = 0
    steps: int | None = None

    def _cells(self) -> Cells:
        cells = {**self.prediction._cells(), "method": self.method, "map": tuple(self.values.shape)}
        sums = {} if self.expected is None else {"sum": float(self.values.double().sum()), "expected": self.expected}
        picture = Picture(partial(map_png, self.still), self.method)
        return {**cells, **sums, "picture": picture, "notes": "; ".join(self.notes)}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the map does not hold of what its method promises."""
        notes, total = [], float(self.values.double().sum())
        if self.incomplete and self.steps is None:
            notes.append(
                f"the relevances of {self.prediction.name} add up to {total:.4g}, but the score is {self.expected:.4g}:"
                " biases take part of it, and zennit does not share it where branches of other models than"
                " torchvision's ResNets are added"
            )
        elif self.incomplete:
            notes.append(
                f"the shares of {self.prediction.name} add up to {total:.4g} with {self.steps:,} steps, but the score"
                f" minus the score of zeros is {self.expected:.4g}; raise ‹most_steps|--most-steps›"
            )
        if self.unguided:
            calls = counted(self.unguided, "functional ReLU call")
            notes.append(f"{calls} not guided: hooks act on modules only")
        return tuple(map(spelled, notes))

    @property
    def seen(self) -> tuple[int, int]:
        """``(H, W)`` of the network's input."""
        return self.values.shape[-2], self.values.shape[-1]

    @property
    def incomplete(self) -> bool:
        """Whether the sum of ``values`` misses ``expected`` by more than 5 %, beyond rounding errors."""
        if self.expected is None:
            return False
        missed = abs(float(self.values.double().sum()) - self.expected)
        return missed > _GAP * abs(self.expected) + _ROUNDING * abs(self.prediction.score)

    @property
    def map(self) -> Tensor:
        """``(H, W)``, from 0: the largest absolute value of the channels, as in the paper of the gradient.

        For methods that multiply by the image: the absolute value of the sum over the channels.
        """
        return self._folded.abs()

    @property
    def _folded(self) -> Tensor:
        return self.values.sum(0) if SALIENCY_METHODS[self.method].signed else self.values.abs().amax(0)

    @property
    def still(self) -> NDArray[np.float32]:
        """What is drawn, ``(H, W)``: `map`, with its signs for methods that multiply by the image; of a clip the mean
        over its frames.
        """
        values = self._folded.float()
        still: NDArray[np.float32] = (values.mean(0) if values.dim() == 3 else values).cpu().numpy()
        return still

    @property
    def frames(self) -> int:
        """Number of frames of the clip, 1 for a picture."""
        return self.values.shape[1] if self.values.dim() == 4 else 1

    @property
    def by_frame(self) -> NDArray[np.float32]:
        """What `still` is the mean of: ``(T, H, W)``, a map for each of the ``frames``."""
        frames: NDArray[np.float32] = self._folded.float().cpu().numpy().reshape(-1, *self.seen)
        return frames

    @property
    def usual_smoothing(self) -> float:
        """The standard deviation of `smoothed` in pixels: a 64th of the shorter side."""
        return min(self.values.shape[-2:]) / _SIGMAS

    def smoothed(self, sigma: float | None = None) -> NDArray[np.float32]:
        """`still` after a Gaussian with a standard deviation of ``sigma`` pixels, by default `usual_smoothing`."""
        sigma = self.usual_smoothing if sigma is None else sigma
        if not 0 < sigma < math.inf:
            raise UsageError(f"smoothing by {sigma:g} pixels", do="give a number above 0")
        values = torch.from_numpy(self.still)[None]
        most = min(values.shape[-2:]) - 1  # the image is mirrored at its edges, once
        radius = min(math.ceil(4 * sigma), most)
        if radius < 1:
            return self.still
        blurred: NDArray[np.float32] = gaussian_blur(values, [2 * radius + 1] * 2, [sigma] * 2)[0].numpy()
        return blurred


@takes_inputs
def saliency_maps(
    model: AnyModel,
    inputs: Any,
    target: Any = "top:1",
    method: str = "gradient",
    *,
    categories: Sequence[str] | None = None,
    settings: SaliencySettings | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Rows[Saliency]:
    """Compute a saliency map for each chosen class.

    The model runs in eval mode, with gradients even under ``no_grad``, and stays as it is.

    Occlusion (Zeiler and Fergus, arXiv:1311.2901) and RISE (Petsiuk et al., arXiv:1806.07421) need no gradient, so that
    any target and model will do.

    Guided backpropagation (Springenberg et al., arXiv:1412.6806) passes only positive gradients at every ReLU layer,
    by hooks that are removed afterwards. It does not act on ReLU functions in a ``forward`` (``F.relu``), which
    `Saliency.unguided` counts, nor on other activations such as GELU.

    Args:
        model: Any eager module with a score for each class.
        inputs: The image ``(1, C, H, W)``, or a clip ``(1, C, T, H, W)``; or a tuple of one of them. For detectors of
            torchvision a list of the image ``(C, H, W)``.
        target: A class index, a class name or ``top:K``; or a `ScoreTarget`, or a function from the model's output for
            ``N`` images to ``N`` numbers.
        method: One of `SALIENCY_METHODS`.
        categories: Names of the classes.
        settings: Samples, noise, steps, windows, layer, batch size and seed, see `SaliencySettings`. Integrated
            Gradients doubles its steps, up to a limit, while the shares miss the score by more than 5 %;
            `Saliency.steps` says where it ended.
        on_progress: Called with images done and in all.

    Raises:
        TargetError: for an unknown class.
        ModelError: for a model without scores of classes, without a ReLU to guide, or without a gradient from the
            scores to the image.
        InputError: for a gradient that is not finite.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2, bias=False))
        >>> with torch.no_grad():
        ...     _ = net[1].weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))
        >>> [saliency] = saliency_maps(net, torch.ones(1, 3, 1, 1), target=0)
        >>> saliency.values.flatten().tolist(), saliency.map.tolist()
        ([1.0, 2.0, 3.0], [[3.0]])
    """
    model, categories = module_of(model), names_of(model, categories)
    method, how = method_named(method, SALIENCY_METHODS)
    settings = settings or SaliencySettings()
    if not isinstance(settings, SaliencySettings):
        asked = f"settings must be hookscope.SaliencySettings, not {kind_of(settings)}"
        raise UsageError(asked, do="write SaliencySettings(samples=5)")
    picture, ready = picture_in(inputs), model
    again = repeated(lambda *given: ready(*given))

    def run(pictures: Tensor) -> Any:
        return again(*in_place_of(inputs, pictures))

    with differentiable(model, parameters=False), ExitStack() as stack:
        picture = picture.detach().clone()
        goals = objectives(
            target, _output(run, picture), categories, type(model).__name__, (picture.shape[-2], picture.shape[-1])
        )
        for goal in goals:
            check_finite_score(goal.score)
        zeros = _output(run, torch.zeros_like(picture)) if how.completes else None
        advance = progress_counter(on_progress, len(goals) * how.pictures(settings, picture))
        passes = _Passes(type(model).__name__, run, advance)
        places = [_place(model, inputs, picture, goal, settings) if how.localised else None for goal in goals]
        if how.prepared is not None:
            ready = stack.enter_context(how.prepared(model))
        maps = Rows[Saliency]()
        relus = [name for name, module in model.named_modules() if how.guided and isinstance(module, nn.ReLU)]
        if how.guided and not relus:
            raise _nothing_to_guide(model)
        with change_gradients(model, {Selection.of_names(relus): passes.guide} if relus else {}):
            for goal, place in zip(goals, places, strict=True):
                expected = None if zeros is None else goal.score.score - float(goal.of(zeros)[0])
                evaluate = partial(passes.gradient if how.gradient else passes.scores, goal.of)
                chosen = settings
                while True:
                    values = how.attribute(evaluate, picture, chosen)[0]
                    values = values if place is None else values * place
                    if how.prepared is not None:  # rules are linear in the relevance of the output
                        values, expected = values * goal.score.score, goal.score.score
                    if not bool(torch.isfinite(values).all()):
                        what = "gradient" if how.gradient else "score of changed images"
                        raise InputError(f"the {what} of {goal.score.name} is not finite", do=FIND_NON_FINITE)
                    unguided, steps = passes.unguided if how.guided else 0, chosen.steps if how.completes else None
                    saliency = Saliency(goal.score, method, values.to(wide(picture)), expected, unguided, steps)
                    if not how.completes or not saliency.incomplete or 2 * chosen.steps > chosen.most_steps:
                        break
                    chosen = replace(chosen, steps=2 * chosen.steps)
                    advance(0, more=chosen.steps)
                maps.append(saliency)
        if how.guided and not passes.guided:
            raise _nothing_to_guide(model, " that the gradient passes")
    return maps


name_methods(saliency_maps, SALIENCY_METHODS=SALIENCY_METHODS)


def _output(run: Callable[[Tensor], Any], picture: Tensor) -> Any:
    with torch.no_grad():
        return run(picture.clone())


@dataclass
class _Passes:
    """Passes of images ``(N, C, H, W)``; they count the ReLUs of the last one that were guided, and the others."""

    name: str
    run: Callable[[Tensor], Any]
    advance: Callable[[int], None]
    guided: int = 0
    unguided: int = 0

    def scores(self, score_of: Callable[[Any], Tensor], pictures: Tensor) -> Tensor:
        """The scores ``(N,)``."""
        values = score_of(_output(self.run, pictures)).to(wide(pictures))
        if len(values) != len(pictures):
            what = f"{self.name} gives {counted(len(values), 'score')} for {len(pictures)} images"
            raise ModelError(what, do="set the batch size to 1")
        self.advance(len(pictures))
        return values

    def gradient(self, score_of: Callable[[Any], Tensor], pictures: Tensor) -> Tensor:
        """The gradients of the scores."""
        leaf = leaves_of(pictures)
        score = score_of(self.run(leaf.clone())).sum()
        slopes: Tensor | None = None
        self.guided = 0
        if score.requires_grad:
            [slopes] = torch.autograd.grad(score, leaf, allow_unused=True)
        if slopes is None:
            raise ModelError(
                f"no gradient leads from the score of {self.name} to the image",
                "the score is detached, computed under no_grad, quantized or constant",
                f"use a method without gradient: {gradient_free(SALIENCY_METHODS)}",
            )
        relus = sum(node.name().startswith("ReluBackward") for node in graph_nodes([score.grad_fn]))
        self.unguided = relus - self.guided
        self.advance(len(pictures))
        return slopes

    def guide(self, gradient: Tensor) -> Tensor:
        self.guided += 1
        return ClampGradientSign("positive")(gradient)


def _place(
    model: nn.Module, inputs: tuple[Any, ...], picture: Tensor, goal: Objective, settings: SaliencySettings
) -> Tensor:
    """The Grad-CAM of a layer for ``goal``, ``(H, W)`` or ``(T, H, W)``, in the size of the picture."""
    cams = class_activation_maps(model, inputs, settings.layer, goal.of)
    if len(cams) != 1:
        raise UsageError(f"'{settings.layer}' chooses {len(cams)} calls", do="choose one for guided-gradcam")
    return over_picture(torch.from_numpy(cams[0].values).to(picture.device), picture.shape[2:])


def _nothing_to_guide(model: nn.Module, which: str = "") -> ModelError:
    others = ", ".join(name for name, method in SALIENCY_METHODS.items() if not method.guided)
    return ModelError(f"{type(model).__name__} has no ReLU layer{which} to guide", do=f"use another method: {others}")
