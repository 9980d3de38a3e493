"""What is planned: a model without values where its source allows it, and the batches that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from hookscope.errors import HookscopeError, UsageError, first_line, nearest
from hookscope.hooks import tensors_in
from hookscope.models import (
    LoadedModel,
    ModelSource,
    as_batch,
    as_loaded,
    as_size,
    check_size,
    example_inputs,
    family_of,
    find_source,
    load_model,
)

OptimizerLike = str | Callable[[Iterable[Tensor]], Optimizer]


def optimizer_names() -> dict[str, type[Optimizer]]:
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
    try:
        with _AnyNumber():  # type: ignore[no-untyped-call]
            optimizer.step()
    except (TypeError, RuntimeError, ValueError) as error:
        asked = f"{type(optimizer).__name__} cannot be planned: {first_line(error)}"
        raise HookscopeError(asked, do="use another optimizer") from error


class _AnyNumber(TorchDispatchMode):
    """Gives 1 for the number in a tensor without values; some steps scale by one, which changes no size."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@dataclass(frozen=True)
class Subject:
    """A model, and the shape of an image that it takes; ``bare`` models have shapes and no values."""

    model: nn.Module
    name: str
    shape: tuple[int, ...]
    family: str
    device: str
    dtype: torch.dtype
    bare: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, net: str | ModelSource | LoadedModel | nn.Module, size: Sequence[int] | None) -> Subject:
        """The subject for a MODEL argument or a model, and the input size, by default the model's."""
        wanted = None if size is None else tuple(as_size(size))
        if isinstance(net, str | ModelSource):
            source = find_source(net)
            if (skeleton := source.skeleton()) is not None:
                check_size(skeleton.model, wanted)
                example = next(iter(tensors_in(example_inputs(skeleton.model, wanted or skeleton.size)).values()))
                family = family_of(skeleton.model)
                shape = tuple(example.shape)[family != "detection" :]
                bare = any(parameter.is_meta for parameter in skeleton.model.parameters())
                return cls(skeleton.model, source.text, shape, family, "cpu", example.dtype, bare)
            net = load_model(source, "none", device="cpu", input_size=wanted)
        loaded = as_loaded(net, on_meta=True)
        check_size(loaded.model, wanted, loaded.family)
        shape = loaded.preprocess.input_shape
        if wanted is not None:
            whole = len(wanted) == 1 or len(wanted) > len(shape)  # features, or a shape with its batch
            shape = wanted[len(wanted) > 1 :] if whole else (*shape[: len(shape) - len(wanted)], *wanted)
        dtype = loaded.preprocess.dtype or torch.float32
        return cls(loaded.model, loaded.name, shape, loaded.family, loaded.device, dtype, notes=loaded.notes)

    def inputs(self, batch: int, device: str, dtype: torch.dtype | None = None, train: bool = False) -> tuple[Any, ...]:
        """The positional inputs of a pass of ``batch`` images; a detector also gets targets to ``train``."""
        kind = dtype or self.dtype
        new = torch.empty if device == "meta" else torch.rand
        if self.family != "detection":
            images = new((batch, *self.shape), dtype=kind, device=device)
            return (images, images.clone()) if self.family == "optical_flow" else (images,)
        pictures = as_batch(self.family, [new(self.shape, dtype=kind, device=device) for _ in range(batch)])
        return (*pictures, [_target(picture) for picture in pictures[0]]) if train else pictures


def _target(picture: Tensor) -> dict[str, Tensor]:
    """One object in the middle of the picture, with a mask, and a key point as torchvision's person has 17 of."""
    height, width = picture.shape[-2:]
    new = picture.new_tensor
    box = [width / 4, height / 4, width * 3 / 4, height * 3 / 4]
    masks, keypoints = picture.new_ones((1, height, width), dtype=torch.uint8), [[width / 2, height / 2, 1]] * 17
    return {"boxes": new([box]), "labels": new([1], dtype=torch.int64), "masks": masks, "keypoints": new([keypoints])}
