"""What a caller gives as a model and its inputs: judged and prepared in one place."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from hookscope.errors import HookscopeError, InputError, UsageError, kind_of, nearest
from hookscope.hooks import AnyModel, module_of, tensors_in
from hookscope.images import is_picture
from hookscope.models.loaded import LoadedModel, as_loaded, note_input
from hookscope.models.run import model_errors_as_input_errors

_DEFECTS = AttributeError, LookupError, NameError, AssertionError
_OURS = tuple(str(Path(__file__).parents[1] / room) for room in ("hooks", "tracing", "gradients"))
_Function = TypeVar("_Function", bound=Callable[..., Any])
_BRIGHT = 64  # no prepared image has such values: ImageNet's mean and std make 2.64 of white
_is_outermost = ContextVar("outermost", default=True)  # a function that calls others knows the name of the model


def takes_inputs(function: _Function) -> _Function:
    """``function(model, inputs, ...)`` with its inputs as `given_inputs`; what a pass raises becomes an InputError."""
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            near = [nearest(name, list(signature.parameters)) for name in kwargs.keys() - signature.parameters]
            raise TypeError("; ".join(filter(None, [f"{function.__name__}() {error}", *near]))) from None
        model = given.arguments["model"]
        name = model.name if isinstance(model, LoadedModel) else type(module_of(model)).__name__
        inputs = given.arguments["inputs"] = given_inputs(model, given.arguments["inputs"])
        if not _is_outermost.get():
            return function(*given.args, **given.kwargs)
        outermost = _is_outermost.set(False)
        try:
            return function(*given.args, **given.kwargs)
        except Exception as error:
            if "meta" in str(error).lower().split() and not isinstance(error, HookscopeError):
                asked = f"{name}: the model or the input is on the meta device: it has shapes and no values"
                raise InputError(asked, do="load the model, and give an image with values") from error
            frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            is_ours = frames[-1].co_filename.startswith(_OURS) and isinstance(error, _DEFECTS)
            if nn.Module._call_impl.__code__ not in frames or is_ours:  # outside a pass, or in a hook of ours
                raise
            with model_errors_as_input_errors(name, inputs):
                raise
        finally:
            _is_outermost.reset(outermost)

    return cast("_Function", checked)


def given_inputs(model: AnyModel, inputs: Any) -> tuple[Any, ...]:
    """The positional inputs of one pass: tensors as they are; an image, or the path of one, prepared for ``model``."""
    if is_picture(inputs):
        return as_loaded(model, on_meta=True).inputs_of(inputs)
    positional: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else (inputs,)
    if positional and not tensors_in(positional):
        do = "give a tensor (1, 3, H, W), or an image with what hookscope.load_model returns"
        if type(positional[0]).__module__ == "numpy":
            do = "torch.from_numpy(x) makes a tensor (1, 3, H, W); an image (H, W, 3) has the type uint8"
        raise UsageError(f"the input holds no tensor: it is {kind_of(positional[0])}", do=do)
    note_bytes(model, positional)
    return positional


def note_bytes(model: AnyModel, inputs: tuple[Any, ...]) -> None:
    """Warn of a tensor with the values of bytes, 0 to 255, unless the model says that it takes or scales them."""
    image = next(iter(tensors_in(inputs).values()), torch.empty(0))
    is_image = image.dim() in (4, 5) and image.shape[1] in (1, 3) and image.is_floating_point() and not image.is_meta
    if not (is_image and image.numel() and image.min() >= 0 and _BRIGHT < image.max() <= 255):
        return
    net = as_loaded(model, on_meta=True)
    first = next(layer for layer in net.model.modules() if not any(layer.children()))
    values = getattr(net.preprocess.transforms, "values", None)
    takes = values is None or values(torch.ones(len(values.mean), 1, 1)).max() > _BRIGHT
    if not takes and "Norm" not in type(first).__name__ and not any(True for _ in net.model.buffers(recurse=False)):
        text = f"the input of {net.name} has values up to {image.max():.4g}, as bytes have; models mostly take 0 to 1"
        note_input(f"{text}, less the mean and divided by std; give an image, or net.preprocess(image)[None]")
