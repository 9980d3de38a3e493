"""What tests of several packages share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

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
