"""Errors of the packages that hookscope needs, in one line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from hookscope.errors import InstallationError
from hookscope.models.names import package_versions

# Torchvision's errors if it was built for another torch. The third comes at its second import in the same process:
# the first import failed half-way and left part of the module behind.
_MIXED_BUILDS = (
    "torchvision::nms does not exist",
    "Couldn't load custom C++ ops",
    "module 'torchvision' has no attribute 'extension'",
)
_CURE = "install both from the same place: pip install --force-reinstall torch torchvision"
_NEEDED = ("torch", "torchvision", "safetensors", "PIL", "numpy", "click")


def broken_pair(error: BaseException) -> InstallationError | None:
    """The error to show if ``error``, or one of its causes, means that torch and torchvision do not fit; else None."""
    kinds = (ImportError, RuntimeError, AttributeError)
    causes = (cause for cause in _causes(error) if isinstance(cause, kinds))
    if not any(text in str(cause) for cause in causes for text in _MIXED_BUILDS):
        return None
    versions = package_versions()
    exists = f"installed: torch {versions['torch']}, torchvision {versions['torchvision']}"
    return InstallationError("torch and torchvision were not built for one another", exists, _CURE)


def missing_package(error: BaseException) -> InstallationError | None:
    """The error to show if ``error`` means that a package is not installed which hookscope needs, else None."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in _NEEDED:
        return None
    distribution = "pillow" if error.name == "PIL" else error.name
    return InstallationError(f"the package {distribution} is not installed", do=f"pip install {distribution}")


def unreadable_settings(error: BaseException) -> InstallationError | None:
    """The error to show if matplotlib cannot decode its settings, which it reads when it is imported, else None."""
    frames = traceback.walk_tb(error.__traceback__) if isinstance(error, UnicodeDecodeError) else ()
    if not any(frame.f_globals.get("__name__") == "matplotlib" for frame, _ in frames):
        return None
    return InstallationError("matplotlib cannot read its file matplotlibrc: it is not UTF-8", do="repair or remove it")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and its causes, outermost first, each once."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
