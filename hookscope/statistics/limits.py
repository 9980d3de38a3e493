"""Limits on statistics, the layers that break them, and the result as JUnit XML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from xml.etree import ElementTree

from hookscope.errors import printable
from hookscope.findings import listed, nonfinite_words, percent
from hookscope.hooks import Layers, Selection
from hookscope.statistics.layer_statistics import LayerStatistics


@dataclass(frozen=True, slots=True)
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
        """The names of the limits that are set, as the options are called."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        names = [name for name, value in values.items() if value is not None and value is not False]
        return tuple(dict.fromkeys(name.removesuffix("_share").replace("_", "-") for name in names))


@dataclass(frozen=True, slots=True)
class BrokenLimit:
    """A call beyond a limit such as ``max-dead``; ``evidence`` has the numbers in words."""

    limit: str
    layer: str
    index: int | None
    value: float
    allowed: float
    evidence: str
    channels: tuple[int, ...] | None = None


def held_layers(layers: Sequence[LayerStatistics], allow: Layers = ()) -> list[LayerStatistics]:
    """The layers that ``allow`` does not select: limits apply to them.

    Raises:
        SelectionError: A term of ``allow`` cannot be read.
    """
    if allow in ((), [], ""):
        return list(layers)
    allowed, total = Selection.of(allow), sum(layer.call.index is not None for layer in layers)
    return [layer for layer in layers if not allowed.wants(layer.call.name, layer.call.call, layer.call.index, total)]


def broken_limits(layers: Sequence[LayerStatistics], limits: Limits) -> list[BrokenLimit]:
    """Every limit that a layer breaks, in order of execution."""
    return [broken for layer in layers for broken in _broken(layer, limits)]


def _broken(layer: LayerStatistics, limits: Limits) -> Iterator[BrokenLimit]:
    key, index = layer.key, layer.call.index
    dead = len(layer.dead_channels) / max(layer.channels, 1)
    if limits.max_dead is not None and dead > limits.max_dead:
        count = len(layer.dead_channels)
        are = "is" if count == 1 else "are"
        text = f"{count} of {layer.channels} channels {are} dead: {listed(layer.dead_channels)}"
        yield BrokenLimit("max-dead", key, index, dead, limits.max_dead, text, layer.dead_channels)
    if limits.max_saturated is not None and layer.saturated is not None and layer.saturated > limits.max_saturated:
        text = f"{percent(layer.saturated)} of values are within 1 % of a bound"
        yield BrokenLimit("max-saturated", key, index, layer.saturated, limits.max_saturated, text)
    if limits.no_nan and (bad := layer.nan + layer.inf):
        text = f"{nonfinite_words(layer.nan, layer.inf)} of {layer.values:,} values"
        yield BrokenLimit("no-nan", key, index, bad, 0, text)
    if limits.max_abs is not None:
        largest = max(-(layer.min or 0.0), layer.max or 0.0)
        text = "no finite value" if layer.min is None else f"from {layer.min:.6g} to {layer.max:.6g}"
        if layer.inf:  # the extremes are those of the finite values
            largest, text = math.inf, f"{layer.inf:,} Inf, else {text}"
        if largest > limits.max_abs:
            yield BrokenLimit("max-abs", key, index, largest, limits.max_abs, text)
    least = limits.min_rank
    if limits.min_rank_share is not None:
        least = limits.min_rank_share * layer.highest_rank
    if least is not None and layer.rank is not None and layer.rank < least:
        text = f"effective rank {layer.rank:.4g} of at most {layer.highest_rank} in {layer.channels} channels"
        yield BrokenLimit("min-rank", key, index, layer.rank, least, text)


def junit_xml(
    suite: str, limits: Sequence[str], layers: Sequence[str], broken: Sequence[BrokenLimit], lost: int = 0
) -> bytes:
    """The result as a JUnit test suite, which CI services show: a case for each limit and layer.

    ``lost`` images, which could not be used, are an error in a case of their own.
    """
    failures = {(failure.limit, failure.layer): failure for failure in broken}
    root = ElementTree.Element("testsuites")
    tests, errors = len(limits) * len(layers) + bool(lost), int(bool(lost))
    counts = {"tests": tests, "failures": len(failures), "errors": errors, "skipped": 0}
    attributes = {name: str(count) for name, count in counts.items()}
    cases = ElementTree.SubElement(root, "testsuite", {"name": printable(suite), **attributes})
    if lost:
        case = ElementTree.SubElement(cases, "testcase", {"classname": "images", "name": "all could be used"})
        ElementTree.SubElement(case, "error", {"message": f"{lost} could not be used", "type": "images"})
    for limit in limits:
        for layer in layers:
            case = ElementTree.SubElement(cases, "testcase", {"classname": limit, "name": printable(layer)})
            if failure := failures.get((limit, layer)):
                message = printable(failure.evidence)
                element = ElementTree.SubElement(case, "failure", {"message": message, "type": limit})
                element.text = f"{message} (measured {failure.value:.6g}, allowed {failure.allowed:.6g})"
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text if text.endswith(b"\n") else text + b"\n"
