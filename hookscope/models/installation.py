"""What is wrong with the packages installed beside hookscope, in one line."""

from __future__ import annotations

from collections.abc import Iterator

from hookscope.errors import InstallationError
from hookscope.models.names import package_versions

# What torchvision says when it was built for another torch. The third text is its second import in the same process:
# the first import died half-way and left a part of the module behind.
_MIXED_BUILDS = (
    "torchvision::nms does not exist",
    "Couldn't load custom C++ ops",
    "module 'torchvision' has no attribute 'extension'",
)
_CURE = "install both from the same place: pip install --force-reinstall torch torchvision"
_NEEDED = {"torch": "torch", "torchvision": "torchvision", "PIL": "pillow", "numpy": "numpy", "click": "click"}


def broken_pair(error: BaseException) -> InstallationError | None:
    """The error to show when ``error`` comes of a torch and a torchvision that were not built for one another.

    The causes behind ``error`` are looked at too. None when it is about something else.

    Example:
        >>> broken_pair(RuntimeError("operator torchvision::nms does not exist")).asked
        'torch and torchvision were not built for one another'
        >>> broken_pair(RuntimeError("something else")) is None
        True
    """
    if not any(_tells_of_mixed_builds(link) for link in _chain(error)):
        return None
    found = package_versions()
    exists = f"installed: torch {found['torch']}, torchvision {found['torchvision']}"
    return InstallationError("torch and torchvision were not built for one another", exists, _CURE)


def missing_package(error: BaseException) -> InstallationError | None:
    """The error to show when ``error`` says that a package hookscope needs is not installed, else None.

    Example:
        >>> str(missing_package(ModuleNotFoundError("No module named 'torch'", name="torch")))
        'the package torch is not installed; pip install torch'
    """
    if not isinstance(error, ModuleNotFoundError) or error.name not in _NEEDED:
        return None
    distribution = _NEEDED[error.name]
    return InstallationError(f"the package {distribution} is not installed", do=f"pip install {distribution}")


def _tells_of_mixed_builds(error: BaseException) -> bool:
    kinds = (ImportError, RuntimeError, AttributeError)
    return isinstance(error, kinds) and any(text in str(error) for text in _MIXED_BUILDS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what caused it, outermost first; a ring of causes ends."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
