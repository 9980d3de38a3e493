"""The state of accumulators as dictionaries, to save and to restore them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

import numpy as np


class Accumulator:
    """A dataclass of arrays, numbers and other accumulators."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of all fields, which later updates do not change."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {
            name: value.state_dict() if isinstance(value, Accumulator) else _copy(value)
            for name, value in values.items()
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `state_dict` returned."""
        return cls(**{name: _copy(value) for name, value in state.items()})


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value
