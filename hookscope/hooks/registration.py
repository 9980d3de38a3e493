"""The one place that registers hooks; every hook registered here is removed again, whatever is raised."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookscope.errors import ModelError

_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class StopForward(BaseException):
    """Ends a forward pass early. No ``Exception``, so that a model's own ``except Exception`` does not catch it."""


class HookOwner:
    """What has its methods as hooks on a model, and leaves copies of the model alone."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: in a copy of the model made inside the block, hooks see other modules and do nothing."""
        return self

    def __reduce__(self) -> Any:
        """A stand-in whose hooks do nothing, from the standard library: models are pickled whole and read elsewhere."""
        nothing = nullcontext().__exit__  # takes any arguments and returns None
        return SimpleNamespace, (), dict.fromkeys(("_start", "_before", "_after", "_end"), nothing)


class HookHandles(ExitStack):
    """Handles of registered hooks; leaving the ``with`` block removes exactly these."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[tuple[dict[int, Any], int, Any]] = []

    def forward(self, module: nn.Module, hook: Callable[..., Any], always: bool = False) -> None:
        """Call ``hook(module, args, kwargs, output)`` after each forward; anything but None replaces the output.

        ``always`` means also after an exception, with the output None.
        """
        # with_kwargs: a plain hook of a module called with keywords only gets an empty tuple
        self.callback(module.register_forward_hook(hook, with_kwargs=True, always_call=always).remove)

    def forward_pre(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call ``hook(module, args, kwargs)`` before each forward; ``(args, kwargs)`` returned replaces both."""
        self.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def node(self, node: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Call ``hook(grad_inputs, grad_outputs)`` after ``node`` of the autograd graph has run in backward."""
        self.callback(node.register_hook(hook).remove)

    def node_before(self, node: Any, hook: Callable[[Any], Any]) -> None:
        """Call ``hook(grad_outputs)`` before ``node`` runs in backward; returned gradients replace these."""
        self.callback(node.register_prehook(hook).remove)

    def tensor(self, tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
        """Call ``hook(gradient)`` when the gradient of ``tensor`` is computed; a returned tensor replaces it."""
        self.callback(tensor.register_hook(hook).remove)

    def every_forward(self, hook: Callable[..., Any]) -> None:
        """Call ``hook(module, args, kwargs, output)`` after the forward of every module of the process."""
        handle = modules.register_module_forward_hook(hook, with_kwargs=True)
        # torch keeps the second entry when the hook is removed, and compiled models would always warn of hooks
        self._holds(handle, modules._global_forward_hooks, modules._global_forward_hooks_with_kwargs)

    def every_forward_pre(self, hook: Callable[..., Any]) -> None:
        """Call ``hook(module, args)`` before the forward of every module of the process."""
        self._holds(modules.register_module_forward_pre_hook(hook), modules._global_forward_pre_hooks)

    def every_step_pre(self, hook: Callable[..., Any]) -> None:
        """Call ``hook(optimizer, args, kwargs)`` before each step of every optimizer of the process."""
        self._holds(register_optimizer_step_pre_hook(hook), optimizers._global_optimizer_pre_hooks)

    def every_step_post(self, hook: Callable[..., Any]) -> None:
        """Call ``hook(optimizer, args, kwargs)`` after each step of every optimizer of the process."""
        self._holds(register_optimizer_step_post_hook(hook), optimizers._global_optimizer_post_hooks)

    def _holds(self, handle: Any, *tables: Any) -> None:
        entries = [(table, handle.id, table[handle.id]) for table in tables]
        self._entries += entries
        for table, key, _ in entries:
            self.callback(table.pop, key, None)

    def hide(self) -> None:
        """Take the hooks of every module and optimizer out of torch's tables, until `show`."""
        for table, key, _ in self._entries:
            table.pop(key, None)

    def show(self) -> None:
        """Put back what `hide` took out."""
        for table, key, value in self._entries:
            table[key] = value

    def close(self) -> None:
        super().close()
        self._entries.clear()


def hook_tensor(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Call ``hook(gradient)`` as `HookHandles.tensor` does, for as long as the tensor lives.

    A training loop makes thousands of such tensors, and each dies with its graph: the hook itself must check whether
    its ``with`` block is still open.
    """
    tensor.register_hook(hook)


def check_hookable(model: nn.Module, named: Iterable[tuple[str, nn.Module]] | None = None) -> None:
    """Raise a ModelError for scripted, traced and compiled models: hooks fail on them or, worse, never fire."""
    for name, module in model.named_modules() if named is None else named:
        compiled = "_orig_mod" in module._modules
        if not compiled and module._compiled_call_impl is None and not isinstance(module, torch.jit.ScriptModule):
            continue
        where = f"'{name}' is" if name else "the model is"
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(f"{where} scripted or traced: hooks do not fire in it", do="pass the eager model")
        do = "pass the model inside, `compiled._orig_mod`" if compiled else "look into it before `.compile()`"
        raise ModelError(f"{where} compiled by torch.compile: hooks added now may never fire", do=do)


@contextmanager
def other_hooks_set_aside(model: nn.Module) -> Iterator[None]:
    """Run the block without hooks on ``model`` but those that are part of it, then put every hook back.

    Part of a layer are hooks from torch (pruning) and from the installed library that defines its class (transformers).
    """
    modules = list(model.modules())
    tables_of = [(module, {table: getattr(module, table) for table in _HOOK_TABLES}) for module in modules]
    try:
        for module in modules:
            for table in _HOOK_TABLES:
                hooks = getattr(module, table).items()
                setattr(module, table, OrderedDict((key, hook) for key, hook in hooks if _is_part_of(module, hook)))
        yield
    finally:
        for module, tables in tables_of:
            for table, hooks in tables.items():
                setattr(module, table, hooks)


def _is_part_of(module: nn.Module, hook: Any) -> bool:
    library = str(hook.__module__).partition(".")[0]
    if library == "torch":
        return True
    where = str(getattr(sys.modules.get(library), "__file__", ""))
    return library == type(module).__module__.partition(".")[0] and bool(
        {"site-packages", "dist-packages"} & {*PurePath(where).parts}
    )
