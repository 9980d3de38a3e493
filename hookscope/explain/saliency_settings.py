"""Settings of the saliency methods. Needs no torch: the command line shows the defaults."""

from __future__ import annotations

from dataclasses import dataclass

from hookscope.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """Settings of the methods that run the model on many images.

    Attributes:
        samples: Noisy images of SmoothGrad.
        noise: Standard deviation of the noise, as a share of the image's range of values.
        steps: Points of Integrated Gradients between the baseline and the image.
        most_steps: Points up to which they are doubled while the shares miss the score by more than 5 %.
        batch_size: Images in one pass.
        seed: Seed of the noise.

    Raises:
        UsageError: for less than one sample, step or image in a pass, and for negative or infinite noise.
    """

    samples: int = 25
    noise: float = 0.15
    steps: int = 50
    most_steps: int = 800
    batch_size: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "steps", "most_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', ' ')} {getattr(self, name)}", do="give a number from 1")
        if not 0 <= self.noise < float("inf"):
            raise UsageError(f"noise {self.noise:g}", do="give a number from 0, as a share of the range of values")
