"""The model of a command: loaded with its notes and its download told on standard error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hookscope.cli import process
from hookscope.cli.output import rows as output
from hookscope.cli.progress import download_progress

if TYPE_CHECKING:
    from hookscope.models import LoadedModel


def load_net(
    model: str,
    weights: str,
    seed: int,
    device: str = "cpu",
    preprocess: str = "weights",
    input_size: tuple[int, int] | None = None,
) -> LoadedModel:
    """What `load_model` makes of these options; a misspelt name is told before torch is imported."""
    from hookscope.models import WeightsChoice, find_source

    find_source(model)
    choice = WeightsChoice.parse(weights)
    process.import_torch()
    from hookscope.models import load_model

    with process.prints_to_standard_error(), download_progress() as progress:
        net = load_model(model, choice, seed, device, preprocess=preprocess, input_size=input_size, progress=progress)
    for text in net.notes:
        output.note(f"Note: {text}")
    return net
