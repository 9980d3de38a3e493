"""The state of accumulators as dictionaries, to save and to restore them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Self


class Accumulator:
    """A dataclass of arrays, numbers and other accumulators."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of all fields, which later updates do not change."""
        values = vars(self).items()
        return {
            name: value.state_dict() if isinstance(value, Accumulator) else deepcopy(value) for name, value in values
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Restore what `state_dict` returned."""
        return cls(**deepcopy(dict(state)))
