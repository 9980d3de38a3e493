"""Channels ranked by the score that a class loses when each is set to 0 in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookscope.display import Cells, Picture, Shown
from hookscope.drawing import map_png
from hookscope.errors import NoMapError, UsageError
from hookscope.findings import listed
from hookscope.hooks import AnyModel, Call, Layers, Maps, module_of, names_of
from hookscope.interventions.ablation_passes import rounds
from hookscope.interventions.ablation_sites import Passes, baseline, channel_maps
from hookscope.scores import (
    Prediction,
    Target,
    check_finite_score,
    class_label,
    one_picture,
    predictions,
    probabilities,
)


@dataclass(frozen=True, slots=True, repr=False)
class ChannelWorth(Shown):
    """The score of a class with and without one channel of one call.

    Attributes:
        call: The call.
        channel: Number of the channel.
        score: The logit of the class with all channels.
        score_after: The logit with this channel set to 0 at this call.
        score_drop: ``score - score_after``: above 0 where the channel raises the score.
        probability_after: The softmax probability of the class without the channel, 0 to 1.
        top_after: The class with the highest score without the channel.
        top_label: The name of that class, None if unknown.
        values: The map ``(h, w)`` of the channel with all channels, if it was kept; of a clip the mean over its frames.
    """

    call: Call
    channel: int
    score: float
    score_after: float
    score_drop: float
    probability_after: float
    top_after: int
    top_label: str | None = None
    values: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)

    def _cells(self) -> Cells:
        top = str(self.top_after) if self.top_label is None else self.top_label
        picture = {"picture": Picture(partial(map_png, self.values), "map")} if self.values is not None else {}
        worth = {
            "score_drop": self.score_drop,
            "probability without": self.probability_after,
            "best class without": top,
        }
        return {"layer": self.call.key, "channel": self.channel, **worth, **picture}


@dataclass(frozen=True, slots=True, repr=False)
class Ablation(Shown):
    """Channels ranked by their worth.

    Attributes:
        prediction: The class and its score with all channels.
        channels: The channels of all chosen calls, the most worth first, then in order of execution; those with a
            NaN score last.
        skipped: Keys of calls without channels that a pattern, a range or ``all`` chose.
    """

    prediction: Prediction
    channels: tuple[ChannelWorth, ...]
    skipped: tuple[str, ...]

    def _cells(self) -> Cells:
        return {**self.prediction.cells(), "channels": len(self.channels), "skipped": ", ".join(self.skipped)}

    def _rows(self) -> Sequence[ChannelWorth]:
        return self.channels


def ablate_each(
    model: AnyModel,
    inputs: Any,
    layers: Layers,
    target: Target | str | int = "top:1",
    *,
    types: Iterable[Any] | None = None,
    categories: Sequence[str] | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    keep: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Ablation:
    """Set each channel of the chosen calls to 0 in turn, and rank the channels by the score that a class loses.

    The class of a layer decides whether its channels are on the second or on the last axis; of several tensors the
    first with channels counts. The model runs in its current mode, without gradients, with the same random numbers in
    each pass. Its modes, buffers, hooks and the random state stay as they are.

    Where the model allows it, the layers before the chosen one run once for many channels, with copies of the image in
    one batch. Batch independence is probed once with out-of-range copies, and verified in each pass: the unchanged
    copy must have the scores of the image, and the most changed copy of a pass on its own. Models that fail or
    draw random numbers, run once per channel. Channels that are 0 everywhere are worth 0 without a pass.

    Args:
        model: Any eager module with a score for each class.
        inputs: The image ``(1, 3, H, W)``, or the tuple of positional inputs.
        layers: A selection, see `Selection`.
        target: One class: its index, its name or ``top:1``.
        types: Class names that indices in ``layers`` count; None for Conv2d (Conv3d in models of clips).
        categories: Names of the classes.
        batch_size: Channels in one pass; None for as many as fit well, 8 to 1,024.
        seed: Seed of the random numbers in each pass; None continues from the current random state.
        keep: Number of channels, the most worth first, whose maps are kept for `draw_ablation`, in one more pass.
        on_progress: Called with channels done and in all.

    Raises:
        UsageError: for several classes or images, and for a batch size below 1.
        TargetError: for an unknown class.
        LayerError: for a layer that does not exist or does not run.
        NoMapError: for a layer chosen by its exact name whose output has no channels, or if no call has any.
        ModelError: for a model without scores of classes.
        InputError: for a score that is not finite.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Flatten())
        >>> _ = torch.nn.init.constant_(net[0].weight, 2), torch.nn.init.zeros_(net[0].bias)
        >>> [(row.channel, row.score_drop) for row in ablate_each(net, torch.ones(1, 1, 1, 1), 0, target=1).channels]
        [(1, 2.0), (0, 0.0)]
    """
    model, categories = module_of(model), names_of(model, categories)
    asked = Target.of(target)
    if asked.count > 1:
        raise UsageError(f"expected one class, got '{asked.text}'")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch size {batch_size}", do="give a batch size from 1")
    asked.check(categories)
    passes = Passes(model, inputs if isinstance(inputs, tuple) else (inputs,), seed)
    with_all = baseline(passes, layers, types)
    [prediction] = predictions(one_picture(with_all.scores), categories, asked)
    check_finite_score(prediction)
    if not with_all.sites:
        without = f"the output of {listed(with_all.skipped, 3)} has no channels"
        raise NoMapError(without, do="choose a layer with a tensor (N, C, ...): list-layers shows shapes")
    rows: list[ChannelWorth] = []
    total = sum(site.channels for site in with_all.sites)
    for site in with_all.sites:
        first = len(rows)
        for channels, scores in rounds(site, with_all, batch_size):
            rows += _worths(site.call, channels, scores, prediction, categories)
            if on_progress is not None:
                on_progress(len(rows), total)
        rows[first:] = sorted(rows[first:], key=lambda row: row.channel)
    rows.sort(key=lambda row: math.inf if math.isnan(row.score_drop) else -row.score_drop)  # stable
    if keep:
        sites = [site for site in with_all.sites if any(row.call == site.call for row in rows[:keep])]
        maps = channel_maps(passes, sites)
        rows[:keep] = [replace(row, values=_values(maps.get(row.call.key), row.channel)) for row in rows[:keep]]
    return Ablation(prediction, tuple(rows), with_all.skipped)


def _values(maps: Maps | None, channel: int) -> NDArray[np.float32] | None:
    if maps is None:
        return None
    still = maps.values[channel].unflatten(1, (maps.frames, -1)).mean(1)
    values: NDArray[np.float32] = still.float().cpu().numpy()
    return values


def _worths(
    call: Call, channels: Sequence[int], scores: Tensor, prediction: Prediction, categories: Sequence[str] | None
) -> Iterator[ChannelWorth]:
    shares = probabilities(scores)[:, prediction.index].tolist()
    after = scores.detach().cpu().double()
    tops = after.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).numpy().argmax(1).tolist()
    for channel, score, share, top in zip(channels, after[:, prediction.index].tolist(), shares, tops, strict=True):
        worth, label = prediction.score - score, class_label(top, categories)
        yield ChannelWorth(call, channel, prediction.score, score, worth, share, top, label)
