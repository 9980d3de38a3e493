"""Optimizers of torch.optim by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from hookscope.errors import HookscopeError, UsageError, nearest

OptimizerLike = str | Callable[[Iterable[Tensor]], Optimizer]


def optimizer_names() -> dict[str, type[Optimizer]]:
    """The classes of `torch.optim` by lower-case name."""
    classes = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    return {cls.__name__.lower(): cls for cls in classes if issubclass(cls, Optimizer) and cls is not Optimizer}


def build_optimizer(optimizer: OptimizerLike, parameters: Sequence[Tensor], device: str) -> Optimizer:
    """The optimizer of that name for ``parameters``, with the steps that it takes on ``device``."""
    if not isinstance(optimizer, str):
        return optimizer(parameters)
    names = optimizer_names()
    cls: Any = names.get(optimizer.lower())
    if cls is None:
        exists = nearest(optimizer, list(names)) or f"there are {', '.join(sorted(names))}"
        raise UsageError(f"no optimizer '{optimizer}' in torch.optim", exists)
    try:
        made: Optimizer = cls(parameters, lr=1e-3)
    except (TypeError, ValueError) as error:
        raise HookscopeError(f"{cls.__name__} does not take these parameters: {error}") from error
    for group in made.param_groups:
        if "foreach" in group:  # on the meta device torch would decide otherwise
            group["foreach"] = device == "cuda"
    return made


def create_state(optimizer: Optimizer) -> None:
    """One step with gradients that are 0, after which the state is there as in every later step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    step(optimizer)
    optimizer.zero_grad(set_to_none=True)


def step(optimizer: Optimizer) -> None:
    """One step of the optimizer."""
    try:
        with _AnyNumber():  # type: ignore[no-untyped-call]
            optimizer.step()
    except (TypeError, RuntimeError, ValueError) as error:
        said = (str(error).splitlines() or [""])[0]
        raise HookscopeError(
            f"{type(optimizer).__name__} cannot be planned: {said}", do="use another optimizer"
        ) from error


class _AnyNumber(TorchDispatchMode):
    """Gives 1 for the number in a tensor without values; some steps scale by one, which changes no size."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Every tensor that the optimizer keeps from step to step."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
