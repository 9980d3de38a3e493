"""Around the code of a model: it is built quietly from a seed, and its exceptions become errors of hookscope."""

from __future__ import annotations

import linecache
import logging
import os
import re
import signal
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from hookscope.errors import HookscopeError, InputError, ModelError, is_out_of_memory
from hookscope.hooks import map_tensors, tensors_in


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that ``build`` returns, on the meta device, where initialising the parameters costs nothing.

    Only ``torch.empty`` goes to the meta device while building, because some builders (RegNet) compute with tensors.
    """

    class EmptyOnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {})
            if getattr(func, "__module__", "") == "torch.nn.init" and getattr(kwargs.get("tensor"), "is_meta", False):
                return kwargs["tensor"]
            return func(*args, **kwargs)

    with EmptyOnMeta():
        return build().to("meta")


def meta_forward(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
    """One forward pass on the meta device, with meta tensors in place of the parameters and buffers of ``model``.

    The model raises some exception if an operation needs values (``nonzero`` in detectors).
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    replacements = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
    with torch.no_grad():
        on_meta = map_tensors((args, dict(kwargs or {})), lambda tensor: tensor.to("meta"))
        return functional_call(model, replacements, *on_meta)


# Exit statuses that the commands use for these signals.
_SIGNAL_EXITS = {128 + int(getattr(signal, name)) for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name)}
# Packages whose code runs between a user's code and an exception.
_NOT_OF_USERS = {"hookscope", "torch", "torchvision", "captum", "importlib", "_frozen_importlib"}
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
# What torch says of an input that does not fit a layer.
_CAUSES = {
    r"expected input\[.*\] to have (?P<takes>\d+) channels, but got (?P<got>\d+)": (
        "takes {takes} channels and got {got}"
    ),
    r"cannot be multiplied \(\d+x(?P<got>\d+) and (?P<takes>\d+)x\d+\)": "takes {takes} features and got {got}",
    r"\"(?P<takes>[^\"]+)\" not implemented for '(?P<got>\w+)'": "has no {takes} for {got} on this device",
    r"Input type \((?P<got>.+?)\) and (?:bias|weight) type \((?P<takes>.+?)\) should be": "takes {takes} and got {got}",
    r"expected m1 and m2 to have the same dtype, but got: (?P<got>.+) != (?P<takes>.+)": "takes {takes} and got {got}",
    r"Kernel size can't be greater|Output size is too small": "needs a larger input",
    r"more than 1 value per channel when training": "needs several values to normalise a batch and got one",
}
_READ_BY_NAME = r"""\b(\w+)(?:\[["']|\.(?:get|keys|items|pop)\()"""
# What torch says at length of models that work forward but not backward.
_NO_GRADIENT = {
    "Inference tensors cannot be saved for backward": (
        "its forward pass computes inside torch.inference_mode",
        "use torch.no_grad there, or nothing",
    ),
    "use_reentrant": ("a part of it runs inside a reentrant checkpoint", "checkpoint with use_reentrant=False"),
}


@contextmanager
def model_errors_as_input_errors(model: str, inputs: Any) -> Iterator[None]:
    """Turn what the model called ``model`` raises on ``inputs``, tensors in any container, into an InputError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, HookscopeError) or is_not_of_users(error):
            raise
        if isinstance(error, SystemExit):
            raise InputError(f"{model} ends the program in its forward pass, by sys.exit({error.code!r})") from error
        if cause := next((cause for sign, cause in _NO_GRADIENT.items() if sign in str(error)), None):
            raise ModelError(f"no gradient can flow through {model}", *cause) from error
        raise forward_error(model, inputs, error) from error


def forward_error(model: str, inputs: Any, error: Exception) -> InputError:
    """The error for what the forward pass of ``model`` raised on ``inputs``: the likely cause, then what and where."""
    shapes = " and ".join("x".join(map(str, tensor.shape)) for tensor in tensors_in(inputs).values())
    for note in getattr(error, "__notes__", ()):
        if note.startswith("the function for"):  # of the user, see `intervene`
            return InputError(f"{describe_error(error)}, in {note}", do=_all_of_it(error))
    asked = f"forward() failed on {shapes or 'its input'}: {describe_error(error)}"
    if cause := _likely_cause(error):
        asked = f"{cause}; {asked}"
    about_size = None if "type" in str(error) else re.search(r"size|small|shape|divisible|[dD]imension", str(error))
    about_input = about_size or isinstance(
        error, TypeError | ValueError | LookupError | AttributeError | AssertionError
    )
    advice = ["try another ‹input_size|--input-size›"] if about_size else []
    if about_size and "ONNXRuntimeError" in str(error):
        advice = ["give the ‹input_size and batch_size|--input-size and --batch-size› of its export"]
    if "several values" in cause:
        advice = ["give a larger batch"]
    if re.search("type .* should be|same (dtype|device)", str(error)):
        advice = ["give the image as the weights are: ‹x.to(next(model.parameters()))|let preprocess return that type›"]
    if any(isinstance(value, list) for value in inputs) and isinstance(error, TypeError):
        advice = ["give a tensor, not a list: torch.stack makes one of several"]
    if "channels" in cause:
        advice = [
            "give ‹an input of that many channels, or preprocess=function to load_model|--preprocess file.py:function›,"
            " which makes that many channels of an image"
        ]
    if isinstance(inputs, tuple) and any(
        isinstance(value, Tensor) and value.dim() == 3 and len(value) in (1, 3) for value in inputs
    ):
        advice = ["x[None] adds a batch axis"]
    declared = "set input_size, preprocess or model_inputs next to its factory"
    several = re.search("required positional|required keyword-only|takes . positional", str(error))
    if "takes no image tensor" in cause or (several and not _frame_of_the_user(error)):
        advice, declared = [], "set model_inputs next to its factory: it makes what forward takes of a batch of images"
    if ":" in model and not model.startswith("timm:"):  # only the file of a factory can say what its model takes
        advice += [declared] if about_input else []
    return InputError(f"{model}: {asked}", ", or ".join(advice), _all_of_it(error))


def describe_error(error: BaseException) -> str:
    """Type, message and place of an exception in the code of a user, in one line."""
    text = " ".join(str(error).split())[:200].rstrip(".")
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frame = _frame_of_the_user(error)
    if frame is None:
        return said
    path = os.path.relpath(frame.filename)
    return f"{said}, at {frame.filename if path.startswith('..') else path}:{frame.lineno} in {frame.name}"


def _all_of_it(error: BaseException) -> str:
    return "‹its cause|--traceback› shows all" if _frame_of_the_user(error) else ""


def _frame_of_the_user(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line outside hookscope, torch and, where another is left, installed packages."""
    frames = [
        traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_OF_USERS
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)]
    return (own or frames)[-1] if frames else None


def _likely_cause(error: Exception) -> str:
    """What a layer expects and what it got, where torch's message or the line that failed says both."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        read = re.search(_READ_BY_NAME, linecache.getline(frame.f_code.co_filename, line))
        if read and isinstance(frame.f_locals.get(read[1]), Tensor):
            return f"{frame.f_code.co_name}({read[1]}) takes no image tensor"
    for pattern, cause in _CAUSES.items():
        if match := re.search(pattern, str(error)):
            return f"{_failed_layer(error) or 'a layer'} {cause.format(**match.groupdict())}"
    return ""


def _failed_layer(error: BaseException) -> str:
    """The name of the innermost layer whose forward pass raised, as ``layer 'fc' (Linear)``; empty if unknown."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = [module for frame in frames if isinstance(module := frame.f_locals.get("self"), nn.Module)]
    names = {id(module): name for name, module in modules[0].named_modules()} if modules else {}
    name = names.get(id(modules[-1])) if modules else ""
    return f"layer '{name}' ({type(modules[-1]).__name__})" if name else ""


@contextmanager
def build_errors_as_model_errors(asked: str) -> Iterator[None]:
    """Turn what the code of a user's factory raises into a ModelError that begins with ``asked``."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, HookscopeError) or is_not_of_users(error):
            raise
        raise ModelError(f"{asked}: {describe_error(error)}", do=_all_of_it(error)) from error


def is_not_of_users(error: BaseException) -> bool:
    """Whether the memory is full, for which another input is not the first cure, or a signal ends the command."""
    return is_out_of_memory(error) or (isinstance(error, SystemExit) and error.code in _SIGNAL_EXITS)


@contextmanager
def quiet_and_seeded(seed: int) -> Iterator[None]:
    """Draw random numbers from ``seed`` and show no warnings in the block; the random state is restored."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def quiet_log(name: str) -> Iterator[None]:
    """Let the logger of a package say nothing in the block."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
