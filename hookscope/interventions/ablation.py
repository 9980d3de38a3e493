"""Channels ranked by the score that a class loses without each, in passes of many changed copies of one image."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.display import Cells, Picture, RowTuple, Shown
from hookscope.drawing import map_png
from hookscope.errors import NoMapError, UsageError, check_whole
from hookscope.findings import listed
from hookscope.hooks import (
    AnyModel,
    Call,
    Layers,
    Maps,
    Observer,
    Selection,
    Shape,
    channel_axis,
    enclosing,
    map_tensors,
    module_of,
    names_of,
    tensors_in,
)
from hookscope.interventions.ablation_sites import (
    AblationSite,
    Baseline,
    Fork,
    Passes,
    baseline,
    channel_maps,
    live_channels,
)
from hookscope.interventions.base import Intervention, Site
from hookscope.interventions.elementwise import Zero
from hookscope.models import takes_inputs
from hookscope.scores import (
    Prediction,
    Target,
    check_finite_score,
    class_label,
    class_scores,
    one_picture,
    predictions,
    probabilities,
)


def rounds(
    site: AblationSite, with_all: Baseline, batch_size: int | None, positions: Any = None
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield channels of ``site`` and the scores ``(len(channels), K)`` without each, until all channels are done.

    The image becomes a batch as late as the model allows: after the call itself, else before the nearest layer around
    it, else each channel has a pass of its own. Copies at the call alone would take 39 s, not 3 s, for a branch of
    googlenet's last block, whose outputs are concatenated. The layers before the call see one copy where the model
    allows it: 0.8 s, not 41 s, for a model that asks its input for the number of images. ``batch_size`` None means as
    many channels as fit well.
    """
    if site.silent:
        yield site.silent, with_all.scores.expand(len(site.silent), -1)
    left, forks, probed = list(site.live), [] if with_all.separate else list(site.forks), False
    while left:
        channels = left[: (batch_size or forks[0].batch_size) if forks else 1]
        # one copy beside the unchanged one would be no gain: it is checked against a pass of its own
        fork = forks[0] if forks and len(channels) > 1 else None
        copies = Copies(fork, [(site, Zero(channels=channel, positions=positions)) for channel in channels])
        if fork is None:
            yield channels, copies.scores(with_all.passes)
        elif (scores := _verified(copies, with_all)) is not None and (
            probed or _verified(Copies(fork, [(site, probe) for probe in _PROBES]), with_all, verified=0) is not None
        ):
            probed = True
            yield channels, scores
        else:
            del forks[0]
            probed = False
            continue
        del left[: len(channels)]


class Copies:
    """One pass with a batch of copies of the image from a fork on, where change ``i`` acts on copy ``i``.

    Changes are in the order in which their sites run. The last copy stays unchanged. Without a fork there is one image
    and one change.
    """

    def __init__(self, fork: Fork | None, changes: Sequence[tuple[AblationSite, Intervention]]) -> None:
        self._fork, self._changes = fork, changes
        self._at_first_site = fork is not None and fork.name == changes[0][0].call.name
        self._waiting = {site.call.key for site, _ in changes}
        self._sharing: set[str] = set()
        self._narrowed: set[str] = set()
        self.count = len(changes) + 1 if fork else 1

    @property
    def fits(self) -> bool:
        return not self._waiting

    def alone(self, copy: int) -> Copies:
        return Copies(None, [self._changes[copy]])

    def scores(self, passes: Passes) -> Tensor:
        sites = {site.call.name for site, _ in self._changes}
        if self._fork and self._fork.shared:
            self._sharing = set(_up_to(passes.model, self._fork.name, self._changes[0][0].call.name))
        names = sites | self._sharing | ({self._fork.name} if self._fork else set())
        before = self._before if self._fork and not self._at_first_site else None
        selection = Selection.of_names(sorted(names))
        return passes.scores(Observer(passes.model, selection, ("all",), self._after, on_before=before))

    def _before(self, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._fork is None:
            return None
        if call.name == self._fork.name:
            repeated = _expanded if self._fork.shared else _repeated
            return map_tensors((args, kwargs), partial(repeated, count=self.count))
        if call.name not in self._sharing or self._changes[0][0].call.key not in self._waiting:
            return None
        self._narrowed.add(call.key)
        return map_tensors((args, kwargs), partial(_narrowed, count=self.count))

    def _after(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        here = [at for at, (site, _) in enumerate(self._changes) if site.call.key == call.key]
        is_narrowed = call.key in self._narrowed
        if not here:
            return map_tensors(output, partial(_expanded, count=self.count)) if is_narrowed else None
        if (self._at_first_site or is_narrowed) and 0 in here:
            output = map_tensors(output, partial(_repeated, count=self.count))
        with_channels = tensors_in(output)[self._changes[here[0]][0].part]
        return map_tensors(output, lambda tensor: self._changed(tensor, here) if tensor is with_channels else tensor)

    def _changed(self, tensor: Tensor, here: Sequence[int]) -> Tensor:
        site = self._changes[here[0]][0]
        rows, *rest = site.shape
        if tuple(tensor.shape) != (rows * self.count, *rest):
            return tensor
        values = tensor.dequantize() if tensor.is_quantized else tensor.clone()
        # a layer that works on parts of the image has them on the first axis too: they must be in image order
        images = values.tensor_split(self.count)
        if _close(images[here[0]], images[-1]):
            self._waiting.discard(site.call.key)
        for at in here:
            self._changes[at][1].write_to(site.call, images[at], site.part, site.axis)
        if tensor.is_quantized:  # activations have one scale
            values = torch.quantize_per_tensor(values, tensor.q_scale(), tensor.q_zero_point(), tensor.dtype)
        return values


@dataclass(frozen=True)
class _Probe(Intervention):
    """Multiplies each channel by a factor of its own: a normalisation would undo a common factor."""

    factor: float = 1.0

    def change(self, site: Site, part: Tensor) -> Tensor:
        factors = torch.tensor([1.0, 0.25, -0.5], dtype=part.dtype, device=part.device) * self.factor
        sizes = [1] * part.dim()
        sizes[site.axis] = -1
        channels = part.shape[site.axis]
        return part * factors.repeat(channels // 3 + 1)[:channels].reshape(sizes)


_PROBES = [_Probe(factor) for factor in (2.0**-4, 2.0**10, -(2.0**10))]


def _verified(
    copies: Copies, with_all: Baseline, verified: int | None = None, used: Callable[[Tensor], Any] | None = None
) -> Tensor | None:
    """The scores of each changed copy; None where the model does not treat the copies as it treats one image.

    Two copies are verified. The unchanged one must have the baseline's scores. The changed one ``verified``, by
    default the one that moved most, must have the scores of a pass on its own: operations on the whole batch, such as
    the range of a quantization, can pass the first test only. Scores that are not ``used`` need no such pass.
    """
    try:
        scores = copies.scores(with_all.passes)
        if not copies.fits or scores.shape != (copies.count, with_all.scores.shape[1]):
            return None
        if not _close(scores[-1], with_all.scores[0]):
            return None
        if used and not used(scores[:-1]):
            return scores[:-1]
        if verified is None:
            verified = int((scores[:-1] - scores[-1]).float().nan_to_num().abs().amax(1).argmax())
        alone = copies.alone(verified).scores(with_all.passes)
    except Exception:  # models raise anything for a batch of another size
        return None
    return scores[:-1] if _close(scores[verified], alone[0]) else None


def _repeated(tensor: Tensor, count: int) -> Tensor:
    return torch.cat([tensor] * count) if tensor.dim() else tensor


def _expanded(tensor: Tensor, count: int) -> Tensor:
    """As `_repeated`, without memory of its own: nothing can be written into it."""
    return tensor.expand(count, *tensor.shape).flatten(0, 1) if tensor.dim() else tensor


def _narrowed(tensor: Tensor, count: int) -> Tensor:
    return tensor[: len(tensor) // count] if tensor.dim() and len(tensor) % count == 0 else tensor


def _up_to(model: nn.Module, fork: str, site: str) -> Iterator[str]:
    """The outermost layers inside ``fork`` that do not contain ``site``, and ``site`` itself."""
    around = set(enclosing(site)) - {site}
    for child, _ in model.get_submodule(fork).named_children():
        name = f"{fork}.{child}" if fork else child
        if name in around or isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict):
            yield from _up_to(model, name, site)
        else:
            yield name


def _close(values: Tensor, expected: Tensor) -> bool:
    dtype = values.dtype
    if dtype != torch.float64 and not values.is_complex():
        values, expected = values.float(), expected.float()
    # 32-bit products may have 10 bits of precision on a GPU
    rounding = 2.0**-10 if values.is_cuda and dtype == torch.float32 else torch.finfo(dtype).eps
    largest = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
    return torch.allclose(values, expected, rtol=0, atol=largest * rounding**0.65, equal_nan=True)


def scores_without(
    model: nn.Module,
    inputs: tuple[Any, ...],
    with_all: Tensor,
    channels: Sequence[tuple[Call, Shape, Sequence[int]]],
    used: Callable[[Tensor], Any],
    refused: set[str],
) -> Tensor:
    """The scores ``(n, K)`` with each of ``n`` groups of channels at 0: a call, the shape of its output, the channels.

    ``with_all`` are the scores ``(1, K)`` with all channels. The groups are in the order in which their calls run; one
    pass does them all where the model allows it. Where ``used`` is true of these scores, the group that changes most is
    verified on its own. ``refused`` keeps the layers before which the model allows no copies: a branch of a sum.
    """
    silent = partial(class_scores, what="")  # who has ``with_all`` was told what the scores are
    given = Baseline(Passes(model, inputs, read=silent), with_all, (), (), separate=False)
    changes: list[tuple[AblationSite, Intervention]] = []
    for call, shape, group in channels:
        parts = shape.items() if isinstance(shape, dict) else [("", shape or ())]
        part, sizes = next((part, sizes) for part, sizes in parts if len(sizes) > 1)
        axis = channel_axis(torch.empty(sizes, device="meta"), model.get_submodule(call.name))
        changes.append((AblationSite(call, part, sizes, axis, tuple(group), ()), Zero(channels=group)))
    first = channels[0][0].name
    if len(changes) > 1 and all(site.axis for site, _ in changes):  # without a batch axis there can be no copies
        for name in enclosing(first):
            # copies of the input of the whole model would cost as much as a pass for each channel
            is_list = isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict)
            if name and name not in refused and not is_list:
                scores = _verified(Copies(Fork(name, 0), changes), given, used=used)
                if scores is not None:
                    return scores
                refused.add(name)
    return torch.cat([Copies(None, [change]).scores(given.passes) for change in changes])


def channel_scores(
    model: nn.Module,
    inputs: tuple[Any, ...],
    call: Call,
    part: str,
    tensor: Tensor,
    axis: int,
    positions: Any = None,
    batch_size: int | None = None,
    on_channels: Callable[[int], None] = lambda count: None,
    read: Callable[[Any], Tensor] | None = None,
) -> Tensor:
    """The scores ``(C, K)`` with each channel at 0 in turn of ``tensor``, the ``part`` of what ``call`` returns.

    ``positions`` are those that are set to 0, None for all; ``on_channels`` gets the number of channels done; ``read``
    takes the scores from an output, see `Passes`.
    """
    with_all = baseline(Passes(model, inputs, read=read), Selection.of_names([call.name], call.call), ("all",))
    forks = with_all.sites[0].forks if with_all.sites else ()
    site = AblationSite(call, part, tuple(tensor.shape), axis, live_channels(tensor, axis), forks)
    scores: dict[int, Tensor] = {}
    for channels, of_channels in rounds(site, with_all, batch_size, positions):
        scores |= dict(zip(channels, of_channels, strict=True))
        on_channels(len(channels))
    return torch.stack([scores[channel] for channel in range(site.channels)])


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
        without = {"probability without": self.probability_after, "best class without": top}
        return {"layer": self.call.key, "channel": self.channel, "score_drop": self.score_drop} | without | picture


@dataclass(frozen=True, slots=True, repr=False)
class Ablation(Shown, rows="channels"):
    """Channels ranked by their worth.

    Attributes:
        prediction: The class and its score with all channels.
        channels: The channels of all chosen calls, the most worth first, then in order of execution; those with a
            NaN score last.
        skipped: Keys of calls without channels that a pattern, a range or ``all`` chose.
    """

    prediction: Prediction
    channels: RowTuple[ChannelWorth]
    skipped: tuple[str, ...]

    def _cells(self) -> Cells:
        return {**self.prediction._cells(), "channels": len(self.channels), "skipped": ", ".join(self.skipped)}


@takes_inputs
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
    one batch. This needs images of a batch that do not change each other. A first pass tests it with extreme copies,
    and each pass tests it again: the unchanged copy must have the scores of the image, and the most changed copy the
    scores that it has alone. Models that fail or draw random numbers, run once per channel. Channels that are 0
    everywhere are worth 0 without a pass.

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
    check_whole("batch size", batch_size, optional=True)
    asked.check(categories)
    passes = Passes(model, inputs, seed)
    with_all = baseline(passes, layers, types)
    [prediction] = predictions(one_picture(with_all.scores), categories, asked)
    check_finite_score(prediction)
    if not with_all.sites:
        without = f"the output of {listed(with_all.skipped, 3)} has no channels"
        raise NoMapError(without, do="choose a layer with (N, C, ...): ‹list_layers|list-layers› shows shapes")
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
    return Ablation(prediction, RowTuple(rows), with_all.skipped)


def _values(maps: Maps | None, channel: int) -> NDArray[np.float32] | None:
    if maps is None:
        return None
    still = maps.values[channel].unflatten(1, (maps.frames, -1)).mean(1)
    return np.asarray(still.float().cpu())


def _worths(
    call: Call, channels: Sequence[int], scores: Tensor, prediction: Prediction, categories: Sequence[str] | None
) -> Iterator[ChannelWorth]:
    shares = probabilities(scores)[:, prediction.index].tolist()
    after = scores.detach().cpu().double()
    tops = after.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).numpy().argmax(1).tolist()
    for channel, score, share, top in zip(channels, after[:, prediction.index].tolist(), shares, tops, strict=True):
        worth, label = prediction.score - score, class_label(top, categories)
        yield ChannelWorth(call, channel, prediction.score, score, worth, share, top, label)
