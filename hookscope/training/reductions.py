"""Outputs, weights and gradients reduced to a few numbers, in few passes over memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks import as_float, channel_axis, merge_moments, tensors_in
from hookscope.statistics import ValueHistogram, buckets


class FetchedScalars:
    """Many tensors of one value, fetched from their device together: a GPU is waited for once, not once for each."""

    def __init__(self, scalars: Iterable[Tensor | float]) -> None:
        groups: dict[Any, dict[int, Tensor]] = {}
        for scalar in scalars:
            if isinstance(scalar, torch.Tensor):
                groups.setdefault((scalar.device, scalar.dtype), {})[id(scalar)] = scalar
        self._values: dict[int, float] = {}
        for tensors in groups.values():
            self._values.update(zip(tensors, map(float, torch.stack(list(tensors.values())).tolist()), strict=True))

    def __getitem__(self, scalar: Tensor | float) -> float:
        return self._values[id(scalar)] if isinstance(scalar, torch.Tensor) else float(scalar)


@dataclass(frozen=True, slots=True)
class OutputSums:
    """One output tensor as sums over its ``count`` values; sums of other passes can be added to them."""

    count: int
    mean: Tensor
    spread: Tensor  # the Euclidean norm of the values minus their mean
    nonzero: Tensor  # number of values that are not 0
    non_finite: Tensor | int  # number of NaN and Inf
    alive: Tensor | None  # ``(C,)`` whether a channel has a value other than 0; None without a channel axis
    largest: Tensor | None  # None for a layer without parameters


def values_of(value: Any) -> list[Tensor]:
    """The non-empty tensors of real or complex numbers in ``value``."""
    tensors = [value] if isinstance(value, torch.Tensor) else list(tensors_in(value).values())
    return [local(t) for t in tensors if (t.is_floating_point() or t.is_complex()) and t.numel() and not t.is_meta]


def local(tensor: Tensor) -> Tensor:
    """The part in this process of a tensor that is spread over processes; any other tensor itself."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def output_sums(output: Any, module: nn.Module | None = None) -> list[OutputSums]:
    return [_sums(tensor, module, first=not at) for at, tensor in enumerate(values_of(output))]


def _sums(tensor: Tensor, module: nn.Module | None, first: bool) -> OutputSums:
    values = as_float(tensor)
    # the mean first, although that is one more pass: sums of squares lose precision where the mean is far from 0
    mean = values.mean()
    spread = torch.linalg.vector_norm(values - mean)
    alive = None
    if first and values.dim() >= 2:
        axis = channel_axis(values, module)
        counts = torch.count_nonzero(values, [a for a in range(values.dim()) if a != axis])
        alive, nonzero = counts > 0, counts.sum()
    else:
        nonzero = torch.count_nonzero(values)
    non_finite: Tensor | int = 0
    if values.device.type != "cpu" or not math.isfinite(float(spread)):  # to read `spread` from a GPU is to wait
        non_finite = values.numel() - torch.isfinite(values).sum()
    largest = values.amax() if first and module is not None and module._parameters else None
    return OutputSums(values.numel(), mean, spread, nonzero, non_finite, alive, largest)


def histogram_of(values: Iterable[Tensor], histogram: ValueHistogram | None = None) -> ValueHistogram:
    histogram = histogram or ValueHistogram()
    for tensor in values:
        histogram.update(as_float(_dense(tensor)).float())
    return histogram


def edges_and_counts(histogram: ValueHistogram, scale: float = 1.0) -> dict[str, list[float]] | None:
    """``edges`` ``(B + 1,)`` of the finite values divided by ``scale``, and ``counts`` ``(B,)``; None without any."""
    lower, upper, counts = bins = histogram.bins()
    if not counts.size:
        return None
    limits, counts = buckets(bins, float(lower[0]), float(upper[-1]))
    return {"edges": [value / scale for value in (float(lower[0]), *limits.tolist())], "counts": counts.tolist()}


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or Inf: one pass, and a second only where the sum is not finite."""
    tensor = _dense(tensor)
    return bool(torch.isfinite(tensor.sum(dtype=_single_for_half(tensor)))) or bool(torch.isfinite(tensor).all())


def norm(tensor: Tensor) -> Tensor:
    tensor = _dense(tensor)
    size: Tensor = torch.linalg.vector_norm(tensor, dtype=_single_for_half(tensor))
    return size


def _single_for_half(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None


def _dense(tensor: Tensor) -> Tensor:
    tensor = local(tensor.detach())
    if tensor.layout == torch.sparse_coo:  # the gradient of an embedding, where a row may occur twice
        rows: Tensor = tensor.coalesce().values()
        return rows
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


class BatchMoments:
    """Mean and variance of each channel over a step's inputs of a BatchNorm, and its running statistics before it."""

    def __init__(self, mean: Tensor, variance: Tensor, eps: float) -> None:
        self.running_mean, self.running_variance, self.eps = mean.float(), variance.float(), eps
        self._moments: tuple[int, Tensor, Tensor] | None = None  # count, mean and summed squares

    def add(self, inputs: Tensor) -> None:
        values = as_float(local(inputs))
        count = values.numel() // max(values.shape[1], 1)
        axes = [axis for axis in range(values.dim()) if axis != 1]
        mean = values.mean(axes, keepdim=True)
        moments = count, mean.flatten(), torch.linalg.vector_norm(values - mean, dim=axes).square()
        self._moments = moments if self._moments is None else merge_moments(self._moments, moments)

    def drift(self) -> tuple[Tensor, Tensor]:
        """The shift of the mean and the ratio of the variances, each one number over all channels.

        The root mean square of ``(mean - running mean) / sqrt(running variance + eps)``, and the geometric mean of
        ``(variance + eps) / (running variance + eps)``; variances are of the population.
        """
        assert self._moments is not None
        count, mean, squares = self._moments
        expected = self.running_variance + self.eps
        shift = (mean - self.running_mean).square().div(expected).mean().sqrt()
        ratio = (squares / count + self.eps).div(expected).log().mean().exp()
        return shift, ratio


_Size = tuple[float, int]  # Euclidean norm, and number of NaN and Inf


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias by its name: ``bias``, ``bias_hh_l0``, ``in_proj_bias``."""
    return "bias" in name.rpartition(".")[2]


class StepWeights:
    """Measures the own parameters of ``layers`` before a step, and keeps copies of all but biases until it is done.

    ``gradients`` says whether they exist already: a step with a closure computes them itself. ``scale`` is a factor
    that is still in them, None for 1.
    """

    def __init__(
        self,
        layers: Iterable[Mapping[str, Tensor]],
        gradients: bool,
        scale: Tensor | None = None,
        with_histograms: bool = False,
    ) -> None:
        self._scale, self.with_histograms = scale, with_histograms
        self._histograms: dict[int, dict[str, Any] | None] = {}
        self._gradient_histograms: dict[int, dict[str, Any] | None] = {}
        self._parameters: dict[int, Tensor] = {}
        self._copies: dict[int, Tensor] = {}
        for name, parameter in (item for own in layers for item in own.items()):
            if parameter.is_meta:
                continue
            self._parameters[id(parameter)] = parameter
            if not is_bias(name) and id(parameter) not in self._copies:
                self._copies[id(parameter)] = local(parameter.detach()).clone()
        if with_histograms:
            self._histograms = {key: edges_and_counts(histogram_of([p])) for key, p in self._parameters.items()}
        self._updates: dict[int, _Size] = {}
        self._weights = _sizes(self._copies)
        self._gradients = self._measure_gradients() if gradients else None

    def have_changed(self) -> bool:
        now = {key: local(self._parameters[key].detach()).to(copy.device) for key, copy in self._copies.items()}
        return not all(torch.equal(now[key], copy) for key, copy in self._copies.items())

    def gradient_norms(self) -> dict[int, float]:
        return {key: size for key, (size, _) in (self._gradients or {}).items()}

    def step_is_done(self) -> None:
        if self._gradients is None:
            self._gradients = self._measure_gradients()
        for key, copy in self._copies.items():
            now = local(self._parameters[key].detach())
            if now.shape == copy.shape and now.device == copy.device:
                copy.sub_(now)
        self._updates = _sizes(self._copies)
        self._copies = {}

    def metrics(self, own: Mapping[str, Tensor]) -> dict[str, Any]:
        weights = [id(p) for name, p in own.items() if not is_bias(name)]
        weight_norm, weight_non_finite = _total(self._weights, weights)
        update_norm, _ = _total(self._updates, weights)
        gradients = self._gradients or {}
        gradient_norm, gradient_non_finite = _total(gradients, [id(p) for p in own.values()])
        return {
            "gradient_norm": gradient_norm,
            "weight_gradient_norm": _total(gradients, weights)[0],
            "gradient_non_finite": gradient_non_finite,
            "weight_norm": weight_norm,
            "weight_non_finite": weight_non_finite,
            "update_to_weight": update_norm / weight_norm if weight_norm and update_norm is not None else None,
            "frozen": not any(p.requires_grad for p in own.values()) if own else None,
        }

    def histograms(self, own: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """The histograms of these parameters before the step, by their names, and of their ``NAME_gradient``."""
        histograms = {name: self._histograms.get(id(p)) for name, p in own.items()}
        histograms |= {f"{name}_gradient": self._gradient_histograms.get(id(p)) for name, p in own.items()}
        return {name: histogram for name, histogram in histograms.items() if histogram is not None}

    def _measure_gradients(self) -> dict[int, _Size]:
        gradients = {key: p.grad for key, p in self._parameters.items() if p.grad is not None}
        sizes = _sizes(gradients)
        scale = (1.0 if self._scale is None else float(self._scale)) or 1.0
        if self.with_histograms:
            self._gradient_histograms = {
                key: edges_and_counts(histogram_of([gradient]), scale) for key, gradient in gradients.items()
            }
        return {key: (size / scale, non_finite) for key, (size, non_finite) in sizes.items()}


def _sizes(tensors: Mapping[int, Tensor]) -> dict[int, _Size]:
    norms = {key: norm(tensor) for key, tensor in tensors.items()}
    scalars = FetchedScalars(norms.values())
    return {
        key: (scalars[size], 0 if math.isfinite(scalars[size]) else int((~torch.isfinite(_dense(tensors[key]))).sum()))
        for key, size in norms.items()
    }


def _total(sizes: Mapping[int, _Size], keys: Iterable[int]) -> _Size | tuple[None, None]:
    parts = [sizes[key] for key in dict.fromkeys(keys) if key in sizes]
    if not parts:
        return None, None
    return math.hypot(*(size for size, _ in parts)), sum(non_finite for _, non_finite in parts)
