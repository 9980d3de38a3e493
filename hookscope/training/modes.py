"""Keep what a watched run computes out of the modes that the script has switched on."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def _outside_all() -> Any:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def are_tensors_fake() -> bool:
    """Whether the script computes shapes only, in a ``FakeTensorMode``."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def outside_modes() -> AbstractContextManager[Any]:
    """A block in which no ``TorchFunctionMode`` and no ``TorchDispatchMode`` of the script sees what is called."""
    return _outside_all() if torch._C._len_torch_dispatch_stack() else torch._C.DisableTorchFunction()
