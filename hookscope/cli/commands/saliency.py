"""Show which pixels the score of a class depends on."""

from __future__ import annotations

from collections.abc import Iterator

from hookscope import explain
from hookscope.cli.fields import kept_rows, option
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.picture_run import ANSWER, FRAME, PEAK, ExplainCommand, Explanation
from hookscope.cli.shared.subject import running
from hookscope.columns import Column, Columns, Row
from hookscope.errors import UsageError

COLUMNS = Columns(
    *("image", "method"),
    *ANSWER,
    Column("shape", need=5),
    Column("sum", need=11),
    Column("expected", need=10, hide="unknown"),
    *PEAK,
    *("weights", "file"),
    Column("low_probability", hide="zero"),
    Column("steps", need=8, hide="unknown"),
    *FRAME,
)
_DEFAULTS = explain.SaliencySettings()


class Saliency(ExplainCommand):
    """Show which pixels of each IMAGE the score of a class depends on.

    \b
    Examples:
      hookscope saliency resnet34 cat.jpg --method smoothgrad
      hookscope saliency shapes samples/shapes/star.png
      hookscope saliency vgg16 cat.jpg --method guided-backprop --target tabby -o cat-guided.png
      hookscope saliency deeplabv3_resnet50 cat.jpg --target cat --region mask.png
      hookscope saliency resnet18 cat.jpg --method integrated-gradients --raw shares.npy --format json

    The command writes a PNG with three pictures: the image, the map over the grey image, and the same map smoothed.
    IMAGE is a file, a folder, a glob, or - for standard input.

    \b
    Methods, where S is the score and x the image:
      {table}

    Maps of gradient-input, integrated-gradients, lrp, occlusion and rise have signs: red raises the score, blue lowers
    it. The scale is clipped at the 99.5th percentile.

    A row for each map has the class, its score and probability, the sum of the signed values, and the highest value.
    peak_x and peak_y are the position of that value, if it is above 0, in pixels of the image; in a video model, of the
    mean over the frames.

    In a video model every frame of the clip (an animated GIF, PNG or WebP) stands beside its map, on one scale. A name
    that ends in .gif or .webp makes an animation.

    The sum of integrated-gradients should be the score minus the score of an image of zeros: the field expected. While
    the sum misses it by more than 5%, the command doubles the steps, and a note says so.

    --raw keeps the signed values (3, H, W), for each pixel of the model's input.
    """

    printed = COLUMNS
    table = kept_rows(
        "saliency", "explain", lambda: ((name, method.summary) for name, method in explain.SALIENCY_METHODS.items())
    )

    method: str = shared.method_option(table, "gradient", "What to compute.")
    samples: int | None = option("Noisy copies for smoothgrad, masks for rise.  [default: 25 copies, 1000 masks]")
    noise: float = option(
        "Noise of smoothgrad: standard deviation, as a share of the image's range.",
        metavar="SHARE",
        type=shared.FiniteRange(0),
        default=_DEFAULTS.noise,
    )
    steps: int = option("Steps of integrated-gradients: from zeros to the image.", default=_DEFAULTS.steps)
    most_steps: int = option(
        "Largest number of steps: --steps are doubled while they are too few.", default=_DEFAULTS.most_steps
    )
    blur: float | None = option(
        "Smooth the map: standard deviation of a Gaussian, in pixels of the model's input; 0: no smoothed map."
        "  [default: 1/64 of the shorter side]",
        metavar="PIXELS",
        type=shared.FiniteRange(0),
    )
    window: int | None = option(
        "Side of occlusion's square or rise's cells: in pixels of the model's input."
        "  [default: 1/8 of the shorter side]"
    )
    stride: int | None = option(
        "Step of occlusion's square: in pixels of the model's input.  [default: half of --window]"
    )
    layer: str | None = option(
        "Layer of guided-gradcam.  [default: the layer that cam takes]", metavar="LAYER", section="Layers"
    )
    batch_size: int = option(
        "Images in one forward pass, for methods that run several.", default=_DEFAULTS.batch_size, topic="images"
    )
    cmap: str | None = shared.colour_map_option(
        "Any matplotlib colour map: inferno, for methods with signs RdBu_r.  [default: by method]"
    )

    def explained(self, explanation: Explanation) -> Iterator[Row]:
        names = ("samples", "noise", "steps", "most_steps", "batch_size", "window", "stride", "layer")
        settings = explain.SaliencySettings(seed=self.model.seed, **self.given(*names))
        with running(explanation.net, explanation.inputs), pass_progress() as on_progress:
            maps = explain.saliency_maps(
                explanation.net,
                explanation.inputs,
                explanation.target(),
                self.method,
                categories=self.names,
                settings=settings,
                on_progress=on_progress,
            )
        for result in maps:
            explanation.note_unseen(result.prediction)
            page = explanation.clip(result, maps, self.cmap)
            if page is None:
                page = explain.draw_saliency(
                    result, explanation.image, explanation.net, scale_of=maps, cmap=self.cmap, smooth=self.blur
                )
            elif self.blur is not None:
                raise UsageError("--blur has no effect on a clip", "its maps are drawn frame by frame", "leave it out")
            path = explanation.write(page, self.method, result.prediction, len(maps) == 1)
            if not result.still.any():
                explanation.note(f"{result.prediction.name} does not depend on any pixel: the map is all zero")
            total = float(result.values.double().sum())
            for text in result.notes:
                explanation.note(text)
            if not result.incomplete and (result.steps or 0) > self.steps:
                explanation.note(
                    f"with {self.steps:,} steps the shares of {result.prediction.name} miss the score by more than 5 %;"
                    f" {result.steps:,} steps were taken"
                )
            self.arrays.keep(f"{explanation.word}/{result.prediction.key}", result.values.cpu().float().numpy())
            yield explanation.row(COLUMNS, result, path, sum=total)
