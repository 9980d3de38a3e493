"""The engine of a comparison: batch by batch, a pass of A that keeps its outputs, and one of B that is compared."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.comparison.answer import find_answer
from hookscope.comparison.cka import CkaSums
from hookscope.comparison.facts import (
    INPUT,
    Agreement,
    ChangedImage,
    CkaMatrix,
    ComparedMaps,
    Comparison,
    how_different,
)
from hookscope.comparison.inputs import (
    InputChange,
    PairedBatch,
    Picture,
    as_pictures,
    paired_batches,
    part_of,
    resizes_apart,
)
from hookscope.comparison.pairing import Pair
from hookscope.comparison.passes import (
    ComparedCalls,
    Kept,
    Wanted,
    find_calls,
    keep_outputs,
    measure_noise,
    meet_outputs,
    run_alone,
)
from hookscope.comparison.rows import RowSums, parts_of
from hookscope.comparison.side import Side
from hookscope.comparison.weights import Weights, stored_as
from hookscope.display import RowTuple
from hookscope.errors import HookscopeError, InputError, NoMapError, UsageError, is_out_of_memory
from hookscope.findings import counted
from hookscope.hooks import MODEL, OPERATION, Call, Layers, Selection, check_hookable, maps_or_vectors, named_inputs
from hookscope.images import Listener
from hookscope.jobs import RunSettings
from hookscope.models import LoadedModel, is_quantized, package_versions
from hookscope.scores import class_label, class_scores, probabilities, without_scores

_CHANNELS = 16  # of a pair, whose maps are kept


def compared_maps(
    key: str, modules: tuple[Any, Any], outputs: tuple[Any, Any], batch: PairedBatch
) -> Iterator[ComparedMaps]:
    """The maps of the first image of a batch, of the channels that changed most."""
    layers = (module if isinstance(module, nn.Module) else None for module in modules)
    try:
        sides = [maps_or_vectors(output, layer, batch.size) for output, layer in zip(outputs, layers, strict=True)]
    except NoMapError:
        return
    for a, b in zip(*sides, strict=False):
        if a.item or a.values.shape != b.values.shape:
            continue
        one, two = a.values.cpu(), b.values.cpu()
        moved = (two.double() - one.double()).nan_to_num(nan=np.inf).flatten(1)
        changes = torch.linalg.vector_norm(moved, dim=1)
        channels = changes.argsort(dim=0, descending=True, stable=True)[:_CHANNELS]
        label = f"{key} {a.part}" if a.part else key
        one, two = (side[channels].float() for side in (one, two))
        drawn = np.asarray(one), np.asarray(two), np.asarray(changes[channels])
        yield ComparedMaps(label, batch.positions[0], tuple(channels.tolist()), drawn[0], drawn[1], drawn[2])


def calls_to_draw(found: Comparison) -> list[Call]:
    """The first call that differs and the one that adds most.

    Where only the input adds a difference, it is the call that differs most.
    """
    differing = [pair for pair in found.calls[1:-1] if pair.differs]
    chosen = [pair.a for pair in differing if pair.key in (found.answer.first, found.answer.most)]
    return chosen or [pair.a for pair in sorted(differing, key=how_different, reverse=True)[:1]]


def is_unexplained(found: Comparison) -> bool:
    """Whether the answer names a layer that gives the same on the same inputs, or one that could not run alone."""
    first = next((pair for pair in found.calls if pair.key == found.answer.first), None)
    no_layer = found.answer.kind == "nonfinite" and first is not None and first.a.name == MODEL
    if first is None or not (no_layer or found.answer.kind in ("layer", "unpaired")):
        return False
    return not first.is_beyond_noise(first.isolated_l2)


def with_operations(found: Comparison, again: Comparison) -> Comparison:
    """``found`` with the answer of a comparison of operations too, and with the row that this answer names."""
    answer = again.answer
    if answer.kind in ("same", "noise", "models") or (answer.kind, answer.first) == ("layer", found.answer.first):
        return found
    rows, keys = list(found.calls), [pair.key for pair in again.calls]
    for key in dict.fromkeys(filter(None, (answer.first, answer.most))):
        known = [pair.key for pair in rows]
        if key not in known:
            later = (known.index(other) for other in keys[keys.index(key) :] if other in known)
            rows.insert(next(later, len(rows)), again.calls[keys.index(key)])
    first = next((at for at, pair in enumerate(rows) if pair.key == answer.first), len(rows))
    same = sum(pair.is_same for pair in rows[:first])
    if len(found.names) > len(again.names):
        answer = replace(answer, sentence=f"{answer.sentence} This is said of the first {len(again.names)} images.")
    return replace(found, answer=replace(answer, same_before=same), calls=RowTuple(rows))


def with_chance(found: Comparison, side: str, own: Comparison) -> Comparison:
    """``found``, which says how far two passes of a side differ, compared in ``own``, and if it explains the answer."""
    passes = f"{side} draws random numbers: two passes differ by relative L2"
    first = next((pair for pair in found.calls if pair.key == found.answer.first), None)
    apart = {pair.key: pair.relative_l2 or 0.0 for pair in own.calls if pair.differs}
    noise = apart.get(first.key if side == "A" else first.key_b, 0.0) if first else 0.0
    if found.answer.kind in ("layer", "unpaired") and first and noise > (first.relative_l2 or math.inf) / 2:
        sentence = f"{passes} {noise:.2g} at {first.key}, so the differences are chance. {found.answer.sentence}"
        advice = f"Call eval() on {side}, and give F.dropout training=self.training."
        return replace(found, answer=replace(found.answer, kind="chance", sentence=sentence, advice=advice))
    note = f"{passes} {apart.get(MODEL, 0.0):.2g}"
    return replace(found, notes=(*found.notes, note)) if MODEL in apart and found.answer.kind != "chance" else found


@dataclass
class AgreementSums:
    """The agreement so far; none once the outputs of a batch are not scores of the same classes."""

    a: LoadedModel
    b: LoadedModel
    categories: Sequence[str] | None = None
    images: int = 0
    shared: float = 0.0
    best: int = 5
    changed: list[ChangedImage] = field(default_factory=list)
    has_scores: bool = True

    def add(self, output_a: Any, output_b: Any, positions: Sequence[int], names: Sequence[str]) -> None:
        sides = (output_a, self.a), (output_b, self.b)
        if not self.has_scores or any(without_scores(output, net.family, net.name) for output, net in sides):
            self.has_scores = False
            return
        a, b = (class_scores(output, net.name).detach().cpu().double() for output, net in sides)
        self.has_scores = a.shape == b.shape and len(a) == len(positions) and a.shape[1] > 1
        if not self.has_scores:
            return
        self.best = min(5, a.shape[1] - 1)
        top_a, top_b = (scores.argsort(dim=1, descending=True, stable=True)[:, : self.best] for scores in (a, b))
        common = (top_a[:, :, None] == top_b[:, None]).any(2).double().mean(1)
        common[(a + b).isnan().any(1)] = 0.0  # NaN has no order
        shares_a, shares_b = probabilities(a), probabilities(b)
        self.images += len(positions)
        for at, (one, two) in enumerate(zip(_best(a), _best(b), strict=True)):
            self.shared += float(common[at])
            if one != two:
                classes = self._class_name(one, self.a), self._class_name(two, self.b)
                shares = float(shares_a[at, one]), float(shares_b[at, two])
                self.changed.append(ChangedImage(positions[at], names[at], *classes, *shares))

    def _class_name(self, index: int, net: LoadedModel) -> str:
        if index < 0:
            return "not finite"
        return class_label(index, self.categories or net.categories) or f"class {index}"

    def result(self) -> Agreement | None:
        if not self.has_scores or not self.images:
            return None
        same = self.images - len(self.changed)
        return Agreement(self.images, same / self.images, self.shared / self.images, tuple(self.changed), self.best)


def _best(scores: Tensor) -> list[int]:
    return torch.where(scores.isnan().any(1), -1, scores.argmax(1)).tolist()


_KEPT = 512 << 20  # bytes of A that wait for B
_MOST, _LEAST = 16, 4  # images in a batch; CKA needs four


def compare(
    a: Side | LoadedModel | nn.Module,
    b: Side | LoadedModel | nn.Module,
    images: Picture | Sequence[Picture] | Tensor,
    *,
    images_b: Picture | Sequence[Picture] | Tensor | None = None,
    layers: Layers | None = None,
    types: Iterable[Any] | None = None,
    ops: bool = False,
    names: Mapping[str, str] | None = None,
    alone: bool = True,
    matrix: bool = False,
    keep: Layers | bool | None = None,
    categories: Sequence[str] | None = None,
    run: RunSettings = RunSettings(),
) -> Comparison:
    """Where two models, or two ways to run one, begin to differ: call by call over the same images.

    The outputs of A are kept for one batch at a time, until B has computed its own. A batch has up to 16 images, and
    down to 4 so that these outputs take at most 512 MiB; memory does not grow with the number of images. Both models
    run in the modes that they are in. Their modes, buffers and hooks and the random state stay as they are. All passes
    draw the same random numbers.

    Args:
        a: What `load_model` returns, any eager module, or a `Side` with more conditions.
        b: The same for B; it may be the same object.
        images: Paths, PIL images, or a batch ``(N, C, H, W)`` that both sides get as it is. A module that does not say
            how an image becomes its input gets the preprocessing of the other side.
        images_b: Other images for B, as many as ``images``.
        layers: The calls of A to compare, as `capture` takes them; None for every layer without children.
        types: Class names that indices in ``layers`` count.
        ops: Whether operations are compared too, such as `torch.relu` and ``+``.
        names: The layer of B for layers of A, where they do not pair by name or order; ``*`` in both is the same text.
        alone: Whether each layer of B also runs on the inputs of A.
        matrix: Whether linear CKA of every layer of A against every layer of B is computed.
        keep: Calls of A whose maps of the first image are kept; True for the first call that differs and the one that
            adds most, which takes further passes of one image.
        categories: Names of the classes; None for the names of each side.
        run: How the run is done, in this process; its usual batch size is as many images as fit, from 4 to 16.

    Returns:
        The `Comparison`: the answer, a row for each pair of calls, and the agreement of the best classes.

    Raises:
        ImageError: an image cannot be read.
        InputError: a model refuses an image.
        LayerError: A has no such layer, or no layers pair.
        ModelError: for scripted models, where hooks do not fire.
        UsageError: there is no image, or B has another number of images.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
        >>> found = compare(net, net, torch.rand(8, 4))
        >>> found.answer.kind, [row.key for row in found.calls]
        ('same', ['(input)', '0', '1', '2', '(model)'])
    """
    pictures, others = as_pictures(images), None if images_b is None else as_pictures(images_b)
    if not len(pictures):
        raise UsageError("there is no image to compare on", do="give a file, a PIL image or a batch")
    if others is not None and len(others) != len(pictures):
        asked = f"B has {counted(len(others), 'image')} and A has {len(pictures)}"
        raise UsageError(asked, do="give the same number to both, in the same order")
    if run.engine is not None:
        raise UsageError("a comparison runs in this process", do="leave the engine out")
    sides = Side.of(a), Side.of(b)
    if not isinstance(pictures, Tensor):
        sides = sides[0].prepared_like(sides[1], a), sides[1].prepared_like(sides[0], b)
    for side in sides:
        check_hookable(side.net.model)
    compiled = any(side.compiled for side in sides)  # whose layers do not run by themselves
    if ops and compiled:
        raise UsageError("operations of a compiled model cannot be compared", do="leave out ops or compile")
    chosen = None if layers is None else Selection.of(layers)
    drawn = None if keep is None or isinstance(keep, bool) else Selection.of(keep)
    wanted = Wanted(chosen, tuple(types or ()) or None, ops, names or {}, alone and not compiled, matrix, drawn)
    sums = ComparisonRun(*sides, wanted, categories, InputChange(others is not None))
    # so that the last batch is not much smaller than the others
    size = run.batch_size or -(-len(pictures) // -(-len(pictures) // _MOST))

    def skipped(position: int, name: str, error: HookscopeError) -> None:
        sums.skipped += 1
        run.listener.skipped(position, name, error)

    listener, done = replace(run.listener, skipped=skipped), 0
    listener.start(0)
    batches = paired_batches(sums.a.net, sums.b.net, pictures, others, size, run.workers, listener)
    with torch.inference_mode(False), closing(batches):
        for batch in batches:
            for part in sums.cut(batch, run.batch_size is None):
                sums.add(part)
                listener.progress(len(sums.names) + sums.skipped - done)
                done = len(sums.names) + sums.skipped
    if not sums.names:
        raise InputError("no image could be used", f"{sums.skipped} were tried", "see the errors above")

    quiet = RunSettings(listener=Listener(note=lambda name, text: None))

    def of_first(count: int, **wanted: Any) -> Comparison:
        """A comparison of the first images that could be used."""
        some = slice(sums.first, sums.first + count)
        of_b = None if others is None else others[some]
        return compare(*sides, pictures[some], images_b=of_b, names=names, run=quiet, **wanted)

    comparison = sums.comparison()
    same = sums.a.net.preprocess == sums.b.net.preprocess or others is not None
    known = same or bool(sums.input_change.words) or isinstance(keep, Selection)  # which draws what was compared
    if comparison.answer.kind == "input" and not known and not isinstance(pictures, Tensor):
        with suppress(HookscopeError):
            sums.input_change.resized = resizes_apart(pictures[sums.first], sums.a.net, sums.b.net)
            comparison = sums.comparison()
    changed = any(side.changes for side in sides)  # whose own operations would be named
    if layers is None and not (ops or compiled or changed) and is_unexplained(comparison):
        with suppress(HookscopeError):  # what was compared stays compared
            comparison = with_operations(comparison, of_first(_LEAST, ops=True, types=types, alone=alone))
    for name, side, given in zip("AB", sides, (pictures, pictures if others is None else others), strict=True):
        if name in sums.calls.draws and sides[1].seed is None:
            some, seeded = given[sums.first : sums.first + _LEAST], replace(side, seed=1)
            with suppress(HookscopeError):
                own = compare(side, seeded, some, types=types, ops=not compiled, alone=False, run=quiet)
                comparison = with_chance(comparison, name, own)
    if keep is True and (calls := calls_to_draw(comparison)):
        drawn = Selection.of_calls(calls)
        ops = ops or any(OPERATION in call.name for call in calls)
        maps = of_first(1, layers=drawn, types=wanted.types, ops=ops, alone=False, keep=drawn).maps
        comparison = replace(comparison, maps=maps)
    return comparison


class ComparisonRun:
    """One comparison: what is added up so far."""

    calls: ComparedCalls
    rows: RowSums
    first: int  # position of the first image that could be used

    def __init__(self, a: Side, b: Side, wanted: Wanted, categories: Sequence[str] | None, change: InputChange) -> None:
        self.a, self.b, self.wanted = a, b, wanted
        self.names, self.sha256 = list[str](), list[str]()
        self.skipped = 0
        self.input_change = change
        self.rounds = is_quantized(b.net.model)
        self.agreement = AgreementSums(a.net, b.net, categories)
        self.matrix: CkaSums | None = None
        self.maps: list[ComparedMaps] = []
        self.notes: dict[str, None] = dict.fromkeys((*a.net.notes, *b.net.notes))

    def cut(self, batch: PairedBatch, fits: bool) -> Iterator[PairedBatch]:
        """The batch in parts of which what is kept of A fits."""
        count = len(batch.names)
        if not self.names:
            self._look(batch)
        most = max(_LEAST, int(_KEPT / max(self.calls.bytes, 1.0))) if fits else count
        parts = -(-count // most)
        if count // parts < _LEAST:  # too few for CKA
            parts = max(1, count // _LEAST)
        step = -(-count // parts)
        for first in range(0, count, step):
            yield part_of(batch, slice(first, first + step))

    def _look(self, batch: PairedBatch) -> None:
        least = 2 if self.a.net.model.training or self.b.net.model.training else 1
        if self.a.compiled or self.b.compiled:  # another number of images is another program to compile
            least = len(batch.names)
        self.calls = find_calls(self.a, self.b, part_of(batch, slice(least)), self.wanted)
        self.rows = RowSums(self.calls.pairing.pairs)
        if self.wanted.matrix:
            self.matrix = CkaSums(len(self.calls.matrix_a), len(self.calls.matrix_b))

    def add(self, batch: PairedBatch) -> None:
        first, done = not self.names, len(self.names)
        if first:
            self.first = batch.positions[0]
        batch = replace(batch, positions=tuple(range(done, done + len(batch.names))))  # as in the names of the result
        calls, rows = self.calls, self.rows
        listed = self.a.net.family == "detection"
        inputs = named_inputs(batch.inputs, {}), named_inputs(batch.b, {})
        rows.add(INPUT, (None, None), inputs, batch, listed)
        kept, output_a, grams_a = keep_outputs(self.a, batch, calls)
        if first:
            measure_noise(self.a, batch, calls, kept, output_a, rows)
        for _, one, two, _ in parts_of(*inputs, batch.positions, False):
            self.input_change.add(*((one, two) if not listed else (one[None], two[None])))

        def on_pair(pair: Pair, of_a: Kept, module: Any, output: Any) -> None:
            key, modules, outputs = pair.a.key, (of_a.module, module), (of_a.output, output)
            rows.add(key, modules, outputs, batch)
            if first and key in calls.with_maps:
                self.maps += compared_maps(key, modules, outputs, batch)

        output_b, grams_b = meet_outputs(self.b, batch, calls, kept, on_pair, self._run_alone)
        rows.add(MODEL, (None, None), (output_a, output_b), batch, listed)
        self.agreement.add(output_a, output_b, batch.positions, batch.names)
        if self.matrix is not None:
            self.matrix.add([grams_a.get(key) for key in calls.matrix_a], [grams_b.get(key) for key in calls.matrix_b])
        self.names += batch.names
        self.sha256 += batch.sha256

    def _run_alone(self, pair: Pair, of_a: Kept, forward: Callable[..., Any], given: Any) -> None:
        try:
            output = run_alone(forward, of_a.inputs, given)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.calls.with_alone.discard(pair.a.key)
            why = " ".join(str(error).split())[:200]
            self.notes[f"{pair.b.key} of B does not run on the inputs of {pair.a.key} of A: {why}"] = None
            return
        self.rows.add_alone(pair.a.key, of_a.output, output, self.rounds)

    def comparison(self) -> Comparison:
        a, b = self.a.facts, self.b.facts
        stored = [stored_as(side.net.model) for side in (self.a, self.b)]
        if stored[0] != stored[1] and a.dtype == b.dtype:
            words = (f"weights rounded to {name}" if name else "" for name in stored)
            a, b = (replace(side, special="; ".join(filter(None, (side.special, next(words))))) for side in (a, b))
        weights = Weights(self.a.net.model, self.b.net.model, self.calls.uses)
        rows = tuple(self.rows.rows(self.a, self.b, weights.change))
        only = self.calls.pairing.only_a, self.calls.pairing.only_b
        for name, side in (("A", self.a), ("B", self.b)):
            if count := sum(module.training for module in side.net.model.modules()):
                self.notes[f"{name} is in training mode: {counted(count, 'layer')}"] = None
        self.notes |= dict.fromkeys((*self.a.notes, *self.b.notes))
        if self.skipped:
            self.notes[f"{counted(self.skipped, 'image')} could not be used"] = None
        keys = tuple(self.calls.matrix_a), tuple(self.calls.matrix_b)
        matrix = None if self.matrix is None else CkaMatrix(*keys, self.matrix.matrix, len(self.names))
        hashed = zip(self.names, self.sha256, strict=True)
        images = [{"image": os.path.basename(name), "sha256": sha256} for name, sha256 in hashed]
        provenance = {**package_versions(), "a": self.a.provenance, "b": self.b.provenance, "images": images}
        answer = find_answer(rows, a, b, *only, self.input_change, self.calls.lost, weights.relation)
        found = Comparison(a, b, tuple(self.names), answer, RowTuple(rows), *only, self.agreement.result(), matrix)
        return replace(found, maps=tuple(self.maps), provenance=provenance, notes=tuple(self.notes))
