"""Change what flows through a model: interventions on activations and parameters, and the block that puts them on.

Example:
    >>> import torch
    >>> from hookscope.interventions import Zero, intervene
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1))
    >>> with torch.no_grad(), intervene(net, {0: Zero(channels=1)}):
    ...     float(net(torch.ones(1, 1, 3, 3))[0, 1].abs().max())
    0.0
"""

from __future__ import annotations

from hookscope.interventions.base import Intervention
from hookscope.interventions.block import intervene
from hookscope.interventions.changing import Clamp, Noise, Permute, Quantize, Scale, Zero
from hookscope.interventions.dropping import DropBlock, DropBlock2d, DropBlock3d, Dropout, Dropout2d, LinearSchedule
from hookscope.interventions.replacing import Mean, Patch, Steer
from hookscope.interventions.weights import Freeze, Prune
from hookscope.interventions.words import WORDS, InterventionSpec

__all__ = [
    "WORDS",
    "Clamp",
    "DropBlock",
    "DropBlock2d",
    "DropBlock3d",
    "Dropout",
    "Dropout2d",
    "Freeze",
    "Intervention",
    "InterventionSpec",
    "LinearSchedule",
    "Mean",
    "Noise",
    "Patch",
    "Permute",
    "Prune",
    "Quantize",
    "Scale",
    "Steer",
    "Zero",
    "intervene",
]
