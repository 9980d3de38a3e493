"""What tests of several packages share."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from hookscope.images import Listener
from hookscope.jobs import RunSettings

HOOK_TABLES = [table for table in vars(nn.Identity()) if "hooks" in table and not table.startswith("_state_dict")]


def hooks_on(model: nn.Module) -> int:
    """How many hooks the modules and the parameters of ``model`` have."""
    on_tensors = sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())
    return on_tensors + sum(len(getattr(module, table) or ()) for module in model.modules() for table in HOOK_TABLES)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model in eval mode, with the weights of this seed; the random state is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


def numbers(tensor: Tensor) -> list[float]:
    """All values in a row, the way a test writes them down."""
    return tensor.detach().flatten().tolist()


def small_head(name: str) -> nn.Module:
    """torchvision's model ``name`` with five classes, without the large heads of alexnet and vgg."""
    with torch.device("meta"):
        net = torchvision.models.get_model(name, weights=None, num_classes=5)
        if name in ("alexnet", "vgg11"):
            width = net.classifier[1 if name == "alexnet" else 0].in_features
            net.classifier = nn.Linear(width, 5)
    net = net.to_empty(device="cpu").eval()
    for key, tensor in net.state_dict().items():
        if tensor.dim() > 1:
            nn.init.kaiming_normal_(tensor)
        else:
            tensor.fill_(1 if key.endswith(("running_var", "weight")) else 0)
    return net


def not_in_place(net: nn.Module) -> nn.Module:
    """``net`` with none of its layers working in place."""
    for module in net.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    return net


def same_values(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Whether the state dict of ``model`` has the keys of ``state``, in any order, and equal values."""
    own = model.state_dict()
    return own.keys() == state.keys() and all(torch.equal(value, state[key]) for key, value in own.items())


@contextmanager
def hooked(model: nn.Module, hook: Callable[[str, Any], Any], *layers: str) -> Iterator[None]:
    """Plain hooks of torch: in the block ``hook(name, output)`` is called after each of the layers, by default all."""
    handles = [
        module.register_forward_hook(lambda module, args, output, name=name: hook(name, output))
        for name, module in model.named_modules()
        if not layers or name in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def refused(error: type[Exception], says: str, part: str = "") -> Iterator[None]:
    """The block must raise ``error`` with the line ``says``, or with one that ``begins`` with it or ``holds`` it."""
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    assert {"": text == says, "begins": text.startswith(says), "holds": says in text}[part] and "\n" not in text


class Trap:
    """A pickle of it makes the folder ``target`` when it is loaded."""

    def __init__(self, target: object) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.target,)


def same_bits(values: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one type and shape, and the same bits: -0 is not 0, and NaN is NaN."""
    if values.dtype != other.dtype:
        return False
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16}[values.element_size()]
    return torch.equal(values.detach().contiguous().view(whole), other.detach().contiguous().view(whole))


def settings(batch_size: int | None = None, workers: int = 0, engine: Any = None, **calls: Any) -> RunSettings:
    """Settings of a run, and what its listener calls."""
    return RunSettings(batch_size, workers, engine, Listener(**calls))


def ignore(*arguments: Any) -> None:
    """A call of a listener that does nothing."""
