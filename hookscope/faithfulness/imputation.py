"""Noisy linear imputation, with which ROAD fills removed pixels (Rong et al., arXiv:2202.00449)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_NOISE = 0.01  # standard deviation, in units of the network's input: the authors' choice
_CLOSE = 0.2  # of the noise: a step of the solver below this ends it
_MOST_STEPS = 100  # about 8 are usual
_DAMPING = 0.8  # of Jacobi's method


def imputed(pictures: Tensor, known: Tensor, noise: float = _NOISE) -> Tensor:
    """``pictures`` ``(N, C, H, W)`` with each pixel that is not ``known`` ``(N, 1, H, W)`` from its neighbours.

    It is their weighted mean, 1/6 for the four nearest and 1/12 for the diagonal ones, plus ``noise``. Without any
    known pixel every pixel is the mean of the picture.
    """
    empty = ~known.flatten(1).any(1)[:, None, None, None]
    pictures, known = torch.where(empty, pictures.mean((2, 3), keepdim=True), pictures), known | empty
    hole = (~known).to(pictures)
    right = hole * _spread(pictures * known)
    # conjugate gradients; multigrid, which needs about 8 steps for a hole of any size, is the preconditioner
    filled = torch.zeros_like(pictures)
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
    return torch.where(known, pictures, filled + noise * torch.randn_like(filled))


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
    found = _DAMPING * left
    if min(height, width) > 2:
        still = F.pad(left - _operator(found, hole), (0, width % 2, 0, height % 2))
        inside = (F.avg_pool2d(F.pad(hole, (0, width % 2, 0, height % 2)), 2) == 1).to(hole)
        coarse = _coarse_to_fine(4 * F.avg_pool2d(still, 2) * inside, inside)
        found.addcmul_(hole, F.interpolate(coarse, scale_factor=2.0, mode="nearest")[..., :height, :width])
    return found.add_(left - _operator(found, hole), alpha=_DAMPING)
