"""What the numbers of a comparison say: where two sides part, what is behind it, and which limits they break."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hookscope.comparison.facts import INPUT, TIMES_NOISE, Agreement, Answer, Comparison, PairedCall, SideFacts
from hookscope.comparison.inputs import InputChange
from hookscope.comparison.pairing import LostCalls
from hookscope.comparison.side import functions_of, hands_on, takes
from hookscope.display import text_of
from hookscope.errors import spelled
from hookscope.findings import counted, listed, percent
from hookscope.hooks import MODEL, OPERATION, Call, Shape
from hookscope.models import DTYPES
from hookscope.statistics import BrokenLimit, LimitsResult

_ROUNDING = 16  # times the precision of a data type: what rounding alone may do to the output of one layer
_OUTLYING = 4  # times the median of all layers
_OF_ROUNDING = 0.7  # of what a layer adds
_MOST = 0.8  # of the layers with parameters: other weights, not other parameters of some layers
# The spacing of numbers near 1; of 8-bit integers what their scale may lose of a layer's weights.
_PRECISION = {name: dtype.spacing for name, dtype in DTYPES.items()} | {"quantized": 2**-4}


@dataclass(frozen=True)
class _AnswerFacts:
    """What the causes see; ``first`` is the first pair that differs, by more than rounding where there is one."""

    calls: Sequence[PairedCall]
    first: PairedCall
    a: SideFacts
    b: SideFacts
    only_a: Sequence[Call]
    only_b: Sequence[Call]
    input_change: InputChange
    lost: Mapping[str, LostCalls]
    relation: Callable[[PairedCall], tuple[str, str, str]]

    @cached_property
    def trained(self) -> list[PairedCall]:
        """The pairs of layers with parameters, each layer once."""
        trained = (pair for pair in reversed(self.calls) if pair.parameters is not None)
        layers = {pair.a.name: pair for pair in trained if OPERATION not in pair.a.name}  # which a block holds
        return list(reversed(layers.values()))

    @cached_property
    def changed(self) -> list[PairedCall]:
        """The pairs whose parameters differ by more than the rounding of the data types."""
        return [pair for pair in self.trained if self.is_changed(pair.parameters)]

    @cached_property
    def alone(self) -> PairedCall | None:
        """The pair whose layer alone differs most."""
        pairs = [pair for pair in self.calls if pair.is_beyond_noise(pair.isolated_l2)]
        return max(pairs, key=lambda pair: pair.isolated_l2 or 0.0, default=None)

    @cached_property
    def rounding(self) -> float:
        """The precision of the coarser data type; 0 if both sides have the same."""
        a, b = _precision(self.a), _precision(self.b)
        return max(a, b) if a != b else 0.0

    def is_changed(self, change: float | None) -> bool:
        """Whether parameters or buffers that differ so far differ by more than rounding; NaN does."""
        return change is not None and not change <= self.rounding

    @cached_property
    def usual(self) -> float:
        """What rounding alone may do to the output of one layer; to 8 bits it does about as much in every layer."""
        alone = [pair.isolated_l2 for pair in self.calls if pair.isolated_l2 is not None]
        if self.rounding < _PRECISION["quantized"] or not alone:
            return _ROUNDING * self.rounding
        return max(self.rounding, _OUTLYING * float(np.median(alone)))

    def is_more_than_rounding(self, pair: PairedCall) -> bool:
        """Whether rounding does not explain how far this pair differs, or what it differs in."""
        adds, usual = pair.isolated_l2, self.usual
        if adds is None:  # what the layers before did is in it
            adds, usual = _relative(pair), self.rounding if pair.a.name == INPUT else _ROUNDING * self.rounding
        return adds > usual or self.is_changed(pair.parameters) or self.is_changed(pair.buffers)

    @cached_property
    def inputs(self) -> PairedCall | None:
        return next((pair for pair in self.calls if pair.a.name == INPUT), None)

    @property
    def where(self) -> str:
        return f"A and B differ first at {_name(self.first)}: {_distance(self.first)}"


def find_answer(
    calls: Sequence[PairedCall],
    a: SideFacts,
    b: SideFacts,
    unpaired_a: Sequence[Call] = (),
    unpaired_b: Sequence[Call] = (),
    input_change: InputChange | None = None,
    lost: Mapping[str, LostCalls] = {},
    relation: Callable[[PairedCall], tuple[str, str, str]] = lambda pair: ("", "", ""),
) -> Answer:
    """Where the sides part: the first cause that the numbers show, before the difference that follows from it.

    ``lost`` has, for the key of a call of A, the calls of both sides without a partner through which its inputs came.
    ``relation`` says of a pair what its parameters, buffers and arguments are in B, as `Weights.relation` does.
    """
    differing = [pair for pair in calls if pair.differs]
    if not differing:
        return _equal(calls, [*unpaired_a, *unpaired_b])
    first = next((pair for pair in differing if _nonfinite(pair)), differing[0])
    facts = _AnswerFacts(calls, first, a, b, unpaired_a, unpaired_b, input_change or InputChange(), lost, relation)
    if facts.rounding and not _nonfinite(first):  # rounding hides no other cause
        facts = replace(facts, first=next((pair for pair in differing if facts.is_more_than_rounding(pair)), first))
    kind, sentence, advice = next(answer for cause in _CAUSES if (answer := cause(facts)))
    same = sum(pair.is_same for pair in calls[: calls.index(first)])
    inputs = INPUT if facts.inputs is not None and facts.inputs.differs else ""
    most = facts.alone.key if facts.alone is not None else inputs
    return Answer(kind, first.key, most, same, f"{sentence}.", spelled(advice))


def _equal(calls: Sequence[PairedCall], unpaired: Sequence[Call]) -> Answer:
    have = "has" if len(unpaired) == 1 else "have"
    rest = f"; {counted(len(unpaired), 'call')} {have} no partner" if unpaired else ""
    apart = [pair for pair in calls if not pair.is_same]
    if not apart:
        values = f"in all {len(calls)} pairs of calls" if len(calls) > 1 else "in the only pair of calls"
        return Answer("same", "", "", len(calls), f"A and B are the same to the bit {values}{rest}.")
    pair = max(apart, key=_relative)
    sentence = f"A and B are the same except for noise: {_distance(pair)} at most"
    noise = f"where the noise is {pair.noise or 0:.2g}, and a difference is more than {TIMES_NOISE} times that"
    return Answer("noise", "", "", calls.index(apart[0]), f"{sentence}, {noise}{rest}.")


def _not_finite(facts: _AnswerFacts) -> tuple[str, str, str] | None:
    difference = facts.first.difference
    if difference is None or not _nonfinite(facts.first):
        return None
    side, other, count = "B", "A", difference.nonfinite_b
    if difference.nonfinite_a > difference.nonfinite_b:
        side, other, count = "A", "B", difference.nonfinite_a
    layer = "call" if facts.first.a.name == MODEL or OPERATION in facts.first.a.name else "layer"
    words = f"{_name(facts.first)} is the first {layer} with NaN or Inf in {side}"
    sentence = f"{words}: {counted(count, 'value')}, finite in {other}"
    if facts.first.parameters == math.inf or facts.first.buffers == math.inf:
        sentence += "; its weights hold them too"
    earlier = next(pair for pair in facts.calls if pair.differs)
    if earlier is not facts.first:
        sentence += f"; before it, {_name(earlier)} is the first that differs: {_distance(earlier)}"
    advice = f"See the operation that makes them in {side}: ‹find_non_finite|`hookscope find-nan`›."
    if facts.first.a.name == MODEL:  # no layer gives them
        advice = "An operation that is not a module gives them: compare with ‹ops=True|--ops›."
    if "float16" in _types(facts.a if side == "A" else facts.b):
        advice = "The largest float16 is 65,504: use bfloat16 or autocast, or keep this layer in float32."
    return "nonfinite", sentence, advice


def _agreeing(facts: _AnswerFacts) -> tuple[str, str, str] | None:
    """Outputs that agree, although something before them differs: no fault."""
    outputs = [pair for pair in facts.calls if pair.a.name == MODEL]
    if not outputs or any(pair.differs for pair in outputs):
        return None
    worst = max(outputs, key=_relative)
    how = "to the bit" if worst.is_same else f"except for noise: {_distance(worst)}"
    inner = [pair for pair in facts.calls if pair.differs]
    more = f"{counted(len(inner), 'pair')} before {'differs' if len(inner) == 1 else 'differ'}, first {_name(inner[0])}"
    if inner[0] is facts.inputs and (side := facts.input_change.normalising):
        more = f"{facts.input_change.words}, and {side} normalises it itself"
    return "noise", f"The outputs of A and B are the same {how}; {more}", ""


def _input(facts: _AnswerFacts) -> tuple[str, str, str] | None:
    pair = facts.inputs
    if pair is None or not pair.differs or not facts.is_more_than_rounding(pair):
        return None
    more = ""
    if facts.changed:
        more = f"; the parameters of {_share(facts.changed, facts.trained)} differ too"
    elif facts.alone is not None and not facts.rounding:
        more = f"; {_name(facts.alone)} alone differs too, by {facts.alone.isolated_l2:.2g}"
    elif any(call.isolated_l2 is not None for call in facts.calls) and facts.alone is None:
        more = "; no layer alone differs"
    if pair.difference is None:
        sizes = f"A gets {_size(pair.shape_a)} and B gets {_size(pair.shape_b)}"
        advice = "Give both the same ‹input_size|--input-size›."
        return "input", f"The inputs have different sizes: {sizes}{more}", advice
    if facts.input_change.other_images and not facts.input_change.words:
        return "input", f"The images differ: {_distance(pair)} of the inputs{more}", ""
    steps = "‹preprocess, resize, mean, std and range|--preprocess, --resize, --mean, --std and --range›"
    how = [f"{name}: {side.preprocess}" for name, side in (("A", facts.a), ("B", facts.b)) if side.preprocess]
    differently = f" ({'; '.join(how)})" if facts.a.preprocess != facts.b.preprocess else ""
    words = facts.input_change.words or f"The inputs differ: {_distance(pair)}"
    return "input", f"{words}{differently}{more}", f"Give both sides the same {steps}."


def _models(facts: _AnswerFacts) -> tuple[str, str, str] | None:
    paired = len({pair.a.key for pair in facts.calls} - {INPUT, MODEL})
    alone = len(facts.only_a) + len(facts.only_b)
    foreign = alone > 0.2 * (2 * paired + alone)
    other_weights = alone and len(facts.changed) > _MOST * max(len(facts.trained), 1)
    if facts.a.model == facts.b.model or not (foreign or other_weights):
        return None
    of_a = f"{paired} of {counted(paired + len(facts.only_a), 'call')} of A have a partner in B"
    unlike = {pair.a.key for pair in facts.calls if pair.paired_by == "order"} - {INPUT, MODEL}
    of_a += f", {len(unlike)} of them under another name" if unlike else ""
    different = f", and the parameters of {_share(facts.changed, facts.trained)} differ" if facts.changed else ""
    return "models", f"A and B are two models: {of_a}{different}. {facts.where}", ""


def _parameters(facts: _AnswerFacts) -> tuple[str, str, str] | None:
    first = facts.first
    changes = {"parameters": first.parameters, "buffers": first.buffers}
    what = next((name for name, change in changes.items() if facts.is_changed(change)), "")
    if not what:
        return None
    place, words, advice = facts.relation(first)
    by = f"by {changes[what]:.2g}" + (f": {words}" if words else "")
    advice = advice or "Load this layer of A into B and compare again: what else differs is then left."
    if place:  # of no layer
        held = (MODEL, first.a.name.partition(OPERATION)[0])
        others = [pair for pair in facts.changed if pair.a.name not in held]
        more = f"; the parameters of {counted(len(others), 'layer')} differ too" if others else ""
        return what, f"{place} {'differ' if ' and ' in place else 'differs'} {by}{more}", advice
    if what == "buffers":
        if not words:
            advice = "Check whether training went on after one of them was saved, or a BatchNorm was folded."
        alike = {pair.a.name for pair in facts.calls if facts.is_changed(pair.buffers)} - {first.a.name}
        more = f" (and {len(alike)} more)" if alike else ""
        name = f"The buffers of {_name(first)}{more}, such as its running mean and variance"
        return what, f"{name}, differ {by}; its parameters do not", advice
    share = f"the parameters of {_share(facts.changed, facts.trained)} differ, first in {_name(first)} {by}"
    if len(facts.changed) > _MOST * len(facts.trained) > 1:
        trained = "If B was trained further, this is expected: see the layer that adds most, and the changed classes."
        return what, f"A and B have different weights: {share}", trained
    return what, f"T{share[1:]}", advice


def _rounding(facts: _AnswerFacts) -> tuple[str, str, str] | None:
    if not facts.rounding or facts.is_more_than_rounding(facts.first):
        return None
    a, b = (side.dtype + (f" ({side.special})" if side.special else "") for side in (facts.a, facts.b))
    last = facts.calls[-1]
    end = f": {_distance(last)} at {_name(last)}" if last.differs else ": the output does not differ"
    alone, most = facts.alone, ""
    if alone is not None:
        of_output = "; rounding the output of {} to 8 bits adds most, {:.2g}" if _is_of_rounding(alone) else ""
        most = (of_output or "; {} adds most, {:.2g} alone").format(_name(alone), alone.isolated_l2)
    return "precision", f"A computes in {a}, B computes in {b}{end}{most}", ""


def _is_of_rounding(pair: PairedCall) -> bool:
    """Whether what the layer adds comes of the 8 bits to which its output is rounded, not of the layer."""
    return pair.rounding_l2 is not None and pair.rounding_l2 > _OF_ROUNDING * (pair.isolated_l2 or 0.0)


def _steps(facts: _AnswerFacts) -> tuple[str, str, str] | None:
    """An output that is rounded to 8 bits in steps that do not suit it: no fault of its layer."""
    first = facts.first
    if not facts.rounding or not _is_of_rounding(first):
        return None
    words = f"B rounds the output of {_name(first)} to 8 bits in steps that do not suit it"
    lost = f"rounding adds relative L2 {first.rounding_l2:.2g}, and may add {facts.usual:.2g}"
    return "precision", f"{words}: {lost}", "Calibrate its scale and zero point again, or leave it in float."


def _unpaired(facts: _AnswerFacts) -> tuple[str, str, str] | None:
    """Calls without a partner from which the inputs of the first pair that differs came.

    Where nothing is known of its inputs, such calls between the last pair that is equal and the first that differs.
    """
    first, at = facts.first, facts.calls.index(facts.first)
    if first.is_beyond_noise(first.isolated_l2):
        return None
    before = (facts.calls[at - 1].a, facts.calls[at - 1].b) if at else (None, None)
    lost: Sequence[Sequence[Call]] = facts.lost.get(first.a.key, ((), ()))
    between = [_between(facts.only_a, before[0], first.a), _between(facts.only_b, before[1], first.b)]

    def kind_of(call: Call) -> str:
        return "take" if takes(call.type) else functions_of(call.type)[0]

    # what takes values on both sides, or rearranges them as often, does not differ
    a, b = (Counter(map(kind_of, calls)) for calls in lost)
    alike = [kind for kind in a if b[kind] and (kind == "take" or (hands_on(kind) and a[kind] == b[kind]))]
    lost, between = (
        [[call for call in calls if kind_of(call) not in alike] for calls in both] for both in (lost, between)
    )
    computing = [[call for call in calls if not hands_on(call.type)] for calls in lost]
    sides = next(filter(any, (computing, between, lost)), None)
    if sides is None:
        return None
    of_a, of_b = (
        listed([call.key if OPERATION in call.name else f"{call.key} ({call.type})" for call in calls], 3)
        for calls in sides
    )
    words = f"A has {of_a} where B has {of_b}" if of_a and of_b else ""
    words = words or (f"A has {of_a}, and B does not" if of_a else f"B has {of_b}, and A does not")
    return "unpaired", f"{words}. {facts.where}", ""


def _layer(facts: _AnswerFacts) -> tuple[str, str, str]:
    first = facts.first
    special = [f"{name} runs with {side.special}" for name, side in (("A", facts.a), ("B", facts.b)) if side.special]
    because = f"{', '.join(special)}; " if special else ""
    if first.difference is None:
        return "layer", f"{because}{facts.where}", ""
    other = first.key != MODEL and functions_of(first.a.type) != functions_of(first.b.type)
    types = f"; it is {first.a.type} in A and {first.b.type} in B" if other else ""
    if first.isolated_l2 is not None and not first.is_beyond_noise(first.isolated_l2):
        advice = "" if special else "An operation that is not a module lies before it: compare with ‹ops=True|--ops›."
        return "layer", f"{because}{facts.where}, but on the same inputs it gives the same{types}", advice
    advice = ""
    if first.paired_by == "folded":
        types = f"; {first.b.key} of B does the work of several layers of A"
        if not special:
            advice = "Compare its weights and arguments with A's: a BatchNorm may be folded wrongly."
    arguments = "" if special else facts.relation(first)[1]
    parameters = ", with the same parameters" if first.parameters == 0 else ""
    if arguments:
        types, advice = (
            f"; {arguments}",
            "Give both layers the same arguments." if arguments.startswith("its") else "Call eval() on both sides.",
        )
    alone = f", {first.isolated_l2:.2g} on the same inputs" if first.is_beyond_noise(first.isolated_l2) else ""
    return "layer", f"{because}{facts.where}{alone}{parameters}{types}", advice


_CAUSES = (_not_finite, _agreeing, _models, _input, _parameters, _rounding, _steps, _unpaired, _layer)


def _nonfinite(pair: PairedCall) -> int:
    return pair.difference.nonfinite if pair.difference else 0


def _relative(pair: PairedCall) -> float:
    return math.inf if pair.relative_l2 is None else pair.relative_l2


def _types(side: SideFacts) -> list[str]:
    words = re.findall(r"\bb?float(?:16|32|64)\b|quint8|qint8|\bint8\b|quantized", f"{side.dtype} {side.special}")
    return [word if "float" in word else "quantized" for word in words]


def _precision(side: SideFacts) -> float:
    """The spacing of numbers near 1 in the coarsest data type of a side."""
    return max((_PRECISION[name] for name in _types(side)), default=0.0)


def _name(pair: PairedCall) -> str:
    return pair.key if pair.key == pair.key_b else f"{pair.key} ({pair.key_b} in B)"


def _distance(pair: PairedCall) -> str:
    if pair.difference is None:
        what = "it is" if pair.a.name == INPUT else "its output is"
        return f"{what} {_size(pair.shape_a)} in A and {_size(pair.shape_b)} in B"
    return "not finite" if pair.relative_l2 is None else f"relative L2 {pair.relative_l2:.2g}"


def _share(some: Sequence[PairedCall], of: Sequence[PairedCall]) -> str:
    return f"{len(some)} of {counted(len(of), 'layer')}"


def _between(calls: Sequence[Call], before: Call | None, after: Call) -> list[Call]:
    """The calls in order of execution after ``before`` and before ``after``, as far as their order is known."""
    low = -1 if before is None or before.order is None else before.order
    high = np.inf if after.order is None else after.order
    return [call for call in calls if call.order is not None and low < call.order < high]


def _size(shape: Shape) -> str:
    return text_of(shape) or "a number"


def check_comparison(
    found: Comparison,
    max_relative: float | None = None,
    min_cosine: float | None = None,
    min_agreement: float | None = None,
) -> LimitsResult:
    """Check every pair of calls, and the agreement; what was not measured has not passed.

    The limits are the largest relative L2 difference of a pair of calls, the smallest cosine of a pair, and the
    smallest share of images with the same best class; None for no limit.
    """
    given = {"max-relative": max_relative, "min-cosine": min_cosine, "min-agreement": min_agreement}
    limits = {limit: allowed for limit, allowed in given.items() if allowed is not None}
    result = LimitsResult({limit: {} for limit in limits})
    for limit, allowed in limits.items():
        of_classes = limit == "min-agreement"
        for pair in found.calls[-1:] if of_classes else found.calls:
            value, evidence = _agreement(found.agreement) if of_classes else _measured(pair, limit == "max-relative")
            if value is not None:
                result.checked[limit][pair.key] = pair.a.type
                if value <= allowed if limit.startswith("max") else value >= allowed:
                    continue
            result.broken.append(BrokenLimit.at(pair.a, limit, pair.key, pair.part, value, allowed, evidence))
    return result


_Measured = tuple[float | None, str]  # the value, None where there is none, and what it says in words


def _measured(pair: PairedCall, is_distance: bool) -> _Measured:
    """The relative L2 distance of a pair, or its cosine."""
    difference = pair.difference
    if difference is None:
        return None, f"the shapes differ: {text_of(pair.shape_a)} in A and {text_of(pair.shape_b)} in B"
    if difference.nonfinite:
        words = f"{counted(difference.nonfinite, 'value')} of {difference.values:,} NaN or Inf on one side only"
        return math.inf if is_distance else None, words
    if difference.is_same:
        return 0.0 if is_distance else 1.0, "the same to the bit"
    value, name, why_not = difference.cosine, "cosine", "one side is 0 everywhere"
    if is_distance:
        value, name, why_not = difference.relative_l2, "relative L2 difference", "no value is finite on both sides"
    return value, why_not if value is None else f"{name} {value:.4g}"


def _agreement(agreement: Agreement | None) -> _Measured:
    if agreement is None:
        return None, "the outputs are not scores of the same classes"
    changed, images = len(agreement.changed), counted(agreement.images, "image")
    return agreement.top1, f"{changed:,} of {images} changed class: {percent(agreement.top1)} agree"
