"""See inside a vision model: hooks on every layer, activations as pictures and numbers.

Public names are loaded when they are first used, so that ``import hookscope`` costs nothing.

Example:
    >>> import hookscope
    >>> hookscope.SaveOutput().outputs
    []
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookscope._version import VERSION
    from hookscope.ablation import ablate_each
    from hookscope.activations import Activations, SaveOutput, capture
    from hookscope.cam import ClassActivationMap, class_activation_maps
    from hookscope.catalogue import ModelInfo, find_models
    from hookscope.effects import intervention_effect
    from hookscope.errors import HookscopeError, NonFiniteError
    from hookscope.events import trace_events
    from hookscope.findings import Finding
    from hookscope.gradient_findings import diagnose_gradients
    from hookscope.gradient_hooks import (
        ClampGradientSign,
        ClipGradientNorm,
        ClipGradientValue,
        ScaleGradient,
        ZeroGradient,
        change_gradients,
    )
    from hookscope.gradients import layer_gradients
    from hookscope.grids import channel_grid
    from hookscope.health import diagnose
    from hookscope.images import open_image
    from hookscope.interventions import intervene
    from hookscope.layers import Call, LayerCall
    from hookscope.losses import Loss
    from hookscope.models import LoadedModel, load_model
    from hookscope.monitor import Monitor
    from hookscope.parameters import parameter_statistics
    from hookscope.readback import read_sheet
    from hookscope.saliency import saliency_maps
    from hookscope.scores import Prediction
    from hookscope.statistics import LayerStatistics
    from hookscope.survey import StatisticsCollector
    from hookscope.tally import RunningStatistics
    from hookscope.trace import list_layers
    from hookscope.verification import verify

    __version__ = VERSION

_HOMES = {
    "Activations": "activations",
    "Call": "layers",
    "ClampGradientSign": "gradient_hooks",
    "ClassActivationMap": "cam",
    "ClipGradientNorm": "gradient_hooks",
    "ClipGradientValue": "gradient_hooks",
    "Finding": "findings",
    "HookscopeError": "errors",
    "LayerCall": "layers",
    "LayerStatistics": "statistics",
    "Loss": "losses",
    "ModelInfo": "catalogue",
    "Monitor": "monitor",
    "LoadedModel": "models",
    "NonFiniteError": "errors",
    "Prediction": "scores",
    "SaveOutput": "activations",
    "ScaleGradient": "gradient_hooks",
    "StatisticsCollector": "survey",
    "RunningStatistics": "tally",
    "ZeroGradient": "gradient_hooks",
    "ablate_each": "ablation",
    "capture": "activations",
    "change_gradients": "gradient_hooks",
    "channel_grid": "grids",
    "class_activation_maps": "cam",
    "diagnose": "health",
    "diagnose_gradients": "gradient_findings",
    "find_models": "catalogue",
    "intervene": "interventions",
    "intervention_effect": "effects",
    "layer_gradients": "gradients",
    "list_layers": "trace",
    "load_model": "models",
    "open_image": "images",
    "parameter_statistics": "parameters",
    "read_sheet": "readback",
    "saliency_maps": "saliency",
    "trace_events": "events",
    "verify": "verification",
}

__all__ = [
    "Activations",
    "Call",
    "ClampGradientSign",
    "ClassActivationMap",
    "ClipGradientNorm",
    "ClipGradientValue",
    "Finding",
    "HookscopeError",
    "LayerCall",
    "LayerStatistics",
    "LoadedModel",
    "Loss",
    "ModelInfo",
    "Monitor",
    "NonFiniteError",
    "Prediction",
    "RunningStatistics",
    "SaveOutput",
    "ScaleGradient",
    "StatisticsCollector",
    "ZeroGradient",
    "__version__",
    "ablate_each",
    "capture",
    "change_gradients",
    "channel_grid",
    "class_activation_maps",
    "diagnose",
    "diagnose_gradients",
    "find_models",
    "intervene",
    "intervention_effect",
    "layer_gradients",
    "list_layers",
    "load_model",
    "open_image",
    "parameter_statistics",
    "read_sheet",
    "saliency_maps",
    "trace_events",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("hookscope._version").VERSION
    if name == "interventions":  # a room with names of its own, Zero and Scale among them
        return import_module("hookscope.interventions")
    if name not in _HOMES:
        raise AttributeError(f"module 'hookscope' has no attribute {name!r}")
    value = getattr(import_module(f"hookscope.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
