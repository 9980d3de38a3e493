"""Scales: how values become levels of a colour map, and how levels become values again. Each scale is a class here.

Help and completion list the scales, so the file imports neither torch nor numpy: call methods of tensors and arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hookscope.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Limit = float | Tensor

# A palette holds 256 colours: these are for values, the others for text, NaN, Inf, constant maps and a photograph. The
# number is odd: 0 has the middle colour of a scale that is symmetric about 0.
LEVELS = 193
TOP = LEVELS - 1
ALPHA = 0.85  # opacity of the largest |value| over a photograph, which help shows without torch


class Scale:
    """The base of all scales, linear between two limits.

    A new scale is a frozen dataclass that has `notation` and `limits`, and is listed in `SCALES`. If it is not linear,
    it also has `to_levels` and its inverse, `from_levels`. ``example`` is an instance for completion if `notation` has
    placeholders. All channels have the same limits if ``shared``. ``cmap`` is the default colour map.
    """

    notation: ClassVar[str]
    example: ClassVar[str] = ""
    shared: ClassVar[bool] = True
    cmap: ClassVar[str] = "viridis"

    @classmethod
    def parse(cls, text: str) -> Scale:
        """The scale that ``text`` denotes; ``str()`` of a scale gives such a text. UsageError for any other text."""
        for kind in SCALES:
            scale = kind.read(text)
            if scale is not None:
                return scale
        such_as = " or ".join(kind.example for kind in SCALES if kind.example)
        raise UsageError(f"no scale '{text}'", f"there are {scale_notations('and')}", f"such as {such_as}")

    @classmethod
    def read(cls, text: str) -> Scale | None:
        """The scale of this class that ``text`` denotes, or None."""
        return cls() if text == cls.notation else None

    def __str__(self) -> str:
        return self.notation

    @property
    def caption(self) -> str:
        """What a sheet says beside the colour bar."""
        return f"one scale for all maps ({self})"

    def limits(self, values: Tensor, lowest: Tensor, highest: Tensor) -> tuple[Limit, Limit]:
        """The values of the lowest and the highest level for ``values`` ``(C, H, W)``: two numbers, or two ``(C,)``.

        ``lowest`` and ``highest`` are the finite extremes of each channel ``(C,)``, inf and -inf if no value is finite.
        """
        raise NotImplementedError

    def to_levels(self, values: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Levels of ``values`` ``(C, H, W)`` as a new tensor of floats, 0 at ``low`` and ``TOP`` at ``high`` ``(C,)``.

        The caller rounds and clips the levels, and sets the levels of NaN and Inf.
        """
        spread = high - low
        # float32 is exact to a thousandth of a level unless the range is tiny, huge or far from zero
        plain = (spread > 1e-30) & (spread < 1e30) & (low.abs() < 1e30) & (low.abs() < spread * 64)
        if bool((plain | (spread == 0)).all()):
            levels = values.clone()
        else:  # in units of the larger limit: neither the smallest nor the largest doubles leave their range
            unit = low.abs().maximum(high.abs())
            unit = unit.where((unit > 0) & unit.isfinite(), 1.0)
            levels, low, high = values.double() / unit[:, None, None], low / unit, high / unit
            spread = high - low
        # where both limits are equal, the levels still separate the values above from the others
        factor = (TOP / spread).where(spread > 0, 1e30)
        return levels.sub_(low.to(levels.dtype)[:, None, None]).mul_(factor.to(levels.dtype)[:, None, None])

    def from_levels(self, levels: NDArray[Any], low: float, high: float) -> NDArray[np.float64]:
        """The values of ``levels`` 0 to ``TOP``, the inverse of `to_levels`."""
        share = levels / TOP
        return low * (1 - share) + high * share  # high - low may overflow


@dataclass(frozen=True)
class ChannelScale(Scale):
    """Each channel from its lowest to its highest value."""

    notation = "channel"
    shared = False
    caption = "each map has its own scale"

    def limits(self, values: Tensor, lowest: Tensor, highest: Tensor) -> tuple[Limit, Limit]:
        return lowest, highest


@dataclass(frozen=True)
class LayerScale(Scale):
    """All channels from the lowest to the highest value of the layer."""

    notation = "layer"
    caption = "one scale for all maps"

    def limits(self, values: Tensor, lowest: Tensor, highest: Tensor) -> tuple[Limit, Limit]:
        return _extremes(lowest, highest)


@dataclass(frozen=True)
class SymmetricScale(Scale):
    """All channels from ``-limit`` to ``limit``; None for the largest absolute value of the layer."""

    notation = "symmetric"
    cmap = "RdBu_r"

    limit: float | None = None
    caption = "one scale for all maps, symmetric about 0"

    def limits(self, values: Tensor, lowest: Tensor, highest: Tensor) -> tuple[Limit, Limit]:
        limit = max(map(abs, _extremes(lowest, highest))) if self.limit is None else self.limit
        return -limit, limit


@dataclass(frozen=True)
class PercentileScale(Scale):
    """All channels from one percentile of the layer's finite values to another."""

    notation = "percentile:LO,HI"
    example = "percentile:1,99"

    low: float
    high: float

    @classmethod
    def read(cls, text: str) -> Scale | None:
        word, _, rest = text.partition(":")
        limits = _numbers(rest.split(","))
        return cls(*limits) if word == "percentile" and limits and 0 <= limits[0] < limits[1] <= 100 else None

    @property
    def caption(self) -> str:
        return f"one scale for all maps, clipped at percentiles {self.low:g} and {self.high:g}"

    def limits(self, values: Tensor, lowest: Tensor, highest: Tensor) -> tuple[Limit, Limit]:
        import numpy as np

        finite = values[values.isfinite()].double().cpu().numpy()
        low, high = np.percentile(finite, (self.low, self.high), overwrite_input=True) if finite.size else (0.0, 0.0)
        return float(low), float(high)

    def __str__(self) -> str:
        return f"percentile:{self.low:.12g},{self.high:.12g}"


@dataclass(frozen=True)
class RangeScale(Scale):
    """All channels from ``low`` to ``high``."""

    notation = "LO:HI"
    example = "-1:1"

    low: float
    high: float

    def __post_init__(self) -> None:
        if not _increase(self.low, self.high):
            raise UsageError(f"no scale '{self}'", "LO and HI are finite, and LO is below HI")

    @classmethod
    def read(cls, text: str) -> Scale | None:
        limits = _numbers(text.split(":"))
        return cls(*limits) if limits else None

    def limits(self, values: Tensor, lowest: Tensor, highest: Tensor) -> tuple[Limit, Limit]:
        return self.low, self.high

    def __str__(self) -> str:
        return f"{self.low:.12g}:{self.high:.12g}"


SCALES: list[type[Scale]] = [ChannelScale, LayerScale, SymmetricScale, PercentileScale, RangeScale]


def scale_notations(word: str) -> str:
    """All notations in a list of words; ``word`` stands before the last one."""
    *first, last = (kind.notation for kind in SCALES)
    return f"{', '.join(first)} {word} {last}"


def scale_examples() -> list[str]:
    """A text for each scale, for completion."""
    return [kind.example or kind.notation for kind in SCALES]


def _extremes(lowest: Tensor, highest: Tensor) -> tuple[float, float]:
    low, high = float(lowest.min()), float(highest.max())
    return (low, high) if low <= high else (0.0, 0.0)


def _numbers(texts: list[str]) -> tuple[float, float] | None:
    try:
        low, high = map(float, texts)
    except ValueError:
        return None
    return (low, high) if _increase(low, high) else None


def _increase(low: float, high: float) -> bool:
    return math.isfinite(low) and math.isfinite(high) and low < high
