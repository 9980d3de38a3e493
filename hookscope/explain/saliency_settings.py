"""Settings of the saliency methods. Needs no torch: the command line shows the defaults."""

from __future__ import annotations

from dataclasses import dataclass

from hookscope.errors import UsageError, check_whole


@dataclass(frozen=True)
class SaliencySettings:
    """Settings of the methods that run the model on many images.

    Attributes:
        samples: Noisy images of SmoothGrad, masks of RISE; None for 25 and 1,000.
        noise: Standard deviation of the noise, as a share of the image's range of values.
        steps: Points of Integrated Gradients between the baseline and the image.
        most_steps: Points up to which they are doubled while the shares miss the score by more than 5 %.
        batch_size: Images in one pass.
        seed: Seed of the noise and the masks.
        window: Side in pixels of the square that occlusion hides, and of a cell of RISE's masks; None for an eighth of
            the shorter side.
        stride: Distance of the windows of occlusion in pixels, at most ``window``; None for half of it.
        layer: The layer of guided-gradcam, see `Selection`; None for the default of `class_activation_maps`.

    Raises:
        UsageError: for a count below 1, negative or infinite noise, and a stride above the window.
    """

    samples: int | None = None
    noise: float = 0.15
    steps: int = 50
    most_steps: int = 800
    batch_size: int = 10
    seed: int = 0
    window: int | None = None
    stride: int | None = None
    layer: str | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "steps", "most_steps", "batch_size", "window", "stride"):
            check_whole(name.replace("_", " "), getattr(self, name), optional=True)
        if not 0 <= self.noise < float("inf"):
            raise UsageError(f"noise {self.noise:g}", do="give a number from 0, as a share of the range of values")
        if self.window is not None and (self.stride or 1) > self.window:
            asked = f"a stride of {self.stride} pixels for windows of {self.window}"
            raise UsageError(asked, do="give a stride up to the window, so that each pixel is hidden")
