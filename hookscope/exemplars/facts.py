"""The exemplars of each channel: images, places, values, and the part of an image that a unit sees."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.geometry import Box, ReceptiveField
from hookscope.hooks import Call


@dataclass(frozen=True, slots=True)
class Exemplar:
    """An image that excites a channel, and where.

    Attributes:
        value: The largest, mean or largest absolute activation of the channel on the image.
        position: Position of the image in the list.
        name: Its path.
        sha256: Hexadecimal SHA-256 of its file.
        label: The name of its folder if that is a label, else empty.
        place: Row and column of the unit with that value, or of the largest value for a mean; frames of a clip are side
            by side. None where the output has no places.
        box: What the unit sees of the network's input.
        size: Height and width of the network's input.
    """

    value: float
    position: int
    name: str
    sha256: str = ""
    label: str = ""
    place: tuple[int, int] | None = None
    box: Box = (0, 0, 0, 0)
    size: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class SynthesizedImage:
    """An image made from a seed to excite a channel, at the size of the network's input.

    Its value is measured as for an exemplar; ``best`` is the value of the best exemplar, None without exemplars.
    """

    image: Image.Image
    value: float
    best: float | None
    seed: int

    @property
    def is_enough(self) -> bool:
        """Whether the value is above the best exemplar's, or there is none."""
        return self.best is None or self.value > self.best


@dataclass(frozen=True, slots=True, eq=False)
class ChannelExemplars:
    """What one channel reacts to.

    Attributes:
        most: The images that excite it most, the strongest first; near-duplicates of one image count once.
        least: Those that excite it least, the weakest first; empty unless they were wanted.
        counts: Histogram of the channel's values, one for each image, in equal intervals.
        edges: ``(len(counts) + 1,)`` ends of these intervals.
        classes: How many of ``most`` have each label, the most frequent first; empty without labels.
        selectivity: ``(best − others) / (best + others)`` of the mean value of the images of the best class and the
            mean of all other classes, from 0 to 1 (arXiv:1803.06959); None without labels, or for negative means.
        best_class: The label of that class.
        nonfinite: Number of images that are left out, because the channel's value on them is NaN or Inf.
        synthesized: Images made to excite it.
        unreached: Whether such images were wanted, and no gradient reaches the channel.
    """

    channel: int
    most: tuple[Exemplar, ...]
    least: tuple[Exemplar, ...] = ()
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    edges: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    classes: tuple[tuple[str, int], ...] = ()
    selectivity: float | None = None
    best_class: str = ""
    nonfinite: int = 0
    synthesized: tuple[SynthesizedImage, ...] = ()
    unreached: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LayerExemplars:
    """The exemplars of the channels of one call.

    Attributes:
        call: The call.
        part: Name of the tensor if the output has several, else empty.
        measure: ``max``, ``mean`` or ``abs``: how an image excites a channel.
        images: Number of images that were seen.
        field: What a unit of the layer sees.
        channels: The chosen channels.
    """

    call: Call
    part: str
    measure: str
    images: int
    field: ReceptiveField
    channels: tuple[ChannelExemplars, ...]

    @property
    def key(self) -> str:
        return f"{self.call.key} {self.part}" if self.part else self.call.key
