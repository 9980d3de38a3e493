"""What was recorded of a model and some images: places to look at are found in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookscope.findings import Finding
from hookscope.inspection.facts import CallFacts, InspectedImage, InspectedLayer
from hookscope.models import LoadedModel
from hookscope.parameters import ParameterStatistics
from hookscope.statistics import LayerStatistics, RunningStatistics


@dataclass(frozen=True)
class Evidence:
    """What was recorded.

    Attributes:
        net: The model.
        inputs: The prepared images; ``net.inputs(*inputs[0])`` are the positional inputs of a pass of the first.
        images: The images, with predictions and Grad-CAM.
        scores: Of each image the logits ``(1, K)``; None for a model without scores of classes.
        calls: Every call of a layer without layers in it, and of each drawn block, in order of execution.
        layers: The drawn calls with their maps, channel means, and gradient × activation.
        totals: What a `StatisticsCollector` measured over all images: BatchNorms, and the layers of ``statistics``.
        statistics: Of convolutions, Linear layers, activation functions and the model.
        parameters: Statistics of the parameters.
        findings: On activations and parameters, the most severe first.
        changes: Of each block, by the key of its call, ``(images,)`` norm of output minus input over norm of input; NaN
            where their shapes differ. Blocks have layers inside, and are members of a Sequential or a ModuleList.
    """

    net: LoadedModel
    inputs: tuple[tuple[Tensor, ...], ...]
    images: tuple[InspectedImage, ...]
    scores: tuple[Tensor | None, ...]
    calls: tuple[CallFacts, ...]
    layers: tuple[InspectedLayer, ...]
    totals: RunningStatistics
    statistics: tuple[LayerStatistics, ...]
    parameters: tuple[ParameterStatistics, ...]
    findings: tuple[Finding, ...]
    changes: Mapping[str, NDArray[np.float64]]
