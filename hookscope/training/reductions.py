"""The figures of a training step, from few passes over memory: what a layer put out, its weights, their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.hooks import as_float, channel_axis, tensors_in


class DeferredScalars:
    """Brings many tensors of one value from their device together: one wait for a GPU, not one for each.

    Example:
        >>> import torch
        >>> numbers = DeferredScalars()
        >>> a, b = torch.tensor(2), torch.tensor(0.5)
        >>> numbers.want(a), numbers.want(b)
        (None, None)
        >>> numbers.bring()
        >>> numbers[a], numbers[b], numbers[7]
        (2.0, 0.5, 7.0)
    """

    def __init__(self) -> None:
        self._wanted: dict[int, Tensor] = {}
        self._values: dict[int, float] = {}

    def want(self, value: Tensor | float) -> None:
        """Bring this one too."""
        if not isinstance(value, (int, float)):
            self._wanted[id(value)] = value

    def bring(self) -> None:
        """Wait until all that is wanted is calculated."""
        groups: dict[Any, list[Tensor]] = {}
        for tensor in self._wanted.values():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for tensors in groups.values():
            values = torch.stack(tensors).tolist()
            self._values.update({id(tensor): float(value) for tensor, value in zip(tensors, values, strict=True)})

    def __getitem__(self, value: Tensor | float) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        return self._values[id(value)]


@dataclass(frozen=True, slots=True)
class OutputSums:
    """One tensor that a layer put out, in sums that those of other passes can be added to.

    Attributes:
        count: How many values it has.
        mean: Their mean.
        spread: The Euclidean norm of the values without their mean: the root of ``count`` times the variance.
        nonzero: How many of them are not 0.
        non_finite: How many are NaN or Inf.
        alive: ``(C,)`` whether a channel is anywhere anything but 0; None where there is no axis of channels.
    """

    count: int
    mean: Tensor
    spread: Tensor
    nonzero: Tensor
    non_finite: Tensor | int
    alive: Tensor | None

    @property
    def singles(self) -> Iterable[Tensor | float]:
        """What `DeferredScalars` is to bring."""
        return self.mean, self.spread, self.nonzero, self.non_finite


def values_of(value: Any) -> list[Tensor]:
    """The tensors in ``value`` that have figures: of real or complex numbers, and not empty."""
    found = [value] if isinstance(value, torch.Tensor) else list(tensors_in(value).values())
    return [local(t) for t in found if (t.is_floating_point() or t.is_complex()) and t.numel() and not t.is_meta]


def local(tensor: Tensor) -> Tensor:
    """Of a tensor that is spread over processes, the part that is here; any other as it is."""
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
    # the mean first, though it takes a pass more: of squares alone little is left where it is far from 0
    mean = values.mean()
    spread = torch.linalg.vector_norm(values - mean)
    alive, nonzero = None, None
    if first and values.dim() >= 2:
        axis = channel_axis(values, module)
        counts = torch.count_nonzero(values, [a for a in range(values.dim()) if a != axis])
        alive, nonzero = counts > 0, counts.sum()
    else:
        nonzero = torch.count_nonzero(values)
    return OutputSums(values.numel(), mean, spread, nonzero, _non_finite(values, spread), alive)


def _non_finite(values: Tensor, telling: Tensor) -> Tensor | int:
    """How many NaN and Inf: none where a sum over all ``values`` is finite. Asking that of a GPU would be to wait."""
    if values.device.type == "cpu" and math.isfinite(float(telling)):
        return 0
    return values.numel() - torch.isfinite(values).sum()


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or Inf: one pass, and a second only where the sum is not finite.

    Example:
        >>> import torch
        >>> is_finite(torch.full((9,), 3e38)), is_finite(torch.tensor([1.0, float("nan")]))
        (True, False)
    """
    tensor = _plain(tensor)
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32) if narrow else tensor.sum())):
        return True
    return bool(torch.isfinite(tensor).all())


def norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm; of half precision in single.

    Example:
        >>> import torch
        >>> norm(torch.tensor([3.0, 4.0]).half())
        tensor(5.)
    """
    tensor = _plain(tensor)
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    size: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if narrow else None)
    return size


def count_non_finite(tensor: Tensor) -> int:
    """How many NaN and Inf."""
    tensor = _plain(tensor)
    return tensor.numel() - int(torch.isfinite(tensor).sum())


def _plain(tensor: Tensor) -> Tensor:
    tensor = local(tensor.detach())
    if tensor.layout == torch.sparse_coo:  # a gradient of an embedding: rows may be there twice
        rows: Tensor = tensor.coalesce().values()
        return rows
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


class BatchMoments:
    """The mean and variance of each channel over all that a BatchNorm was given in a step, and what it expected.

    The running statistics are those from before the first pass of the step, which the pass itself then updates: what
    the layer would have used in eval mode at that time.

    Args:
        mean: ``(C,)`` running mean before the pass.
        variance: ``(C,)`` running variance before the pass.
        eps: What the layer adds to a variance.
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
        if self.count:  # Chan's update of two sets of values
            total = self.count + count
            apart = mean - self.mean
            squares = self.squares + squares + apart.square() * (self.count * count / total)
            mean = self.mean + apart * (count / total)
            count = total
        self.count, self.mean, self.squares = count, mean, squares

    def distance(self) -> tuple[Tensor, Tensor]:
        """The shift of the mean and the ratio of the variances, each one number over all channels.

        The root mean square of ``(mean - running mean) / sqrt(running variance + eps)``, and the geometric mean of
        ``(variance + eps) / (running variance + eps)``; variances are those of the population.
        """
        expected = self.running_variance + self.eps
        shift = (self.mean - self.running_mean).square().div(expected).mean().sqrt()
        ratio = (self.squares / self.count + self.eps).div(expected).log().mean().exp()
        return shift, ratio
