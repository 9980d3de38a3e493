"""One place that turns the exceptions of a model's forward pass into input errors."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hookscope.errors import HookscopeError, InputError, ModelError
from hookscope.hooks import tensors_in

# by a signal, which the commands turn into an exit
_TOLD_TO_END = {128 + int(getattr(signal, name)) for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name)}


# What torch says in many words of models that work forward and not backward.
_NO_GRADIENT = {
    "Inference tensors cannot be saved for backward": (
        "its forward pass computes inside torch.inference_mode",
        "use torch.no_grad there, or nothing",
    ),
    "use_reentrant": ("a part of it runs inside a reentrant checkpoint", "checkpoint with use_reentrant=False"),
}


@contextmanager
def model_errors_as_input_errors(model: str, inputs: Any) -> Iterator[None]:
    """Whatever a model raises on ``inputs``, tensors in any container, as an InputError that gives their size.

    What says that the memory is full is left as it is: another size of picture is not the first thing to try.
    """
    try:
        yield
    except HookscopeError:
        raise
    except SystemExit as error:
        if error.code in _TOLD_TO_END:  # not the model: the command was
            raise
        raise InputError(f"{model} ends the program in its forward pass, by sys.exit({error.code!r})") from error
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
            raise
        shapes = [tuple(tensor.shape) for tensor in tensors_in(inputs).values()]
        size = "x".join(map(str, shapes[0])) if shapes else "no size"
        text = " ".join(str(error).split())[:200] or type(error).__name__
        if why := next((why for sign, why in _NO_GRADIENT.items() if sign in text), None):
            raise ModelError(f"no gradient passes {model}", *why) from error
        about_size = re.search(r"size|small|shape|divisible|dimension", text) and "type" not in text
        raise InputError(
            f"{model} refuses a picture of {size}: {text}", do="try another --input-size" if about_size else ""
        ) from error
