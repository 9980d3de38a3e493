"""The figure of an ablation: bars of the worths, what stands beside them, and the kept maps over the photograph."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from hookscope.drawing import Colour
from hookscope.errors import UsageError
from hookscope.hooks.calls import Call
from hookscope.interventions.ablation import Ablation, ChannelWorth, ablate_each
from hookscope.interventions.figure import draw_ablation
from hookscope.scores.logits import Prediction
from tests.explain.pages import net, picture

STAR = Prediction(7, "star", 5.0, 0.9)


def channel(number: int, worth: float, values: Any = None, best: tuple[int, str | None] = (7, "star")) -> ChannelWorth:
    kept = None if values is None else np.asarray(values, np.float32)
    call = Call("features.3", "Conv2d", 0, 3)
    return ChannelWorth(call, number, 5.0, 5.0 - worth, worth, 0.5, *best, kept)


def ablation(*channels: ChannelWorth) -> Ablation:
    return Ablation(STAR, channels, ())


def texts(figure: Figure) -> dict[str, Any]:
    """Every text of the page, with its colour."""
    axes = [text for axes in figure.axes for text in axes.texts]
    return {text.get_text().strip(): text.get_color() for text in [*figure.texts, *axes]}


def bars(figure: Figure) -> list[tuple[float, float]]:
    """Row and length of every bar, colour after colour."""
    ends = [path.vertices for group in figure.axes[0].collections for path in group.get_paths()]
    return [(round(float(at[:, 1].mean())), float(at[np.abs(at[:, 0]).argmax(), 0])) for at in ends]


def test_bars_are_the_worths_in_their_order_with_labels_and_the_class_that_wins() -> None:
    found = ablation(channel(26, 1.5, best=(9, "triangle")), channel(3, 0.25), channel(4, -0.5), channel(5, math.nan))
    figure = draw_ablation(found, picture(), net("best.pth"))
    assert bars(figure) == [(0, 1.5), (1, 0.25), (2, -0.5)]
    said = texts(figure)
    assert {"features.3 26", "0.25", "-0.5", "NaN", "score lost"} <= set(said)
    assert said["1.5   then best: triangle"] == Colour.ALARM and said["0.25"] == Colour.INK
    low, high = figure.axes[0].get_xlim()
    assert low < -0.5 and high > 1.5 and figure.axes[0].get_ylim() == (3.5, -0.5)


def test_the_page_names_class_model_image_and_preprocessing_and_random_weights_in_red() -> None:
    said = texts(draw_ablation(ablation(channel(1, 1.0)), picture(), net("best.pth")))
    assert "Score of star (7) that is lost when a channel is set to 0" in said
    assert f"resnet34, weights: best.pth, cat.jpg, preprocessing: {net().preprocess.describe()}" in " ".join(said)
    assert "score with all channels 5, probability 90 %; 1 of 1 channel, those worth most first" in said
    said = texts(draw_ablation(ablation(channel(1, 1.0)), picture(), net("random (seed 0)")))
    assert said["weights: random (seed 0), the network is not trained"] == Colour.ALARM
    assert len(draw_ablation(ablation(channel(1, 1.0))).axes) == 2  # bars and their numbers alone


def test_maps_stand_after_the_photograph_on_scales_of_their_own() -> None:
    hot, cold = np.zeros((3, 4)), np.zeros((3, 4))
    hot[0, 0], cold[2, 3] = 8, -2
    whole = nn.Identity()
    figure = draw_ablation(
        ablation(channel(1, 1.0, hot), channel(2, 0.5), channel(3, 0.25, cold)), picture().image, whole
    )
    _, _, photograph, first, second = (axes.images[0].get_array() if axes.images else None for axes in figure.axes)
    assert tuple(photograph[120, 160]) == (200, 10, 10)
    assert first[0, 0, 0] > first[0, 0, 2] + 50 and second[-1, -1, 2] > second[-1, -1, 0] + 50  # red and blue
    assert np.ptp(first[-1, -1]) == 0  # 0 is transparent over grey
    assert {"photograph", "features.3 1", "-8 (blue) to 8 (red)", "-2 (blue) to 2 (red)"} <= set(texts(figure))
    said = set(texts(draw_ablation(ablation(channel(1, 1.0, hot)), picture().image, whole)))
    assert "0 to 8" in said


def test_there_are_as_many_bars_as_asked_for_at_most_a_hundred() -> None:
    many = ablation(*(channel(at, 1.0) for at in range(150)))
    assert [len(bars(draw_ablation(many, top=top))) for top in (7, 150)] == [7, 100]
    with pytest.raises(UsageError, match="0 bars; give a number from 1"):
        draw_ablation(many, top=0)


def test_the_kept_maps_are_the_activations_of_the_best_channels_of_each_layer() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model, x = nn.Sequential(*layers, nn.Linear(5, 3)).eval(), torch.randn(1, 3, 9, 12)
    found = ablate_each(model, x, ["0", "2", "5"], types=("all",), keep=9)
    with torch.no_grad():
        judge = {"0": model[0](x), "2": model[:3](x), "5": model(x)}
    for at, row in enumerate(found.channels):
        values = judge[row.call.name][0, row.channel]
        if at < 9 and values.dim():
            assert row.values is not None and np.allclose(row.values, values, atol=1e-6)
        else:
            assert row.values is None
    assert {row.call.name for row in found.channels[:9] if row.values is not None} == {"0", "2"}
    assert ablate_each(model, x, ["0", "2", "5"], types=("all",)) == found  # maps do not count


def test_the_map_of_a_clip_is_the_mean_of_its_frames_and_tokens_are_folded() -> None:
    clip = nn.Sequential(nn.Conv3d(1, 2, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten())
    x = torch.randn(1, 1, 3, 4, 5)
    [best, _] = ablate_each(clip, x, "0", types=("all",), keep=1).channels
    assert best.values is not None
    assert np.allclose(best.values, clip[0](x)[0, best.channel].detach().mean(0), atol=1e-6)


def test_class_names_are_facts() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    nn.init.constant_(model[0].weight, 1.0)
    first, second = ablate_each(model, torch.ones(1, 1, 2, 2), 0, 0, categories=["cat", "dog"]).channels
    assert (first.channel, first.top_after, first.top_label) == (0, 1, "dog") and second.top_label == "cat"
