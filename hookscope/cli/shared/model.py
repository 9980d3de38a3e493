"""MODEL and the options that say how it is loaded, from the command line to a model that is ready."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hookscope import hooks, models
from hookscope.cli import process
from hookscope.cli.fields import Options, option
from hookscope.cli.output import formats as output
from hookscope.cli.progress import download_progress
from hookscope.cli.shared import options as shared
from hookscope.system import cache

if TYPE_CHECKING:
    pass


class ModelOptions(Options):
    """MODEL, ``--weights``, ``--seed``, ``--device`` and how pictures become inputs."""

    topic = "model"

    model: str = shared.model_argument()
    weights: str = option(
        "auto (trained weights if available, else random), default or a name such as IMAGENET1K_V2 (trained, or an"
        " error), none (random), or a checkpoint: a file or folder.",
        metavar="WEIGHTS",
        default="auto",
        shell_complete=shared.complete_weights,
    )
    seed: int = option("Seed of random weights.", metavar="N", type=shared.Seed(), default=0)
    device: str = shared.device_option()
    preprocess: Any = option(
        "How images become inputs: weights (as the weights or the model say), imagenet, half (mean and std 0.5),"
        " stretch, none (no resizing), or file.py:function (PIL image to tensor). More in docs/: weights and models.",
        metavar="HOW",
        default="weights",
        parse=lambda text: models.parse_preprocess(text),
        shell_complete=shared.complete_preprocess,
    )
    resize: tuple[Any, ...] | None = option(
        "How images get the input size. shorter: resize the shorter side, then crop the centre; shorter:256: resize"
        " it to 256, then crop; stretch: resize both sides; pad: resize the longer side and add a black border.",
        metavar="HOW",
        parse=lambda text: models.parse_resize(text),
        shell_complete=shared.complete_words(*models.RESIZE_WORDS),
    )
    mean: tuple[float, ...] | None = option(
        "Mean to subtract from the colours: one number, or one for each channel, such as 0.485,0.456,0.406.",
        metavar="NUMBERS",
        parse=lambda text: models.parse_numbers(text, "mean"),
    )
    std: tuple[float, ...] | None = option(
        "With --mean: standard deviation that divides the colours, one number or one for each channel.",
        metavar="NUMBERS",
        parse=lambda text: models.parse_numbers(text, "std"),
    )
    range: tuple[float, float] | None = option(
        "Range of the colours before --mean and --std: 0..1, -1..1 or 0..255. Without --mean: no mean and std.",
        metavar="LOW..HIGH",
        parse=lambda text: models.parse_range(text),
    )
    input_size: tuple[int, ...] | None = shared.size_option()

    def load(self, pictures: bool = True) -> models.LoadedModel:
        """Load the model, for ``pictures`` or other work; notes and the progress go to standard error."""
        source = models.find_source(self.model)  # an unknown name fails before torch is imported
        options = {field.name: getattr(self, field.name) for field in fields(ModelOptions)}
        options |= {"model": source, "weights": models.WeightsChoice.parse(self.weights)}
        with process.prints_to_standard_error(), download_progress() as progress:
            net = models.load_model(**options, progress=progress)
        for text in net.notes:
            if text != net.missing_weights:
                output.note(f"Note: {text}")
            elif _is_first_today(net.name):
                why = "the trained ones are missing; --weights default says why"
                output.note(f"Note: {net.name} has random weights: {why}")
        if pictures:
            note_assumption(net)
        return net


def note_assumption(net: models.LoadedModel) -> None:
    """Say what is assumed of how images become inputs, if the model leaves it open."""
    if net.preprocess.assumed:
        what, options = _TO_SAY[net.preprocess.assumed]
        assumed = f"does not state {what}: assumed {net.preprocess.assumption}"
        output.note(f"Note: {net.name} {assumed}; change it with {options}")


def _is_first_today(model: str) -> bool:
    """Whether no run of this day has asked this for ``model``; True if the cache cannot be written."""
    key, today = {"model": model}, time.strftime("%Y-%m-%d")
    if output.Output.now.quiet or cache.load("missing-weights", key) == today:
        return False
    cache.store("missing-weights", key, today)
    return True


_TO_SAY = {
    ("size", "values"): ("its preprocessing", "--preprocess, --mean, --std, --size"),
    ("size",): ("its input size", "--size, --resize"),
    ("values",): ("its mean and std", "--mean, --std, --range"),
}


@contextmanager
def running(net: models.LoadedModel, inputs: Any) -> Iterator[None]:
    """Run the model inside: what it prints goes to standard error, what it raises is an InputError."""
    with process.prints_to_standard_error(), models.model_errors_as_input_errors(net.name, inputs):
        yield


def check_choice(net: models.LoadedModel, types: Sequence[str], *selections: hooks.Selection | None) -> None:
    """Refuse a ``--type`` that no layer has; a note names each index that is the name of a layer too."""
    layers = net.model.named_modules()
    fits = (hooks.matches_type(hooks.class_names(layer), types, hooks.is_single(name, layer)) for name, layer in layers)
    if types and not any(fits):
        raise hooks.no_such_type(types, hooks.types_in(net.model))
    indices = {text: None for each in selections if each is not None for text in each.single_indices}
    if names := [text for text in indices if text in dict(net.model.named_modules())]:
        are = "is an index" if len(names) == 1 else "are indices"
        output.note(f"Note: {', '.join(names)} {are}; the layer named {names[0]} is name:{names[0]}")


def caption_of(net: models.LoadedModel, images: Sequence[Any] = ()) -> dict[str, Any]:
    """What the caption of a table says of the model, and of the images if all rows are about them."""
    caption = {"model": net.name, "weights": net.weights, "preprocess": net.preprocess.describe()}
    return caption | ({"image": ", ".join(image.name for image in images)} if images else {})
