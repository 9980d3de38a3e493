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
    from hookscope.grids import channel_grid
    from hookscope.images import open_image
    from hookscope.layers import Call, LayerCall
    from hookscope.models import Net, load_model
    from hookscope.readback import read_sheet
    from hookscope.registry import VERSION
    from hookscope.trace import list_layers

    __version__ = VERSION

_HOMES = {
    "Activations": "activations",
    "Call": "layers",
    "HookscopeError": "errors",
    "LayerCall": "layers",
    "ModelInfo": "catalogue",
    "Net": "models",
    "SaveOutput": "activations",
    "capture": "activations",
    "channel_grid": "grids",
    "find_models": "catalogue",
    "list_layers": "trace",
    "load_model": "models",
    "open_image": "images",
    "read_sheet": "readback",
}

__all__ = [
    "Activations",
    "Call",
    "HookscopeError",
    "LayerCall",
    "ModelInfo",
    "Net",
    "SaveOutput",
    "__version__",
    "capture",
    "channel_grid",
    "find_models",
    "list_layers",
    "load_model",
    "open_image",
    "read_sheet",
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
