"""Outputs, weights and gradients reduced to a few numbers, in few passes over memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks import as_float, channel_axis, merge_moments, tensors_in


class DeferredScalars:
    """Fetches many tensors of one value from their device together: a GPU is waited for once, not once for each.

    Example:
        >>> import torch
        >>> scalars = DeferredScalars()
        >>> a, b = torch.tensor(2), torch.tensor(0.5)
        >>> scalars.add(a, b)
        >>> scalars.fetch()
        >>> scalars[a], scalars[b], scalars[7]
        (2.0, 0.5, 7.0)
    """

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._values: dict[int, float] = {}

    def add(self, *scalars: Tensor | float) -> None:
        self._tensors.update({id(scalar): scalar for scalar in scalars if isinstance(scalar, torch.Tensor)})

    def fetch(self) -> None:
        groups: dict[Any, list[Tensor]] = {}
        for tensor in self._tensors.values():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for tensors in groups.values():
            values = torch.stack(tensors).tolist()
            self._values.update({id(tensor): float(value) for tensor, value in zip(tensors, values, strict=True)})

    def __getitem__(self, scalar: Tensor | float) -> float:
        return self._values[id(scalar)] if isinstance(scalar, torch.Tensor) else float(scalar)


@dataclass(frozen=True, slots=True)
class OutputSums:
    """One output tensor as sums that those of other passes can be added to.

    Attributes:
        count: Number of values.
        mean: Their mean.
        spread: The Euclidean norm of the values minus their mean: the root of ``count`` times the variance.
        nonzero: Number of values that are not 0.
        non_finite: Number of NaN and Inf.
        alive: ``(C,)`` whether a channel has a value other than 0; None without a channel axis.
    """

    count: int
    mean: Tensor
    spread: Tensor
    nonzero: Tensor
    non_finite: Tensor | int
    alive: Tensor | None


def values_of(value: Any) -> list[Tensor]:
    """The non-empty tensors of real or complex numbers in ``value``."""
    tensors = [value] if isinstance(value, torch.Tensor) else list(tensors_in(value).values())
    return [local(t) for t in tensors if (t.is_floating_point() or t.is_complex()) and t.numel() and not t.is_meta]


def local(tensor: Tensor) -> Tensor:
    """The part in this process of a tensor that is spread over processes; any other tensor itself."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def output_sums(output: Any, module: nn.Module | None = None) -> list[OutputSums]:
    """The sums of every tensor in ``output``; channels are those of the first.

    Example:
        >>> import torch
        >>> (sums,) = output_sums(torch.tensor([[[[0.0, 0.0]], [[1.0, 3.0]]]]))
        >>> sums.count, float(sums.mean), int(sums.nonzero), sums.alive.tolist()
        (4, 1.0, 2, [False, True])
    """
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
    return OutputSums(values.numel(), mean, spread, nonzero, non_finite, alive)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or Inf: one pass, and a second only where the sum is not finite.

    Example:
        >>> import torch
        >>> is_finite(torch.full((9,), 3e38)), is_finite(torch.tensor([1.0, float("nan")]))
        (True, False)
    """
    tensor = _dense(tensor)
    return bool(torch.isfinite(tensor.sum(dtype=_single_for_half(tensor)))) or bool(torch.isfinite(tensor).all())


def norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm, for half precision computed in single precision.

    Example:
        >>> import torch
        >>> norm(torch.tensor([3.0, 4.0]).half())
        tensor(5.)
    """
    tensor = _dense(tensor)
    size: Tensor = torch.linalg.vector_norm(tensor, dtype=_single_for_half(tensor))
    return size


def count_non_finite(tensor: Tensor) -> int:
    tensor = _dense(tensor)
    return tensor.numel() - int(torch.isfinite(tensor).sum())


def _single_for_half(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None


def _dense(tensor: Tensor) -> Tensor:
    tensor = local(tensor.detach())
    if tensor.layout == torch.sparse_coo:  # the gradient of an embedding, where a row may occur twice
        rows: Tensor = tensor.coalesce().values()
        return rows
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


class BatchMoments:
    """Mean and variance of each channel over all inputs of a BatchNorm in a step, beside its running statistics.

    The running statistics are those before the first pass of the step: what eval mode would have used then.

    Args:
        mean: ``(C,)`` running mean before the pass.
        variance: ``(C,)`` running variance before the pass.
        eps: The number that the layer adds to a variance.
    """

    def __init__(self, mean: Tensor, variance: Tensor, eps: float) -> None:
        self.running_mean, self.running_variance, self.eps = mean.float(), variance.float(), eps
        self.count = 0
        self.mean = self.squares = self.running_mean

    def add(self, inputs: Tensor) -> None:
        """Add a batch ``(N, C, *positions)``."""
        values = as_float(local(inputs))
        channels = values.shape[1]
        count = values.numel() // max(channels, 1)
        axes = [axis for axis in range(values.dim()) if axis != 1]
        mean = values.mean(axes)
        shape = [1, channels] + [1] * (values.dim() - 2)
        squares = torch.linalg.vector_norm(values - mean.view(shape), dim=axes).square()
        if self.count:
            count, mean, squares = merge_moments((self.count, self.mean, self.squares), (count, mean, squares))
        self.count, self.mean, self.squares = count, mean, squares

    def drift(self) -> tuple[Tensor, Tensor]:
        """The shift of the mean and the ratio of the variances, each one number over all channels.

        The root mean square of ``(mean - running mean) / sqrt(running variance + eps)``, and the geometric mean of
        ``(variance + eps) / (running variance + eps)``; variances are those of the population.
        """
        expected = self.running_variance + self.eps
        shift = (self.mean - self.running_mean).square().div(expected).mean().sqrt()
        ratio = (self.squares / self.count + self.eps).div(expected).log().mean().exp()
        return shift, ratio
