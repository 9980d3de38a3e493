"""Keep ``torch.compile`` from warning of hooks that a script knows nothing of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.modules import module as modules

from hookscope.training.replaced import Replaced

_TABLES = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)


class QuietCompile:
    """Has compiled models see no global hooks where there are none but ``ours``, while it is `on`.

    They ask only to warn, at each call, that such hooks fire once more for the compiled model; the watcher expects
    that. A filter of warnings would not do: a script that makes errors of warnings puts its own before it.

    Args:
        ours: The hooks to pass over.

    Example:
        >>> import torch
        >>> from hookscope.hooks.registration import Door
        >>> modules, hook = torch.nn.modules.module, lambda module, args: None
        >>> quiet = QuietCompile((hook,))
        >>> with Door() as door:
        ...     door.every_forward_pre(hook)
        ...     bool(modules._has_any_global_hook()); quiet.on(); bool(modules._has_any_global_hook())
        True
        False
        >>> quiet.off()
    """

    def __init__(self, ours: tuple[Callable[..., Any], ...]) -> None:
        self._ours = ours
        self._replaced: Replaced | None = None

    def on(self) -> None:
        """Be quiet from now on; the hooks are registered already."""
        if self._replaced is None and hasattr(modules, "_has_any_global_hook"):
            self._replaced = Replaced(modules, "_has_any_global_hook", self._has_any)
            self._replaced.on()

    def off(self) -> None:
        """Put back what was there; the hooks are removed already."""
        if self._replaced is not None:
            self._replaced.off()
        self._replaced = None

    def _has_any(self, original: Callable[[], Any]) -> bool:
        found = [hook for table in _TABLES for hook in getattr(modules, table, {}).values()]
        return not all(map(self._is_ours, found))

    def _is_ours(self, hook: Any) -> bool:
        return any(hook is each for each in self._ours)
