"""Limits on statistics, what is beyond them or was not measured, and the result as JUnit XML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar
from xml.etree import ElementTree

from hookscope.errors import printable
from hookscope.findings import counted, listed, nonfinite_words, percent
from hookscope.hooks import MODEL, OPERATION, Call, Layers, Selection, key_of
from hookscope.statistics.facts import LayerStatistics
from hookscope.statistics.totals import Coverage


class _HasCall(Protocol):
    @property
    def call(self) -> Call: ...


OfCall = TypeVar("OfCall", bound=_HasCall)


@dataclass(frozen=True)
class Limits:
    """Limits of every layer, None for no limit; ``min_rank_share`` is a share of `LayerStatistics.highest_rank`."""

    max_dead: float | None = None
    max_saturated: float | None = None
    no_nan: bool = False
    max_abs: float | None = None
    min_rank: float | None = None
    min_rank_share: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The limits that are set, with dashes."""
        names = [name for name, value in vars(self).items() if value is not None and value is not False]
        return tuple(dict.fromkeys(name.removesuffix("_share").replace("_", "-") for name in names))

    def allowed(self, limit: str, layer: LayerStatistics) -> float:
        """The number that ``limit`` allows for ``layer``."""
        if limit == "min-rank" and self.min_rank_share is not None:
            return self.min_rank_share * layer.highest_rank
        number: float = 0 if limit == "no-nan" else getattr(self, limit.replace("-", "_"))
        return number


@dataclass(frozen=True, slots=True)
class BrokenLimit:
    """A call beyond a limit such as ``max-dead``, or one that could not be checked against it.

    ``layer`` is the key of the call, with the ``part`` of an output of several tensors. ``evidence`` has the numbers in
    words, or the reason. ``value`` and ``allowed`` are None where nothing was measured, and ``layer`` is empty where no
    call of the model could be checked against the limit.
    """

    limit: str
    layer: str
    index: int | None
    value: float | None
    allowed: float | None
    evidence: str
    channels: tuple[int, ...] | None = None
    order: int | None = None
    part: str = ""

    @property
    def unmeasured(self) -> bool:
        return self.value is None

    @classmethod
    def at(
        cls, call: Call, limit: str, layer: str, part: str, value: float | None, allowed: float, evidence: str,
        channels: tuple[int, ...] | None = None,
    ) -> Self:  # fmt: skip
        """What ``call`` is beyond; without a value it could not be checked."""
        beyond = None if value is None else allowed
        return cls(limit, layer, call.index, value, beyond, evidence, channels, call.order, part)


@dataclass
class LimitsResult:
    """Which calls were checked against which limit.

    Attributes:
        checked: For each limit the types of the calls that were checked against it, by the key of the call.
        broken: What breaks a limit, in order of execution, then what was not measured.
        allowed: What was not measured, where that is allowed.
    """

    checked: dict[str, dict[str, str]]
    broken: list[BrokenLimit] = field(default_factory=list)
    allowed: list[BrokenLimit] = field(default_factory=list)

    def add(self, other: LimitsResult) -> None:
        """Add the result of other limits."""
        self.checked |= other.checked
        self.broken += other.broken

    @property
    def calls(self) -> set[str]:
        return {key for keys in self.checked.values() for key in keys}

    def verdict(self) -> str:
        """``all 5 calls are within the limits``, or what is wrong."""
        beyond = len({breach.layer for breach in self.broken if not breach.unmeasured})
        unknown = len({breach.layer for breach in self.broken if breach.unmeasured and breach.layer})
        words = [f"{beyond} {'breaks' if beyond == 1 else 'break'} a limit"] if beyond else []
        words += [f"{counted(unknown, 'layer')} could not be measured"] if unknown else []
        words += [f"none was checked against {breach.limit}" for breach in self.broken if not breach.layer]
        if words:
            return f"of {counted(len(self.calls), 'call')}, {'; '.join(words)}"
        few = ("no call is checked against a limit", "1 call is within the limits")
        count = len(self.calls)
        return few[count] if count < len(few) else f"all {counted(count, 'call')} are within the limits"

    def words(self) -> Iterator[str]:
        """A line for each limit: how many calls of which types were checked against it, and how many broke it."""
        unmeasured = [breach for breach in (*self.broken, *self.allowed) if breach.unmeasured and breach.layer]
        for limit, calls in self.checked.items():
            types = [f"{count:,} {name}" for name, count in Counter(calls.values()).most_common()]
            of_these = {
                "beyond the limit": sum(breach.limit == limit and not breach.unmeasured for breach in self.broken),
                "not measured": sum(breach.limit == limit for breach in unmeasured),
            }
            ends = "".join(f"; {count:,} {what}" for what, count in of_these.items() if count)
            yield f"{limit}: {counted(len(calls), 'call')}{f' ({listed(types, 6)})' if types else ''}{ends}"


@dataclass(frozen=True, slots=True)
class _Judgement:
    """Why a call is not within a limit, and its value, None where it is unknown.

    ``applies`` says whether the limit has a meaning for the call.
    """

    evidence: str
    value: float | None = None
    channels: tuple[int, ...] | None = None
    applies: bool = True


def checked_layers(layers: Sequence[OfCall], allow: Layers = ()) -> list[OfCall]:
    """The layers, or what is known of them, that ``allow`` does not select: limits apply to them.

    Raises:
        SelectionError: A term of ``allow`` cannot be read.
    """
    if allow in ((), [], ""):
        return list(layers)
    allowed, total = Selection.of(allow), sum(layer.call.index is not None for layer in layers)

    def is_allowed(call: Call) -> bool:
        module = call.name.rpartition(OPERATION)[0]  # operations of an allowed module are allowed with it
        wants = allowed.wants(call.name, call.call, call.index, total, call.order is not None)
        return wants or bool(module and allowed.wants(module, 0, None))

    return [layer for layer in layers if not is_allowed(layer.call)]


def check_limits(
    layers: Sequence[LayerStatistics],
    limits: Limits,
    coverage: Coverage,
    allow: Layers = (),
    *,
    every: bool = False,
    allow_unmeasured: bool = False,
) -> LimitsResult:
    """Check every call that ``allow`` does not select against ``limits``; what cannot be checked breaks them.

    ``every`` says that nobody chose the calls: a call is then checked against the limits that have a meaning for it,
    and a layer that did not run breaks them only if nothing used its parameters. ``allow_unmeasured`` allows what
    cannot be checked.

    Raises:
        SelectionError: A term of ``allow`` cannot be read.
    """
    result = LimitsResult({name: {} for name in limits.names})
    unmeasured = [
        BrokenLimit(limit, layer, None, None, None, why)
        for layer, why in _not_measured(coverage, allow, every)
        for limit in limits.names
    ]
    for layer in checked_layers(layers, allow):
        for limit in limits.names:
            if every and limit in ("max-dead", "min-rank") and layer.key not in coverage.with_channels:
                continue
            allowed = limits.allowed(limit, layer)
            judged = _JUDGES[limit](layer, allowed)
            if judged is None or judged.value is not None:
                result.checked[limit][layer.key] = layer.call.type
            if judged is not None and (judged.applies or not every):
                value, evidence, channels = judged.value, judged.evidence, judged.channels
                about = BrokenLimit.at(layer.call, limit, layer.key, layer.part, value, allowed, evidence, channels)
                (unmeasured if value is None else result.broken).append(about)
    for limit, calls in result.checked.items():
        if not calls and not any(breach.limit == limit for breach in unmeasured):
            unmeasured.append(BrokenLimit(limit, "", None, None, None, "nothing was checked: no call has this value"))
    (result.allowed if allow_unmeasured else result.broken).extend(unmeasured)
    return result


def _not_measured(coverage: Coverage, allow: Layers, every: bool) -> Iterator[tuple[str, str]]:
    """Layers that did not run, and calls without statistics, with the reason."""
    allowed = None if allow in ((), [], "") else Selection.of(allow)
    outermost: list[str] = []
    for name in coverage.unused if every else coverage.idle:
        if not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost.append(name)
            if allowed is None or not allowed.wants(name, 0, None):
                yield name or MODEL, "it did not run"
    for (call, part), reason in coverage.unmeasured.items():
        if (not every or not call.name) and (allowed is None or not allowed.wants(call.name, call.call, call.index)):
            yield key_of(call, part), reason


def _dead(layer: LayerStatistics, allowed: float) -> _Judgement | None:
    if not layer.values or layer.shape[:1] == (None,):
        return _nothing(layer)
    if layer.values < 2 * layer.channels:
        return _too_few(layer)
    dead, m = layer.dead_channels, layer.by_channel
    share = len(dead) / layer.channels
    if share > allowed:
        are = "is" if len(dead) == 1 else "are"
        return _Judgement(f"{len(dead)} of {layer.channels} channels {are} dead: {listed(dead)}", share, dead)
    unknown = int(((m.nan + m.inf > 0) & ~(m.low < m.high)).sum())
    if share + unknown / layer.channels > allowed:
        have = "has" if unknown == 1 else "have"
        return _Judgement(f"{unknown} of {layer.channels} channels {have} NaN or Inf and no two finite values")
    return None


def _saturated(layer: LayerStatistics, allowed: float) -> _Judgement | None:
    if layer.saturated is None:
        return _Judgement(f"{layer.call.type} has no bound", applies=False)
    if not layer.values:
        return _Judgement("it returned no values")
    if layer.saturated > allowed:
        return _Judgement(f"{percent(layer.saturated)} of values are within 1 % of a bound", layer.saturated)
    unknown = layer.saturated + layer.nan / layer.values > allowed or layer.min is None
    return _Judgement(_nonfinite(layer)) if unknown else None


def _nan(layer: LayerStatistics, allowed: float) -> _Judgement | None:
    if not layer.values:
        return _nothing(layer)
    bad = layer.nan + layer.inf
    return _Judgement(_nonfinite(layer), bad) if bad else None


def _size(layer: LayerStatistics, allowed: float) -> _Judgement | None:
    if not layer.values:
        return _nothing(layer)
    largest = max(-(layer.min or 0.0), layer.max or 0.0)
    text = "no finite value" if layer.min is None else f"from {layer.min:.6g} to {layer.max:.6g}"
    if layer.inf:  # the extremes are of the finite values
        largest, text = math.inf, f"{layer.inf:,} Inf, else {text}"
    if largest > allowed:
        return _Judgement(text, largest)
    return _Judgement(_nonfinite(layer)) if layer.nan else None


def _rank(layer: LayerStatistics, allowed: float) -> _Judgement | None:
    if not layer.values or layer.shape[:1] == (None,):
        return _nothing(layer)
    if layer.highest_rank < 1:
        return _too_few(layer)
    if layer.nan or layer.inf:
        return _Judgement(_nonfinite(layer))
    if layer.rank is None:
        return _Judgement(f"{layer.channels:,} channels are too many for the rank to be measured")
    text = f"effective rank {layer.rank:.4g} of at most {layer.highest_rank} in {layer.channels} channels"
    return None if layer.rank >= allowed else _Judgement(text, layer.rank)


def _nothing(layer: LayerStatistics) -> _Judgement:
    """An output without values, or without fixed channels, is usual inside a model, but not as its output."""
    why = "its number of channels changes" if layer.values else "it returned no values"
    return _Judgement(why, applies=not layer.call.name)


def _too_few(layer: LayerStatistics) -> _Judgement:
    words = f"{counted(layer.values, 'value')} in {counted(layer.channels, 'channel')}"
    return _Judgement(words, applies=False)


def _nonfinite(layer: LayerStatistics) -> str:
    return f"{nonfinite_words(layer.nan, layer.inf)} of {layer.values:,} values"


_JUDGES: dict[str, Callable[[LayerStatistics, float], _Judgement | None]] = {
    "max-dead": _dead,
    "max-saturated": _saturated,
    "no-nan": _nan,
    "max-abs": _size,
    "min-rank": _rank,
}


def junit_xml(suite: str, result: LimitsResult, lost: int = 0) -> bytes:
    """The result as a JUnit test suite, which CI services show: a case for each limit and call.

    What was not measured is a failure, or is skipped where that is allowed. ``lost`` images, which could not be used,
    are an error in a case of their own.
    """
    failures = {(breach.limit, breach.layer): breach for breach in result.broken}
    skipped = {(breach.limit, breach.layer): breach for breach in result.allowed}
    cases = [(limit, layer) for limit, calls in result.checked.items() for layer in calls]
    cases += [case for case in (failures | skipped) if case not in set(cases)]
    root = ElementTree.Element("testsuites")
    tests, errors = len(cases) + bool(lost), int(bool(lost))
    counts = {"tests": tests, "failures": len(failures), "errors": errors, "skipped": len(skipped)}
    attributes = {name: str(count) for name, count in counts.items()}
    tree = ElementTree.SubElement(root, "testsuite", {"name": printable(suite), **attributes})
    if lost:
        case = ElementTree.SubElement(tree, "testcase", {"classname": "images", "name": "all could be used"})
        ElementTree.SubElement(case, "error", {"message": f"{lost} could not be used", "type": "images"})
    for limit, layer in cases:
        case = ElementTree.SubElement(tree, "testcase", {"classname": limit, "name": printable(layer or "(no call)")})
        broken = failures.get((limit, layer)) or skipped.get((limit, layer))
        if broken is not None:
            message = printable(broken.evidence if not broken.unmeasured else f"not measured: {broken.evidence}")
            kind = "failure" if (limit, layer) in failures else "skipped"
            element = ElementTree.SubElement(case, kind, {"message": message, "type": limit})
            if broken.value is not None:
                message += f" (measured {broken.value:.6g}, allowed {broken.allowed:.6g})"
            element.text = message
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text if text.endswith(b"\n") else text + b"\n"
