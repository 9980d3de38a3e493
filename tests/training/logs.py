"""Logs of training runs written by hand: a sound run, and what a test changes in it."""

from collections.abc import Callable, Iterable
from typing import Any

from hookscope.training.log.file import Run

SOUND: dict[str, Any] = {
    "activation_mean": 0.1, "activation_std": 1.0, "zero_share": 0.0, "channels": 64, "dead_channels": 0,
    "non_finite": 0, "gradient_norm": 0.1, "gradient_non_finite": 0, "weight_norm": 1.0, "weight_non_finite": 0,
    "update_to_weight": 1e-3, "running_mean_shift": None, "running_var_ratio": None, "frozen": False,
}  # fmt: skip


def row(step: int, layer: str, index: int, **more: Any) -> dict[str, Any]:
    """A line of a layer in a sound run."""
    loss = max(0.5, 1 - step / 1000)
    of_step = {"step": step, "time": step / 10, "loss": loss, "learning_rate": 0.1, "optimizer": 0, "model": 0}
    return of_step | {"layer": layer, "call": 0, "index": index, "type": "Conv2d"} | SOUND | more


def log(
    change: Callable[[int, str], dict[str, Any]] = lambda step, layer: {},
    layers: Iterable[str] = ("a", "b", "c"),
    steps: Iterable[int] = range(0, 500, 50),
    **more: Any,
) -> Run:
    """A sound run with ``more`` in every line, and what ``change`` gives for a step and a layer."""
    layers = list(layers)
    return Run({}, [row(s, name, at) | more | change(s, name) for s in steps for at, name in enumerate(layers)])
