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
    from hookscope.activations import Activations, SaveOutput, capture
    from hookscope.catalogue import ModelInfo, find_models
    from hookscope.errors import HookscopeError
    from hookscope.findings import Finding
    from hookscope.grids import channel_grid
    from hookscope.health import diagnose
    from hookscope.images import open_image
    from hookscope.layers import Call, LayerCall
    from hookscope.models import Net, load_model
    from hookscope.parameters import parameter_statistics
    from hookscope.readback import read_sheet
    from hookscope.registry import VERSION
    from hookscope.statistics import LayerStatistics
    from hookscope.survey import Survey
    from hookscope.tally import Tally
    from hookscope.trace import list_layers
    from hookscope.verification import verify

    __version__ = VERSION

_HOMES = {
    "Activations": "activations",
    "Call": "layers",
    "Finding": "findings",
    "HookscopeError": "errors",
    "LayerCall": "layers",
    "LayerStatistics": "statistics",
    "ModelInfo": "catalogue",
    "Net": "models",
    "SaveOutput": "activations",
    "Survey": "survey",
    "Tally": "tally",
    "capture": "activations",
    "channel_grid": "grids",
    "diagnose": "health",
    "find_models": "catalogue",
    "list_layers": "trace",
    "load_model": "models",
    "open_image": "images",
    "parameter_statistics": "parameters",
    "read_sheet": "readback",
    "verify": "verification",
}

__all__ = [
    "Activations",
    "Call",
    "Finding",
    "HookscopeError",
    "LayerCall",
    "LayerStatistics",
    "ModelInfo",
    "Net",
    "SaveOutput",
    "Survey",
    "Tally",
    "__version__",
    "capture",
    "channel_grid",
    "diagnose",
    "find_models",
    "list_layers",
    "load_model",
    "open_image",
    "parameter_statistics",
    "read_sheet",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("hookscope.registry").VERSION
    if name not in _HOMES:
        raise AttributeError(f"module 'hookscope' has no attribute {name!r}")
    value = getattr(import_module(f"hookscope.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
