"""Around the code of a model: it is built quietly from a seed, and its exceptions become errors of hookscope."""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hookscope.errors import HookscopeError, InputError, ModelError, is_out_of_memory
from hookscope.hooks import tensors_in

# Exit statuses that the commands use for these signals.
_SIGNAL_EXITS = {128 + int(getattr(signal, name)) for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name)}
# What torch says at length of models that work forward but not backward.
_NO_GRADIENT = {
    "Inference tensors cannot be saved for backward": (
        "its forward pass computes inside torch.inference_mode",
        "use torch.no_grad there, or nothing",
    ),
    "use_reentrant": ("a part of it runs inside a reentrant checkpoint", "checkpoint with use_reentrant=False"),
}


@contextmanager
def advice_on_inputs(model: str) -> Iterator[None]:
    """Add to an InputError about a model of the user how to say what it takes."""
    try:
        yield
    except InputError as error:
        if error.do or not (do := _advice(model)):
            raise
        raise InputError(error.asked.rstrip("."), error.exists, do) from error.__cause__


def _advice(model: str, about_size: bool = False) -> str:
    """What to do about a model that refuses its input; only the file of a factory can say what the model takes."""
    another = ["try another --input-size"] if about_size else []
    of_factory = ":" in model and not model.startswith("timm:")
    declare = ["set input_size, preprocess or model_inputs next to its factory"] if of_factory else []
    return ", or ".join(another + declare)


@contextmanager
def model_errors_as_input_errors(model: str, inputs: Any) -> Iterator[None]:
    """Turn what the model called ``model`` raises on ``inputs``, tensors in any container, into an InputError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, HookscopeError) or _is_not_of_the_model(error):
            raise
        if isinstance(error, SystemExit):
            raise InputError(f"{model} ends the program in its forward pass, by sys.exit({error.code!r})") from error
        shapes = [tuple(tensor.shape) for tensor in tensors_in(inputs).values()]
        size = "x".join(map(str, shapes[0])) if shapes else "no size"
        text = " ".join(str(error).split())[:200] or type(error).__name__
        if cause := next((cause for sign, cause in _NO_GRADIENT.items() if sign in text), None):
            raise ModelError(f"no gradient can flow through {model}", *cause) from error
        about_size = None if "type" in text else re.search(r"size|small|shape|divisible|dimension", text)
        do = _advice(model, about_size is not None)
        raise InputError(f"{model} refuses a picture of {size}: {text.rstrip('.')}", do=do) from error


@contextmanager
def build_errors_as_model_errors(asked: str) -> Iterator[None]:
    """Turn what the code of a user's factory raises into a ModelError that begins with ``asked``."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if _is_not_of_the_model(error):
            raise
        raise ModelError(f"{asked}: {type(error).__name__}: {error}") from error


def _is_not_of_the_model(error: BaseException) -> bool:
    """Whether the memory is full, for which another input is not the first cure, or a signal ends the command."""
    return is_out_of_memory(error) or (isinstance(error, SystemExit) and error.code in _SIGNAL_EXITS)


@contextmanager
def quiet_and_seeded(seed: int) -> Iterator[None]:
    """Draw random numbers from ``seed`` and show no warnings in the block; the random state is restored."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        yield
