"""A run against a reference: the first call that left the range in which it was when all was well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hookscope.columns import Column, Columns
from hookscope.comparison.pairing import SeenCall, pair_calls
from hookscope.comparison.side import functions_of, is_layer_type
from hookscope.display import Cells, Shown, text_of
from hookscope.errors import InputError
from hookscope.findings import CATALOGUE, Finding, counted, default
from hookscope.hooks import CALL, MODEL, Call, Layers, enclosing, key_of
from hookscope.statistics import (
    ANSWERS,
    AS_IN_TRAINING,
    INPUT_CALL,
    NUMBERS,
    READ,
    BrokenLimit,
    CallRange,
    LimitsResult,
    SavedStatistics,
    as_reference,
    checked_layers,
)
from hookscope.system import StrPath

_LEFT, _CHANNEL, _MIXED, _VARIES, _SAME, _SURE, _OTHER = (
    default("left-range", name)
    for name in ("left", "left_channel", "left_mixed", "left_varies", "left_same", "sure", "weights")
)
_LEAST_IMAGES = 8  # of a reference: fewer do not say how far images differ
_FEW_IMAGES = 4  # fewer do not say how far they differ
_SKETCHED = 1.7  # times too far or too near two sketches may be: 96 of 100 are not
_FLOOR = 0.01  # of the standard deviation of a layer: rounding moves a constant channel that far
_MANY_IMAGES = 48  # of a reference: three for each mixture, so that the covariance is known
_LEAST_VARIANCE = 1e-3  # of the mean variance of the mixtures: rounding moves constant mixtures
_FEW_GONE = 0.2  # share of the calls of the reference
_FEW_ZEROS = 0.1  # share of a vector: one channel of few may be excited for the first time
_SCALED = 20.0  # an input that is so many times as large was scaled in another way
_RARE = 4.5  # standard deviations of chi squared: one in a thousand for eight classes
_LONE = 20.0  # one channel may move so many times as far as all: a constant one is rounded in small steps


@dataclass(frozen=True, slots=True, repr=False)
class CallShift(Shown):
    """How far a call is from the reference.

    Attributes:
        call: The call.
        reference: Key of the call in the reference.
        shift: Root mean square over channels of the distance of the means, in standard deviations of the values.
        times: How many times the distance exceeds what few images explain; above 1 the call has left its range.
        number: What has moved most, such as ``mean``; ``nonfinite``.
        channel: The channel that has moved most.
        dead: Channels that are constant, and were not in the reference.
        channels: Number of channels.
        part: ``input`` for what the call reads, where an operation made it.
        said: What has left the range, in words; empty for a number of the channels.
        same: Whether both sides have the same images.
    """

    call: Call
    reference: str
    shift: float
    times: float
    number: str
    channel: int = 0
    dead: tuple[int, ...] = ()
    channels: int = 1
    part: str = ""
    said: str = ""
    same: bool = False

    @property
    def key(self) -> str:
        return self.call.key or MODEL

    def _cells(self) -> Cells:
        return {"layer": self.key, "shift": self.shift, "times": self.times, "number": self.number}


SHIFTS = Columns(
    *CALL.but(type={"need": 1}),
    Column("reference", help="the call of the reference", where="rows"),
    Column("shift", help="of the means, in standard deviations of the reference, over all channels"),
    Column(
        "times",
        help="how many times what chance or, on the same images, rounding explains; above 1 it has left its range",
    ),
    Column("number", lambda shift: shift.number + " it reads" * (shift.part == READ), "what is furthest off", need=5),
    Column("channel", need=4),
    Column("dead", lambda shift: len(shift.dead), "channels that are dead, and were not in the reference", hide="zero"),
)
"""What is said of a call beside a reference, a `CallShift`."""


@dataclass(frozen=True, repr=False)
class AgainstReference(Shown):
    """What `against_reference` found.

    Attributes:
        calls: Every call that is in the reference too, in order of execution; the first is the input.
        finding: The verdict where a call has left its range, else None.
        sentence: The verdict.
        images, reference_images: Numbers of images.
    """

    calls: tuple[CallShift, ...]
    finding: Finding | None
    sentence: str
    images: int
    reference_images: int

    def _cells(self) -> Cells:
        return {"verdict": self.sentence, "calls": len(self.calls), "images": self.images}


def against_reference(now: SavedStatistics | StrPath, reference: SavedStatistics | StrPath) -> AgainstReference:
    """Compare each call with what it did when the reference was saved, and name the first that left its range.

    The range is how far the images of the reference differ from each other. A distance counts from how many times it
    exceeds what so few images explain, so a model on other images of the same kind stays in its range. On the same
    image files nothing is chance, so only rounding is allowed. The input is the first call: a cause before all layers.
    Calls pair by name, else as `compare` pairs them. Either side is statistics with ranges, or their file.

    Raises:
        InputError: The reference has fewer than eight images, or no call that this model has; a side has no ranges.
    """
    reference, now = as_reference(reference), as_reference(now)
    totals = reference.totals, now.totals
    before, after = ({key: x for key, x in of.ranges.items() if x.images == of.images} for of in totals)
    if (images := reference.totals.images) < _LEAST_IMAGES:
        asked = f"the reference has {counted(images, 'image')}, too few to know a range"
        raise InputError(asked, do=f"save it again with {_LEAST_IMAGES} images or more, better 50")
    pairs = {a.key: b for a, b in _pairs(before, after)}
    if all(b.call.name == INPUT_CALL for b in pairs.values()):
        raise InputError("the reference has no call that this model has", do="save a reference of this model")
    alike = [before[key].call.type == other.call.type for key, other in pairs.items()]
    is_typed = 2 * sum(alike) > len(alike)  # other runtimes have other types, and fold layers into others
    pictures = [sorted(each.pictures) for each in totals]
    same = pictures[0] == pictures[1] and len(pictures[0]) == images == now.totals.images
    shifts = [_shift(before[key], other, is_typed=is_typed, same=same) for key, other in pairs.items()]
    gone = [each for key, each in before.items() if key not in after and key not in pairs and not each.part]
    if not after.keys() <= before.keys():  # an exported file need not keep the names of blocks
        gone = [each for each in gone if each.parameters]
    if is_typed and 0 < len(gone) <= _FEW_GONE * len(before):  # of more the names are others
        rest = list(before)[list(before).index(gone[0].key) :]
        none = CallShift(gone[0].call, gone[0].key, np.inf, np.inf, "gone", said="it did not run")
        shifts.insert(next((at for at, shift in enumerate(shifts) if shift.reference in rest), len(shifts)), none)
    for held in _other_held(reference.totals.held, now.totals.held):  # before the first call in its layer or block
        starts = [f"{block}." if block else "" for block in enclosing(held.reference)]
        names = {at: f"{shift.call.name}." for at, shift in enumerate(shifts) if shift.call.name != INPUT_CALL}
        shifts.insert(next(at for start in starts for at in names if names[at].startswith(start)), held)
    lost = next((shift for shift in shifts if shift.number == "nonfinite"), None)
    answers = [] if lost else _answers(before.get(f"{MODEL} {ANSWERS}"), after.get(f"{MODEL} {ANSWERS}"))
    shifts += answers
    count, out = len({each.key for each in shifts}), [shift for shift in shifts if shift.times > 1]
    if not out:
        words = f"all {counted(count, 'call')} are in the range of the reference"
        words += f" ({counted(now.totals.images, 'image')} now, {'the same ' * same}{images} in the reference)"
        return AgainstReference(tuple(shifts), None, words, now.totals.images, images)
    said = [each for each in out if each.said and each.number not in ("settings", "shares")]
    calls = [each for each in out if each.number != "settings" or each.key != MODEL]  # where a setting acts is unknown
    by_chance = out[0].times < _SURE and not same  # few images may show a little
    first = said[0] if said and by_chance else [*calls, *out][0]
    at = len({shift.key for shift in shifts[: shifts.index(first)] if shift.times <= 1} - {first.key})
    at_first = out.index(first)
    old, new = (side.get(INPUT_CALL) for side in (before, after))
    if (
        old is not None
        and new is not None
        and (first is shifts[0] or (None not in old.shape and old.shape != new.shape))
    ):
        case, text = "input", _input_words(old, new, shifts[0])
        shifts[0] = first = replace(shifts[0], said=text)
        if reference.source.preprocess not in (now.source.preprocess, AS_IN_TRAINING):
            text += f" (now {now.source.preprocess}, in the reference {reference.source.preprocess})"
    else:
        with_weights = (each for each in shifts if each.reference in pairs and before[each.reference].parameters)
        case = "first" if next(with_weights, None) is first and INPUT_CALL in before else first.number
        text = f"{_words(first)}, and {counted(at, 'call')} before it {'is' if at == 1 else 'are'} in range"
    text += "".join(f"; of the model, {each.said}" for each in out if each not in calls and each is not first)
    text += f"; {lost.key} is the first with NaN or Inf" if lost and lost is not first else ""
    later = len({shift.key for shift in out[at_first:]} - {first.key})
    text += f"; {counted(later, 'later call')} left it too" if later else ""
    acts = first.number == "settings" and later  # what follows shows that the setting matters
    severity = "note" if max(each.times for each in out) < _SURE and not acts else CATALOGUE["left-range"].severity
    if answers and answers[0] in out:
        if not same and not said:
            far = [_shift(before[key], other, answers[0].shift).times for key, other in pairs.items()]
            severity = "note" if max(far) <= 1 else severity
        text += f"; {answers[0].said}" if first is not answers[0] else ""
    if severity == "note" and not same and pictures[0]:
        text += "; run it on the images of the reference, to rule out chance"
    numbers = {"times": first.times, "shift": first.shift, "channel": first.channel, "layers": later + 1}
    channels = (first.channel,) if first.channels > 1 else None
    layer = "" if case == "input" else first.key
    finding = CATALOGUE["left-range"].finding(layer, text, case, channels=channels, numbers=numbers, severity=severity)
    words = f"{layer or 'the input'} is the first of {counted(count, 'call')} to leave the range of the reference"
    return AgainstReference(tuple(shifts), finding, f"{words}: {text}", now.totals.images, images)


def _answers(before: CallRange | None, now: CallRange | None) -> list[CallShift]:
    """How many times the shares of the answers exceed chance; ``shift`` is how far they alone can move a mean.

    With other shares of images, any mean moves by the square root of their chi squared at most (Cauchy and Schwarz).
    """
    if before is None or now is None or before.channels != now.channels:
        return []
    old, new, images, away = before.mean[0], now.mean[0], before.images + now.images, now.mean[0] - before.mean[0]
    pooled = (before.m2[0] + now.m2[0] + away**2 * before.images * now.images / images) / images
    alone = np.where(before.m2[0] > 0, before.m2[0], 0.5) / before.images
    some = int((pooled > 0).sum())
    chi, explained = (
        (away**2 / np.maximum(each, 1e-30)).sum() * max(some - 1, 0) / max(some, 1) for each in (pooled, alone)
    )
    chance = (some - 1 + _RARE * max(2 * (some - 1), 1) ** 0.5) * (1 / before.images + 1 / now.images)
    most = int(np.abs(away).argmax())
    said = f"class {most} has {new[most]:.0%} of the answers, and {old[most]:.0%} in the reference"
    return [CallShift(now.call, before.key, explained**0.5, chi / chance, "shares", most, part=ANSWERS, said=said)]


def _other_held(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[CallShift]:
    """The weights that are others than in the reference, if most are the same, and the settings."""
    both: list[tuple[str, Any, Any]] = [
        (name, a, now[name]) for name, a in before.items() if type(now.get(name)) is type(a)
    ]
    away = {name: np.linalg.norm(b - a) / (np.linalg.norm(a) + 1e-30) for name, a, b in both if not isinstance(a, str)}
    far = {name: float(each) / _OTHER for name, each in away.items() if np.isfinite(each)}
    usual = float(np.median([*far.values(), 0.0]))
    for name, a, b in both:
        layer, _, own = name.rpartition(".")
        times, number = far.get(name, 0.0) if usual <= 1 else 0.0, "weights"
        low, high = times * _OTHER / _SKETCHED, times * _OTHER * _SKETCHED
        said = f"{f'its {own}' if layer else 'it'} differs from the reference by {low:.0%} to {high:.0%}"
        if isinstance(a, str) and a != b and own != "inplace":  # which changes no value
            times, number, said = 1.01, "settings", f"its {own} is {b}, and {a} in the reference"  # alone it is a note
        if times > 1 and (number == "settings" or times > 5 * usual):
            owner = layer or name * (number == "weights")
            yield CallShift(Call(owner, number, 0, None), layer, 0.0, times, number, said=said)


def _pairs(a: Mapping[str, CallRange], b: Mapping[str, CallRange]) -> Iterator[tuple[CallRange, CallRange]]:
    """The ranges of both that stand for the same call; the input first."""
    if INPUT_CALL in a and INPUT_CALL in b:
        yield a[INPUT_CALL], b[INPUT_CALL]
    of_a, of_b = ([x for x in side.values() if not x.part and x.call.name not in ("", INPUT_CALL)] for side in (a, b))
    if {each.key for each in of_a} == {each.key for each in of_b}:
        pairs = [(each, b[each.key]) for each in of_a]
    else:
        seen_a, seen_b = ([_seen(each) for each in side] for side in (of_a, of_b))
        pairs = [(a[pair.a.key], b[pair.b.key]) for pair in pair_calls(seen_a, seen_b).pairs]
    for one, two in pairs:
        if (read := key_of(one.call, READ)) in a and (other := key_of(two.call, READ)) in b:
            yield a[read], b[other]
        yield one, two
    last = [calls[-1].mean for calls in (of_a, of_b) if calls]
    if MODEL in a and MODEL in b and not (last and all(map(np.array_equal, last, (a[MODEL].mean, b[MODEL].mean)))):
        yield a[MODEL], b[MODEL]  # no other call returned that very tensor


def _seen(each: CallRange) -> SeenCall:
    return SeenCall(each.call, tuple(size or 0 for size in each.shape), each.parameters)


def _shift(
    before: CallRange, now: CallRange, explained: float = 0.0, is_typed: bool = False, same: bool = False
) -> CallShift:
    """How far ``now`` is, beyond ``explained`` deviations: each number of each channel against its spread of images.

    With the ``same`` images, the spread is the unit of a distance, and no excuse for it.
    """
    if before.channels != now.channels:
        said = f"it has {counted(now.channels, 'channel')}, and {before.channels} in the reference"
        return CallShift(now.call, before.key, np.inf, np.inf, "channels", 0, (), now.channels, now.part, said)
    known, finite = (np.isfinite(each.low) & np.isfinite(each.high) for each in (before, now))
    if known.all() and not finite.all():
        channel = int((~finite).argmax())
        said = f"channel {channel} has NaN or Inf, and not in the reference"
        return CallShift(now.call, before.key, np.inf, np.inf, "nonfinite", channel, (), now.channels, now.part, said)
    rows = slice(min(len(before.mean), len(now.mean)))
    variance, variance_now = (each.m2[rows] / max(each.images - 1, 1) for each in (before, now))
    inside = before.mean[1] if len(before.mean) > 1 and len(before.shape) > 2 else np.zeros(before.channels)
    deviation = np.sqrt(variance[0] + inside**2)
    unit = deviation if deviation.any() else before.mean[0]  # a call that is the same for every image has no spread
    least = max(_FLOOR * float(np.sqrt((unit**2).mean())), 1e-30)
    lone = (np.ptp(before.mean[rows], 1) == 0) & (before.channels > 1)  # a number of a whole vector
    zeros = lone[:, None] & (np.arange(len(lone)) == NUMBERS.index("grain"))[:, None]  # in place of the grain
    away = np.abs(now.mean[rows] - before.mean[rows])
    shift = float(np.sqrt((np.square(away[0] / np.maximum(deviation, least))).mean()))
    away = (away - explained * np.sqrt(variance)).clip(0)
    # a channel that few images excite has no variance yet: it is judged by the variance of its layer
    floor = variance.mean(1, keepdims=True) / now.images**2
    likely = np.maximum(np.maximum(variance_now, variance / 2 if now.images > 1 else variance), floor)
    floors = np.where(zeros, _FEW_ZEROS, least) ** 2
    far = away / np.sqrt(variance / before.images + likely / now.images + floors / 10)
    judged = [("", np.sqrt((far**2).mean(1)) / np.where(lone, _CHANNEL, _LEFT), far)]
    if same:
        far = np.where(zeros, 0.0, away) / np.sqrt(variance + floors * 25)  # values near 0 are rounded to it
        judged = [("", np.maximum(np.sqrt((far**2).mean(1)), far.max(1) / _LONE) / _SAME, far)]
    elif now.images >= _FEW_IMAGES:
        judged.append(("", far.max(1) / _CHANNEL, far))
        ratio = np.abs(np.log((variance_now + least**2) / (variance + least**2)))
        varies = ratio / np.sqrt(2 / (before.images - 1) + 2 / (now.images - 1))
        if not explained:
            judged.append((" between images", np.where(lone, 0.0, np.median(varies, 1) / _VARIES), varies))
        if before.images >= _MANY_IMAGES and (both := range(min(len(before.mixed), len(now.mixed)))):
            mixed = np.array([_off_directions(before, now, at, explained) / _MIXED for at in both])
            judged.append((" beside other channels", mixed, far))
    how, times, by_channel = max(judged, key=lambda each: float(each[1].max()))
    number = int(times.argmax())
    dead = (now.low == now.high) & (before.low < before.high) & (same | (far[0] > _CHANNEL))
    where = tuple(int(at) for at in np.flatnonzero(dead))
    most, name = int(by_channel[number].argmax()), f"{'zeros' if zeros[number] else NUMBERS[number]}{how}"
    types, most_times, said = (before.call.type, now.call.type), float(times.max()), ""
    of_torch = [is_layer_type(kind) for kind in types]
    is_told = all(of_torch) or (any(of_torch) and not same)  # a class of the user's may compute the same
    if is_typed and is_told and not before.part and functions_of(types[0]) != functions_of(types[1]):
        said = f"it is {types[1]}, and {types[0]} in the reference"
        most_times = max(most_times, _SURE if all(of_torch) else 1.01)
    return CallShift(now.call, before.key, shift, most_times, name, most, where, now.channels, now.part, said, same)


def _off_directions(before: CallRange, now: CallRange, at: int, explained: float) -> float:
    """How far mixtures of channels are off, by Hotelling's T², in standard errors of one mixture.

    Images differ in few directions: by brightness, channels rise and fall together. A change of a layer's weights
    leaves these directions, and is seen although each channel alone stays among the images.
    """
    covariance, away = before.mixed_m2[at] / (before.images - 1), (now.mixed - before.mixed)[at]
    least = max(_LEAST_VARIANCE, now.images**-2) * np.trace(covariance) / len(away) + 1e-30
    error = covariance * (1 / before.images + 1 / now.images) + least / now.images * np.eye(len(away))
    if explained:
        far = float(np.sqrt(away @ np.linalg.solve(covariance + least * np.eye(len(away)), away)))
        away = away * max(0.0, 1 - explained / max(far, 1e-30))
    return float(np.sqrt(away @ np.linalg.solve(error, away) / len(away)))


def _words(shift: CallShift) -> str:
    """What has left its range, and how far."""
    if shift.said:
        return shift.said
    name, _, how = shift.number.partition(" ")
    name = {"highest": "highest value", "zeros": "share of zeros"}.get(name, name)
    what = f"the variance between images of the {name}" if how == "between images" else f"the {name}"
    where = f", most in channel {shift.channel}" if shift.channels > 1 else ""
    reason = "rounding explains on the same images" if shift.same else "chance explains with so few images"
    by = f"{shift.times:.3g} times what {reason}"
    of = "what it reads" if shift.part else "its channels"
    if how.startswith("beside"):
        return f"{of.replace('what', 'the channels that')} do not vary together as in the reference, by {by}"
    return f"{what} of {of} differs from the reference by {by}{where}"


def _input_words(before: CallRange, now: CallRange, shift: CallShift) -> str:
    """What is other in the input: its size, the order of its colours, its scale, or something else."""
    if None not in before.shape and before.shape != now.shape:
        return f"the input is {text_of(now.shape)}, and {text_of(before.shape)} in the reference"
    turned = replace(now, mean=now.mean[:, ::-1], m2=now.m2[:, ::-1], mixed=now.mixed[:, ::-1])
    is_scaled = shift.same and _is_scaled(before, now)
    is_turned = _is_scaled(before, turned) if shift.same else _shift(before, turned).times <= 1 < shift.times
    if now.channels == 3 and is_turned and not is_scaled:
        return "the colours of the input are in reverse order, as in BGR"
    sizes = [float(each.mean[1].mean()) for each in (before, now)]
    if min(sizes) > 0 and max(sizes) > _SCALED * min(sizes):
        return f"the values of the input are {sizes[1] / sizes[0]:.3g} times as large as in the reference"
    if is_scaled:
        return "the images are the same, but prepared with another mean and std"
    return _words(shift).replace("its channels", "the input's channels")


def _is_scaled(before: CallRange, now: CallRange) -> bool:
    """Whether each channel is the one before times a factor, plus a number: the four numbers say both twice."""
    mean, spread = now.mean[0], now.mean[1]
    factor = spread / np.maximum(before.mean[1], 1e-30)
    expected = [mean + factor * (before.mean[2] - before.mean[0]), factor * before.mean[3]]
    return bool(np.all(np.abs(now.mean[2:] - expected) <= _FLOOR * spread))


def check_shifts(
    found: AgainstReference, max_shift: float | None = None, max_dead_more: float | None = None, allow: Layers = ()
) -> LimitsResult:
    """The calls that are further from the reference than allowed, where so few images show it.

    Without a number, the first call that has left its range breaks the limit ``reference``; a note breaks none.
    """
    names = {"max-shift": max_shift, "max-dead-more": max_dead_more}
    limits = {name: value for name, value in names.items() if value is not None} or {"reference": 1.0}
    calls, is_sure = checked_layers(found.calls, allow), found.finding is not None and found.finding.severity != "note"
    result = LimitsResult({name: {each.key: each.call.type for each in calls} for name in limits})
    for name, allowed in limits.items():
        for each in calls:
            more = len(each.dead) / each.channels
            value = {"max-shift": each.shift, "max-dead-more": more, "reference": each.times}[name]
            is_claimed = name == "max-dead-more" or (each.times > 1 and (name == "max-shift" or is_sure))
            if value > allowed and is_claimed:
                of = "what it reads" if each.part == READ else "its channels"
                text = _words(each)
                if name == "max-dead-more":
                    dead = f"{len(each.dead)} of {counted(each.channels, 'channel')}"
                    text = f"{dead} are dead, and were not in the reference"
                elif name == "max-shift" and np.isfinite(each.shift):
                    text = f"the means of {of} are {each.shift:.3g} standard deviations off"
                channels = each.dead if name == "max-dead-more" else (each.channel,)
                result.broken.append(BrokenLimit.at(each.call, name, each.key, "", value, allowed, text, channels))
                if name == "reference":  # the calls after it follow from it
                    break
    return result
