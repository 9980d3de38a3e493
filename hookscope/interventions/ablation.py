"""What each channel is worth: the score of a class with one channel after the other set to 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hookscope.errors import InputError, NoMapError, UsageError
from hookscope.findings import listed
from hookscope.hooks import Call, Layers
from hookscope.interventions.ablation_passes import baseline, rounds
from hookscope.scores import Prediction, Target, one_picture, predictions, probabilities


@dataclass(frozen=True, slots=True)
class ChannelWorth:
    """One channel of one call, and what the score is without it.

    Attributes:
        call: The call that put it out.
        channel: Its number.
        score: The logit of the class with all channels.
        score_after: The logit with this one set to 0 at this call.
        worth: ``score - score_after``: above 0 where the channel speaks for the class.
        probability_after: The share of the class in the softmax then, 0 to 1.
        top_after: The class with the highest score then.
    """

    call: Call
    channel: int
    score: float
    score_after: float
    worth: float
    probability_after: float
    top_after: int


@dataclass(frozen=True, slots=True)
class Ablation:
    """Channels by what they are worth.

    Attributes:
        prediction: The class that was asked about, with all channels.
        channels: The channels of all chosen calls, the most worth first, then in order of execution; one without
            which the score is NaN is last.
        skipped: Calls that a pattern, a range or ``all`` chose and that have no channels, by key.
    """

    prediction: Prediction
    channels: tuple[ChannelWorth, ...]
    skipped: tuple[str, ...]


def ablate_each(
    model: nn.Module,
    inputs: Any,
    layers: Layers,
    target: Target | str | int = "top:1",
    *,
    types: Iterable[Any] = ("Conv2d",),
    categories: Sequence[str] | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Ablation:
    """Set the channels of chosen calls to 0 one by one, and rank them by the score of a class that each is worth.

    What a layer put out keeps its channels on the second axis or on the last, as its class tells; of several tensors
    the first with channels is meant. The model runs in the mode it is in, without gradients, with the same random
    numbers in each pass; nothing of it changes: modes, buffers, hooks, random state.

    Where the model allows it, layers before the chosen one run once for many channels, with copies of the picture in
    one batch. Whether it does is tried with copies far out of range, and checked in each pass: a copy with all its
    channels must have the scores of the picture, and of the copies without one that which moves most must have the
    scores that it has alone. A model that draws random numbers, or in which these tell that anything is calculated of
    the whole batch, has a pass for each channel. A channel that is 0 everywhere is worth 0 without a pass.

    Args:
        model: Any eager module with a score for each class.
        inputs: The picture ``(1, 3, H, W)``, or the tuple of positional inputs.
        layers: A selection, see `Selection`.
        target: A class index, a class name or ``top:1``: one class.
        types: Class names that indices in ``layers`` count.
        categories: Names of the classes.
        batch_size: Channels in one pass; None for as many as fit well, 8 to 256.
        seed: Seed of the random numbers in each pass; None goes on from where the random state is.
        on_progress: Called with channels done and in all.

    Raises:
        UsageError: a target of several classes, several pictures, or no batch size.
        TargetError: no such class.
        LayerError: no such layer, or one that does not run.
        NoMapError: a layer named outright that puts out no channels, or no call with any.
        ModelError: a model without scores of classes.
        InputError: a score that is not finite.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Flatten())
        >>> _ = torch.nn.init.constant_(net[0].weight, 2), torch.nn.init.zeros_(net[0].bias)
        >>> [(found.channel, found.worth) for found in ablate_each(net, torch.ones(1, 1, 1, 1), 0, target=1).channels]
        [(1, 2.0), (0, 0.0)]
    """
    wanted = Target.of(target)
    if wanted.count > 1:
        raise UsageError(f"'{wanted.text}' asks for several classes", "channels are ranked by one", "name one class")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"no batches of {batch_size}", do="give a batch size from 1")
    wanted.check(categories)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    seen = baseline(model, inputs, layers, types, seed)
    [prediction] = predictions(one_picture(seen.scores), categories, wanted)
    if not math.isfinite(prediction.score):
        raise InputError(f"the score of class {prediction.index} is not finite", do="see gradients --detect-anomaly")
    if not seen.sites:
        asked = f"no channels in what {listed(seen.skipped, 3)} puts out"
        raise NoMapError(asked, do="choose a layer with a tensor (N, C, ...): list-layers shows shapes")
    found: list[ChannelWorth] = []
    done, total = 0, sum(site.channels for site in seen.sites)
    for site in seen.sites:
        of_site: list[ChannelWorth] = []
        for channels, scores in rounds(model, inputs, site, seen, batch_size):
            of_site += _worths(site.call, channels, scores, prediction)
            done += len(channels)
            if on_progress is not None:
                on_progress(done, total)
        found += sorted(of_site, key=lambda one: one.channel)
    found.sort(key=_place)  # those worth the same stay in order
    return Ablation(prediction, tuple(found), seen.skipped)


def _worths(call: Call, channels: Sequence[int], scores: Tensor, prediction: Prediction) -> Iterator[ChannelWorth]:
    """What each of ``channels`` is worth, from the scores ``(len(channels), K)`` without it."""
    shares = probabilities(scores)[:, prediction.index].tolist()
    after = scores.detach().cpu().double()
    tops = after.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).numpy().argmax(1).tolist()
    for channel, score, share, top in zip(channels, after[:, prediction.index].tolist(), shares, tops, strict=True):
        yield ChannelWorth(call, channel, prediction.score, score, prediction.score - score, share, top)


def _place(one: ChannelWorth) -> float:
    return math.inf if math.isnan(one.worth) else -one.worth
