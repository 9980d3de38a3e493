"""Factories in somebody's module: imported, called with literals, listed; what their file says of the input."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import io
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image
from torch import nn
from torchvision.transforms import _presets as presets

from hookscope.errors import ModelError, UsageError, nearest
from hookscope.findings import listed
from hookscope.hooks import same_bits, tensors_in
from hookscope.models.choices import PreprocessChoice
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.published import of_processor
from hookscope.models.run import build_errors_as_model_errors, quiet_and_seeded
from hookscope.models.transforms import OwnTransforms, Transforms

# Names in a file that are not factories: what `_declared` reads, and what starts a script.
NUMBERS = re.compile("(?i)box|coord|landmark|keypoint|offset|regress|^reg$")  # in the name of an output without scores
_NOT_FACTORIES = ("input_size", "preprocess", "model_inputs", "main")
_LONGEST_SIGNATURE = 200
_EXAMPLES = {"int": 8, "float": 0.5, "str": "name", "bool": True, "list": [8, 8], "tuple": (8, 8), "dict": {}}


_FACTORY = re.compile(r"(?P<source>.+?):(?P<name>[^:()/\\]+)(?P<arguments>\(.*\))?", re.DOTALL)


@dataclass(frozen=True)
class FactoryText:
    """A factory in ``source``, a Python file or the dotted name of a module; without ``name`` the only one in it."""

    source: str
    name: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> FactoryText:
        """Read ``SOURCE``, ``SOURCE:NAME`` or ``SOURCE:NAME(ARGUMENTS)``; arguments are literals, and no code runs."""
        if text.endswith(".py") or ":" not in text:
            return cls(text)
        match = _FACTORY.fullmatch(text)
        if match is None:
            raise UsageError(f"cannot read '{text}'", do="write file.py:factory or 'file.py:factory(width=2)'")
        args, kwargs = _literals(match["arguments"] or "()", text)
        return cls(match["source"], match["name"], args, kwargs)


def _literals(arguments: str, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of ``(2, width=[3, 4])``."""
    try:
        call = ast.parse(f"factory{arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        args = tuple(ast.literal_eval(argument) for argument in call.args)
        kwargs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if None in kwargs or len(kwargs) < len(call.keywords):  # **mapping, or a name that comes twice
            raise ValueError
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        do = "give literals: numbers, 'text', True, None, lists, tuples, dictionaries"
        raise UsageError(f"cannot read the arguments of '{text}'", do=do) from None
    return args, {str(name): value for name, value in kwargs.items()}


def random_tensors(model: nn.Module, again: Callable[[], nn.Module], seed: int) -> tuple[int, int] | None:
    """How many tensors of ``model`` differ when ``again`` makes it from another seed, of how many; None if unknown.

    Tensors of one value are left out: the first running statistics of a BatchNorm are the same for every seed.
    """
    try:
        with redirect_stdout(io.StringIO()), quiet_and_seeded(seed + 1):
            other = again()
        twins, values = other.state_dict(), model.state_dict()
        names = [name for name in values if bool((values[name] != values[name].flatten()[:1]).any())]
        differ = sum(not same_bits(values[name], twins[name]) for name in names)
    except Exception:  # the code of a user may serve one call only
        return None
    return (differ, len(names)) if names and other is not model else None


def build(text: str) -> tuple[FactoryText, nn.Module, dict[str, Any], Callable[[], nn.Module]]:
    """The factory that a MODEL text names, what it returned, what its file declares, and what calls it again."""
    factory, spec = FactoryText.parse(text), text
    with _importable(factory.source):
        module = _import_source(factory.source, text)
        if not factory.name:
            factory = replace(factory, name=_only_factory(module, factory.source))
            spec = f"{factory.source}:{factory.name}"
        value = getattr(module, factory.name, None)
        if value is None:
            near = nearest(factory.name, _public(module, _is_factory))
            raise ModelError(f"no '{factory.name}' in {factory.source}", near)
        make = partial(_called, value, factory, spec)
        return factory, make(), _declared(value, module), make


def find_in_source(spec: str) -> Any:
    """What ``package.module:name`` or ``path/to/file.py:name`` names."""
    source, _, name = spec.rpartition(":")
    with _importable(source):
        module = _import_source(source, spec)
    if not hasattr(module, name):
        functions = _public(module, inspect.isfunction)
        raise ModelError(f"no '{name}' in {source}", f"it has {listed(functions)}" if functions else "")
    return getattr(module, name)


@contextmanager
def _importable(source: str) -> Iterator[None]:
    """Make the folder of a file, or the current folder, importable in the block, as ``python FILE`` does."""
    folder = str(Path(source).resolve().parent) if source.endswith(".py") else str(Path.cwd())
    before = list(sys.path)
    sys.path.append(folder)  # last: a file in it must not shadow an installed module
    try:
        yield
    finally:
        sys.path[:] = before


def _import_source(source: str, spec: str) -> ModuleType:
    """The module ``source``, a file or a dotted name, for the MODEL text ``spec``."""
    asked = source if spec == source else f"{source} for {spec}"
    if source.endswith(".py") and not Path(source).is_file():
        files = [path.name for path in Path(source).parent.glob("*.py")]
        raise ModelError(f"no file '{source}'{asked.removeprefix(source)}", nearest(Path(source).name, files))
    try:
        with build_errors_as_model_errors(f"cannot import {asked}"):
            return _import_file(source) if source.endswith(".py") else importlib.import_module(source)
    except ModelError as error:
        package, _, name = source.rpartition(".")
        if spec == source and isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == source:
            raise ModelError(error.asked, do=f"write {package}:{name}") from error.__cause__
        raise


def _import_file(source: str) -> ModuleType:
    path = Path(source).resolve()
    # A unique name: two files net.py are two modules, and neither is mistaken for an installed module.
    unique = f"_hookscope_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    module_spec = importlib.util.spec_from_file_location(unique, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[unique] = module  # dataclasses look their module up there
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module


def _called(factory: Any, text: FactoryText, spec: str) -> nn.Module:
    if isinstance(factory, nn.Module):
        if text.args or text.kwargs:
            raise ModelError(f"{spec}: {text.name} is a module already", do=f"write {text.source}:{text.name}")
        return factory
    if not callable(factory):
        raise ModelError(f"{spec} is not a factory but {type(factory).__name__}", do="name a function or class")
    _check_arguments(factory, text, spec)
    with build_errors_as_model_errors(f"{spec} failed"):
        model = factory(*text.args, **text.kwargs)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} returned {type(model).__name__}", do="return an nn.Module")
    return model


def _check_arguments(factory: Any, text: FactoryText, spec: str) -> None:
    """Refuse arguments that ``factory`` does not take; the error shows its signature and an example."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*text.args, **text.kwargs)
    except TypeError as error:
        shown = f"{text.name}{signature.replace(return_annotation=signature.empty)}"[:_LONGEST_SIGNATURE]
        do = _example(signature, text) if "missing" in str(error) else ""
        raise ModelError(f"{spec}: {error}", f"it is {shown}", do) from error


def _example(signature: inspect.Signature, text: FactoryText) -> str:
    words = [*map(repr, text.args), *(f"{name}={value!r}" for name, value in text.kwargs.items())]
    for parameter in list(signature.parameters.values())[len(text.args) :]:
        is_needed = parameter.default is parameter.empty and not str(parameter).startswith("*")
        if is_needed and parameter.name not in text.kwargs:
            value = _EXAMPLES.get(getattr(parameter.annotation, "__name__", str(parameter.annotation)), 8)
            words.append(f"{parameter.name}={value!r}" if parameter.kind != parameter.POSITIONAL_ONLY else repr(value))
    return f'write "{text.source}:{text.name}({", ".join(words)})"'


def _only_factory(module: ModuleType, source: str) -> str:
    """The name of the only factory in ``module``: of its own ones, else of those that it imports."""
    names = [name for name in _public(module, _may_be_model) if name not in _NOT_FACTORIES]
    ready = [name for name in names if _is_factory(vars(module)[name])]
    own = [name for name in names if _is_own(vars(module)[name], module)]
    needy = [name for name in own if isinstance(vars(module)[name], type) and name not in ready]
    asking = [name for name in own if inspect.isfunction(vars(module)[name]) and name not in ready]
    for group in ([name for name in ready if name in own], needy, ready, asking):
        if len(group) == 1:
            return group[0]
        if group:
            others = f"; with arguments {listed(needy)}" if needy and group is not needy else ""
            asked = f"{source} has {len(group)} factories"
            raise ModelError(asked, f"they are {listed(group)}{others}", f"write {source}:{group[0]}")
    raise ModelError(f"no factory in {source}", do="write a function or class that makes an nn.Module")


def _public(module: ModuleType, is_wanted: Callable[[Any], bool]) -> list[str]:
    return [name for name, value in vars(module).items() if not name.startswith("_") and is_wanted(value)]


def _may_be_model(value: Any) -> bool:
    """Whether it is a module, a class of modules, or a function that may return one."""
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is not None
    if isinstance(value, type):
        return issubclass(value, nn.Module)
    returned = getattr(value, "__annotations__", {}).get("return", nn.Module)
    if returned in (None, "None") or (isinstance(returned, type) and not issubclass(returned, nn.Module)):
        return False
    return inspect.isfunction(value)


def _is_own(value: Any, module: ModuleType) -> bool:
    """Whether a class or function is defined in ``module``; a module that is there already counts as its own."""
    return not hasattr(value, "__name__") or getattr(value, "__module__", None) == module.__name__


def _is_factory(value: Any) -> bool:
    """Whether it is a module, or a function or class of modules that needs no arguments."""
    if isinstance(value, nn.Module):
        return True
    if not callable(value) or (isinstance(value, type) and not issubclass(value, nn.Module)):
        return False
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError):
        return False
    return True


def _declared(factory: Any, module: Any) -> dict[str, Any]:
    """The names that the factory has as attributes, or else the module of the factory."""
    values = {}
    for name in ("input_size", "preprocess", "model_inputs"):
        value = getattr(factory, name, None)
        if value is None or _is_for_the_model(value):
            value = getattr(module, name, None)
        if value is not None:
            values[name] = value
    return values


def _is_for_the_model(value: Any) -> bool:
    """Whether it is a method or a property of the model itself, which declares nothing of its input."""
    takes_self = inspect.isfunction(value) and next(iter(inspect.signature(value).parameters), "") == "self"
    return takes_self or isinstance(value, property) or isinstance(getattr(value, "__self__", None), nn.Module)


def with_declared_input(
    net: nn.Module, metadata: WeightsMetadata, declarations: Mapping[str, Any], where: str
) -> tuple[WeightsMetadata, PreprocessChoice]:
    """``metadata`` with what the file ``where`` declares of the input of ``net``, and what it chooses in words."""
    if "model_inputs" in declarations:
        _take_pictures(net, declarations["model_inputs"], where)
    choice, transforms, size = PreprocessChoice(), metadata.transforms, declarations.get("input_size")
    if (preprocess := declarations.get("preprocess")) is not None:
        made = preprocess_of(preprocess, f"preprocess of {where}")
        transforms, choice = (transforms, made) if isinstance(made, PreprocessChoice) else (made, choice)
    if size is not None:
        size = _checked_size(size, where)
    elif isinstance(transforms, OwnTransforms):
        size = tuple(transforms(Image.new("RGB", (256, 256))).shape)
    return replace(metadata, transforms=transforms, input_size=size or metadata.input_size), choice


def preprocess_of(value: Any, name: str) -> Transforms | OwnTransforms | PreprocessChoice:
    """What somebody's ``preprocess`` means: a function, torchvision's or transformers' own, words or a dictionary.

    ``name`` says where it stands.
    """
    try:
        if isinstance(value, str | Mapping):
            named = value if isinstance(value, Mapping) else {"preprocess": value}
            if unknown := [key for key in named if key not in ("preprocess", "mean", "std", "range", "resize")]:
                raise UsageError(f"unknown key '{unknown[0]}'", "there are preprocess, mean, std, range and resize")
            choice = PreprocessChoice.parse(**named)
            if ":" in choice.base:
                raise UsageError(f"'{choice.base}' names a function", do="import the function and name it itself")
            return choice
    except UsageError as error:
        raise ModelError(f"{name}: {error.asked}", error.exists, error.do) from None
    if type(value).__module__ == presets.__name__:
        return Transforms.of(value)
    if (processor := of_processor(value, name)) is not None:
        return processor
    if not callable(value):
        do = "make it a function of a PIL image, or a word for preprocessing"
        raise ModelError(f"{name} is not a function but {type(value).__name__}", do=do)
    return OwnTransforms(value, name)


def _checked_size(size: Any, where: str) -> tuple[int, ...]:
    sizes = (size, size) if isinstance(size, int) else size
    if not isinstance(sizes, tuple | list) or not 2 <= len(sizes) <= 4:
        do = "set it to (H, W), (C, H, W) or (C, D, H, W)"
    elif any(type(side) is not int or side < 1 for side in sizes):
        do = "give numbers above 0"
    else:
        return tuple(sizes)
    raise ModelError(f"input_size in {where} is {size!r}", do=do)


def _take_pictures(model: nn.Module, model_inputs: Callable[..., Any], where: str) -> None:
    """Make ``model``, called with a batch of pictures, run on what ``model_inputs`` returns for them.

    A mapping is keyword inputs, a tuple positional inputs, anything else the only input.
    """
    if not callable(model_inputs):
        asked = f"model_inputs in {where} is not a function but {type(model_inputs).__name__}"
        raise ModelError(asked, do="make it a function of a batch of images (N, C, H, W)")
    own: Any = type(model)

    def forward(self: Any, pictures: Any) -> Any:
        inputs = model_inputs(pictures)
        if isinstance(inputs, Mapping):
            return own.forward(self, **inputs)
        return own.forward(self, *(inputs if isinstance(inputs, tuple) else (inputs,)))

    _run_instead(model, forward)


def return_only(model: nn.Module, name: str, what: str) -> None:
    """Make ``model``, called ``what``, return of its tensors only the one with this name or position."""
    own: Any = type(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in(own.forward(self, *args, **kwargs))
        by_name = dict(zip(map(str, range(len(tensors))), tensors.values(), strict=True)) | tensors
        if name not in by_name:
            raise ModelError(f"{what} has no output '{name}'", f"it returns {listed([*tensors]) or 'no tensor'}")
        key = "out" if by_name[name].dim() > 3 else name if NUMBERS.search(name) else ""  # as a segmentation calls it
        return {key: by_name[name]} if key else by_name[name]

    _run_instead(model, forward)


def _run_instead(model: nn.Module, forward: Callable[..., Any]) -> None:
    """Give ``model`` another forward, by a class: an attribute would run this model in copies of it too."""
    own = type(model)
    names = {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__}
    model.__class__ = type(own.__name__, (own,), names)
