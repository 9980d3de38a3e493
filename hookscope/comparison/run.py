"""The engine of a comparison: batch by batch, a pass of A that keeps its outputs, and one of B that is compared."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.comparison.agreement import AgreementSums
from hookscope.comparison.alone import run_alone
from hookscope.comparison.answer import Evidence, find_answer
from hookscope.comparison.cka import CkaSums, PairCka, gram
from hookscope.comparison.facts import INPUT, ComparedMaps, Comparison, PairedCall, SideFacts
from hookscope.comparison.inputs import PairedBatch, Picture, as_pictures, copied, paired_batches
from hookscope.comparison.pairing import Pair, Pairing, SeenCall, nothing_pairs, pair_calls
from hookscope.comparison.side import FUNCTIONAL, Side
from hookscope.comparison.sums import DifferenceSums, PartSums, shape_for_one
from hookscope.drawing import input_size_of
from hookscope.errors import HookscopeError, InputError, NoMapError, UsageError, is_out_of_memory
from hookscope.findings import counted
from hookscope.hooks import (
    EVERY_OPERATION,
    MODEL,
    OPERATION,
    Call,
    InputSize,
    Layers,
    Observer,
    Operation,
    Selection,
    buffers_kept,
    by_channel,
    check_hookable,
    enclosing,
    map_tensors,
    maps_or_vectors,
    named_inputs,
    random_states_kept,
    tensors_in,
)
from hookscope.models import (
    LoadedModel,
    OnLost,
    OnNote,
    model_errors_as_input_errors,
    package_versions,
    raise_lost,
    warn_of_image,
)

_KEPT = 512 << 20  # bytes of A that wait for B
_MOST, _LEAST = 16, 4  # images in a batch; CKA needs four
_CHANNELS = 16  # of a pair, whose maps are kept


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
    keep: Layers | None = None,
    categories: Sequence[str] | None = None,
    batch_size: int | None = None,
    workers: int = 0,
    on_lost: OnLost = raise_lost,
    on_note: OnNote = warn_of_image,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Where two models, or two ways to run one, part: call by call over the same images.

    The outputs of A of one batch are kept, at most 512 MiB where a batch may have fewer than 16 images, until B has
    computed its own. Memory does not grow with the number of images. Both models run in the modes that they are in;
    their modes, buffers and hooks and the random state stay as they are. All passes draw the same random numbers.

    Args:
        a: What `load_model` returns, any eager module, or a `Side` with more conditions.
        b: Likewise; it may be the same object.
        images: Paths, PIL images, or a batch ``(N, C, H, W)`` that both sides get as it is.
        images_b: Other images for B, as many as ``images``.
        layers: The calls of A to compare, as `capture` takes them; None for every layer without children.
        types: Class names that indices in ``layers`` count.
        ops: Whether operations are compared too, such as `torch.relu` and ``+``.
        names: The layer of B for layers of A, where names or their order do not tell.
        alone: Whether each layer of B also runs on the inputs of A.
        matrix: Whether linear CKA of every layer of A against every layer of B is computed.
        keep: Calls of A whose maps of the first image are kept.
        categories: Names of the classes; None for those of each side.
        batch_size: Images in a pass; None for as many as fit, from 4 to 16.
        workers: Number of processes that read and prepare images.
        on_lost: Called with position, name and error of an image that cannot be used; raises by default.
        on_note: Called with name and text of a note about an image; warns by default.
        on_progress: Called as ``on_progress(done, total)`` after each batch.

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
        raise UsageError(asked, do="give as many to both, in the same order")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch size must be at least 1, not {batch_size}")
    sides = Side.of(a), Side.of(b)
    for side in sides:
        check_hookable(side.net.model)
    if ops and any(side.compiled for side in sides):
        raise UsageError("operations of a compiled model cannot be looked at", do="leave out ops or compile")
    run = _Run(
        *sides,
        len(pictures),
        None if layers is None else Selection.of(layers),
        tuple(types) if types else None,
        ops,
        names or {},
        alone,
        matrix,
        None if keep is None else Selection.of(keep),
        categories,
        Evidence(others is not None),
    )
    size = batch_size or run.usual_batch

    def lost(position: int, name: str, error: HookscopeError) -> None:
        run.lost += 1
        on_lost(position, name, error)

    batches = paired_batches(run.a.net, run.b.net, pictures, others, size, workers, lost, on_note)
    with torch.inference_mode(False), closing(batches):
        for batch in batches:
            for part in run.cut(batch, batch_size is None):
                run.add(part)
                on_progress(len(run.names) + run.lost, len(pictures))
    if not run.names:
        raise InputError("no image could be used", f"{run.lost} were tried", "see the errors above")
    return run.comparison()


@dataclass(slots=True)
class _Kept:
    """What a call of A leaves for B: copies of its inputs and of its output."""

    module: Any
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    output: Any


@dataclass(slots=True)
class _Look:
    """The calls of one side in a first pass, and the bytes that keeping those of A takes for one image."""

    seen: list[SeenCall] = field(default_factory=list)
    chosen: set[str] = field(default_factory=set)
    bytes: float = 0.0


class _Copies:
    """Copies of tensors; one that was copied before, and not written to since, is not copied again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], int, Tensor]] = {}
        self.bytes = 0

    def of(self, value: Any) -> Any:
        with torch._C.DisableTorchFunction():  # a copy is no operation of the model
            return map_tensors(value, self._copy)

    def _copy(self, tensor: Tensor) -> Tensor:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        twin = tensor.detach().clone()
        self.bytes += twin.numel() * twin.element_size()
        if not tensor.is_inference():  # torch counts no writes to those
            self._known[id(tensor)] = (ref(tensor), tensor._version, twin)
        return twin


class _Run:
    """One comparison: what is added up so far."""

    def __init__(
        self,
        a: Side,
        b: Side,
        total: int,
        layers: Selection | None,
        types: tuple[Any, ...] | None,
        ops: bool,
        map_names: Mapping[str, str],
        alone: bool,
        matrix: bool,
        keep: Selection | None,
        categories: Sequence[str] | None,
        evidence: Evidence,
    ) -> None:
        self.a, self.b, self.total = a, b, total
        self.layers, self.types, self.ops, self.map_names = layers, types, ops, map_names
        self.alone = alone and not self._is_compiled  # whose layers do not run by themselves
        self.matrix, self.keep = matrix, keep
        self.names: list[str] = []
        self.sha256: list[str] = []
        self.lost = 0
        self.evidence = evidence
        self.agreement = AgreementSums(a.net, b.net, categories)
        self.sums: dict[str, dict[str, PartSums]] = {}  # by key of the call of A, and part
        self.cka: dict[tuple[str, str], PairCka] = {}
        self.maps: list[ComparedMaps] = []
        self.notes: dict[str, None] = dict.fromkeys((*a.net.notes, *b.net.notes))
        self.kept_calls: set[str] = set()
        self.with_alone: set[str] = set()
        self.modules_a, self.modules_b = (dict(side.net.model.named_modules()) for side in (a, b))

    @property
    def usual_batch(self) -> int:
        """Images to a batch, so that the last one is not much smaller than the others."""
        return -(-self.total // -(-self.total // _MOST))

    def cut(self, batch: PairedBatch, fits: bool) -> Iterator[PairedBatch]:
        """The batch in parts of which what is kept of A fits."""
        count = len(batch.names)
        if not self.sums:
            # another number of images is another program to compile
            least = count if self._is_compiled else 2 if self._in_training else 1
            self._pair(_sliced(batch, slice(least)))
        most = max(_LEAST, int(_KEPT / max(self.bytes, 1.0))) if fits else count
        parts = -(-count // most)
        if count // parts < _LEAST:  # too few for CKA
            parts = max(1, count // _LEAST)
        step = -(-count // parts)
        for first in range(0, count, step):
            yield _sliced(batch, slice(first, first + step))

    @property
    def _is_compiled(self) -> bool:
        return bool(self.a.compiled or self.b.compiled)

    @property
    def _in_training(self) -> bool:
        return any(side.net.model.training for side in (self.a, self.b))

    def _forward(self, side: Side, inputs: tuple[Any, ...], observers: Sequence[Observer]) -> Any:
        with ExitStack() as stack:
            stack.enter_context(random_states_kept())  # so all passes begin with the same
            stack.enter_context(buffers_kept(side.net.model))
            stack.enter_context(model_errors_as_input_errors(side.net.name, inputs))
            stack.enter_context(side.conditions())
            for observer in observers:
                stack.enter_context(observer)
            return side.net.model(*copied(inputs))

    # the first pass of each side: which calls there are

    def _pair(self, batch: PairedBatch) -> None:
        images = len(batch.names)
        names_a, names_b = (
            {name.partition("#")[0] for name in side if "*" not in name and OPERATION not in name}
            for side in (self.map_names, self.map_names.values())
        )
        named = [Selection.of_names(names_a)] if names_a else []
        usual = Selection(["all", *([EVERY_OPERATION] if self.ops else []), *named])
        chosen = Selection([self.layers or usual, *([] if self.keep is None else [self.keep])])
        look_a = self._look(self.a, batch.a, images, chosen)
        look_b = self._look(self.b, batch.b, images, None)
        singles = {seen.call.key for look in (look_a, look_b) for seen in look.seen if seen.call.order is not None}
        wanted = singles | look_a.chosen
        of_a = [seen for seen in look_a.seen if seen.call.key in wanted or seen.call.name in names_a]
        of_b = [seen for seen in look_b.seen if seen.call.key in wanted or seen.call.name in names_b]
        found = pair_calls(of_a, of_b, self.map_names)
        pairs = tuple(pair for pair in found.pairs if pair.a.key in look_a.chosen)
        if not (pairs or self.matrix) and (of_a or of_b):  # models of one layer have an input and an output
            raise nothing_pairs([seen for seen in of_a if seen.call.key in look_a.chosen], of_b)
        only_a = tuple(call for call in found.only_a if call.key in look_a.chosen)
        self.pairing = Pairing(pairs, only_a, found.only_b if self.layers is None else ())
        self.by_b = {pair.b.key: pair for pair in pairs}
        self.by_a = {pair.a.key: pair for pair in pairs}
        self.firsts = {(pair.first or pair.a).key: pair.a.key for pair in pairs}
        holders = {name for pair in pairs for name in itertools.islice(enclosing(pair.a.name), 1, None)}
        if self.alone:
            self.with_alone = {pair.a.key for pair in pairs if self._may_run_alone(pair, holders)}
        if self.matrix:
            self.matrix_a = {seen.call.key: seen.call for seen in of_a if seen.call.key in look_a.chosen}
            self.matrix_b = {seen.call.key: seen.call for seen in of_b}
            self.cka_sums = CkaSums(tuple(self.matrix_a), tuple(self.matrix_b))
        self.bytes = look_a.bytes / images
        self.sums = {INPUT: {}, **{pair.a.key: {} for pair in pairs}, MODEL: {}}

    def _may_run_alone(self, pair: Pair, holders: Container[str]) -> bool:
        """Whether B's layer runs by itself: no operation, and no block of other layers that are compared."""
        module = self.modules_b.get(pair.b.name)
        if module is None or pair.first_b is not None or pair.b.type in FUNCTIONAL:  # the hooked Identity adds nothing
            return False
        inner = (parameter for child in module.children() for parameter in child.parameters())
        return pair.a.name not in holders or next(inner, None) is None

    def _look(self, side: Side, inputs: tuple[Any, ...], images: int, chosen: Selection | None) -> _Look:
        """The calls of a pass; ``chosen`` are those whose outputs will be kept."""
        look, copies = _Look(), _Copies()
        calls: list[Call] = []

        def on_call(call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if call.name and tensors_in(output):
                parts = {part: shape_for_one(tensor, images) for part, tensor in tensors_in(output).items()}
                own = {} if isinstance(module, Operation) else dict(module.named_parameters(recurse=False))
                shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
                look.seen.append(SeenCall(side.named(call), parts.get("", parts), shapes))

        def on_chosen(call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            copies.of(([args, kwargs] if self.alone else [], output))
            calls.append(call)

        everything = Selection(["*", EVERY_OPERATION] if self.ops else "*")
        observers = [Observer(side.net.model, everything, self.types, on_call, ops=self.ops, ordered=True)]
        if chosen is not None:
            observers.append(Observer(side.net.model, chosen, self.types, on_chosen, ops=self.ops, ordered=True))
        kept: list[Call] = []
        if self.keep is not None and chosen is not None:
            observers.append(
                Observer(side.net.model, self.keep, self.types, lambda call, *_: kept.append(call), ops=self.ops)
            )
        self._forward(side, inputs, observers)
        if chosen is not None:
            look.chosen = {call.key for call in calls if call.name and observers[1].wanted(call)}
            look.bytes = copies.bytes
        self.kept_calls |= {call.key for call in kept if observers[-1].wanted(call)}
        return look

    # a batch

    def add(self, batch: PairedBatch) -> None:
        """Run both sides on a batch, and add what differs to the sums."""
        first = not self.names
        listed = self.a.net.family == "detection"
        inputs = [named_inputs(side, {}) for side in (batch.a, batch.b)]
        size = _size_of(batch.a)
        self._add(INPUT, None, None, inputs[0], inputs[1], batch.positions, size, listed)
        kept, output_a, grams_a = self._keep(batch)
        if first:
            self._measure_noise(batch, kept, output_a)
        for _, one, two, _ in _parts(inputs[0], inputs[1], batch.positions, False):
            self.evidence.add(*((one, two) if not listed else (one[None], two[None])))
        output_b, grams_b = self._compare(batch, kept, size)
        self._add(MODEL, None, None, output_a, output_b, batch.positions, size, listed)
        self.agreement.add(output_a, output_b, batch.positions, batch.names)
        if self.matrix:
            self.cka_sums.add([grams_a.get(key) for key in self.matrix_a], [grams_b.get(key) for key in self.matrix_b])
        self.names += batch.names
        self.sha256 += batch.sha256

    def _names_of(self, calls: Iterable[Call]) -> Selection:
        """The layers of ``calls``, all of whose calls are looked at: a later pass may make fewer than the first."""
        names = dict.fromkeys(call.name for call in calls)
        layers = [Selection.of_names([name for name in names if OPERATION not in name])] if names else []
        return Selection([*layers, EVERY_OPERATION] if self.ops else layers)

    def _observer(self, side: Side, calls: Iterable[Call], on_call: Any, on_input: Any = None) -> list[Observer]:
        calls = list(calls)
        if not any(OPERATION not in call.name for call in calls):
            return []
        more = {"ops": self.ops, "on_input": on_input}
        return [Observer(side.net.model, self._names_of(calls), None, on_call, **more)]

    def _keep(self, batch: PairedBatch) -> tuple[dict[str, _Kept], Any, dict[str, Tensor]]:
        """A pass of A: copies of the inputs and outputs of paired calls, its output, and grams for the matrix."""
        kept: dict[str, _Kept] = {}
        grams: dict[str, Tensor] = {}
        inputs: dict[str, tuple[Any, Any]] = {}
        copies = _Copies()
        names = {key.partition("#")[0] for key, last in self.firsts.items() if last in self.with_alone}
        wanted = {id(self.modules_a[name]) for name in names if name in self.modules_a}

        def on_input(module: Any, args: Any, kwargs: Any) -> Any:
            return copies.of((args, kwargs)) if id(module) in wanted else None

        def on_call(call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if self.matrix and call.key in self.matrix_a:
                _add_gram(grams, call.key, output, len(batch.names))
            if (last := self.firsts.get(call.key)) in self.with_alone and observers[0].input is not None:
                inputs[last] = observers[0].input
            if call.key in self.by_a:
                args, kwargs = inputs.pop(call.key, (None, {}))
                kept[call.key] = _Kept(module, args, kwargs, copies.of(output))

        calls = [call for pair in self.pairing.pairs for call in (pair.first, pair.a) if call is not None]
        if self.matrix:
            calls += self.matrix_a.values()
        observers = self._observer(self.a, calls, on_call, on_input)
        output = copied(self._forward(self.a, batch.a, observers))
        return kept, output, grams

    def _compare(self, batch: PairedBatch, kept: dict[str, _Kept], size: InputSize | None) -> tuple[Any, Any]:
        """A pass of B, whose calls are compared as they come; what was kept of A is dropped."""
        grams: dict[str, Tensor] = {}
        later: list[tuple[Pair, _Kept, Any, Any]] = []

        def on_call(call: Call, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if self.matrix and call.key in self.matrix_b:
                _add_gram(grams, call.key, output, len(batch.names))
            pair = self.by_b.get(call.key)
            of_a = kept.pop(pair.a.key, None) if pair is not None else None
            if pair is None or of_a is None:
                return
            key = pair.a.key
            self._add(key, of_a.module, module, of_a.output, output, batch.positions, size, False)
            if key in self.with_alone and of_a.args is not None:
                run = pair, of_a, module, (args, kwargs)
                if self.b.changes:  # whose hooks count the calls of this pass
                    later.append(run)
                else:
                    self._add_alone(*run, module.forward)

        calls = [pair.b for pair in self.pairing.pairs] + (list(self.matrix_b.values()) if self.matrix else [])
        output = self._forward(self.b, batch.b, self._observer(self.b, calls, on_call))
        if later:
            with self.b.conditions():
                for run in later:
                    self._add_alone(*run, run[2])
        return output, grams

    def _add(
        self,
        key: str,
        module_a: Any,
        module_b: Any,
        output_a: Any,
        output_b: Any,
        positions: Sequence[int],
        size: InputSize | None,
        listed: bool,
    ) -> None:
        """Add a pair of outputs of a batch to the sums of its parts."""
        for part, a, b, images in _parts(output_a, output_b, positions, listed):
            sums = self.sums[key].setdefault(part, PartSums())
            shapes = shape_for_one(a, len(images)), shape_for_one(b, len(images))
            if a.dim() > 1 and len(a) == len(b) == len(images):
                self.cka.setdefault((key, part), PairCka()).add(a, b)
            if a.shape != b.shape:
                if not sums.shapes_differ:
                    sums.shape_a, sums.shape_b = shapes
                sums.shapes_differ = True
                continue
            if not sums.shapes_differ:
                sums.shape_a, sums.shape_b = shapes
            sums.difference.add(a, b, images)
            if a.dim() > 1 and len(a) == len(images):
                for side, constant, module in ((a, sums.dead_a, module_a), (b, sums.dead_b, module_b)):
                    layer = module if isinstance(module, nn.Module) else None
                    if side.is_floating_point() or side.is_quantized:
                        constant.add(by_channel(_decoded(side), layer, size))
        if key in self.kept_calls and not any(maps.key.startswith(key) for maps in self.maps):
            self.maps += _compared_maps(key, module_a, module_b, output_a, output_b, positions[0], size)

    def _add_alone(self, pair: Pair, of_a: _Kept, module: Any, given: Any, forward: Callable[..., Any]) -> None:
        try:
            output = run_alone(forward, of_a.args or (), of_a.kwargs, given)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.with_alone.discard(pair.a.key)
            self.notes[f"{pair.b.key} of B does not run on the inputs of {pair.a.key} of A: {error}"] = None
            return
        for part, a, b, images in _parts(of_a.output, output, (0,), False):
            if a.shape == b.shape and part in self.sums[pair.a.key]:
                self.sums[pair.a.key][part].alone.add(a, b, images)

    def _measure_noise(self, batch: PairedBatch, kept: dict[str, _Kept], output: Any) -> None:
        """How far A is from itself: run again, and with its input changed by rounding.

        Where whole numbers are the input, such as tokens, the first numbers with fractions that come of them change.
        """
        listed = self.a.net.family == "detection"
        whole = not any(map(Tensor.is_floating_point, tensors_in(batch.a).values()))
        for inputs in (batch.a, map_tensors(batch.a, _rounded)):

            def on_call(call: Call, module: Any, args: Any, kwargs: Any, output: Any, again: Any = inputs) -> Any:
                if whole and again is not batch.a and not _has_fractions((args, kwargs)):
                    output = map_tensors(output, _rounded)
                if call.key in kept:
                    self._add_noise(call.key, kept[call.key].output, output, batch.positions, False)
                return output if whole else None

            calls = [pair.a for pair in self.pairing.pairs]
            again = self._forward(self.a, inputs, self._observer(self.a, calls, on_call))
            self._add_noise(MODEL, output, again, batch.positions, listed)
            named = named_inputs(batch.a, {}), named_inputs(inputs, {})
            self._add_noise(INPUT, *named, batch.positions, listed)

    def _add_noise(self, key: str, output: Any, again: Any, positions: Sequence[int], listed: bool) -> None:
        found: dict[str, DifferenceSums] = {}
        rounding: dict[str, float] = {}
        for part, a, b, images in _parts(output, again, positions, listed):
            sums = found.setdefault(part, DifferenceSums())
            if a.shape == b.shape:
                sums.add(a, b, images)
            else:
                sums.moved = np.inf  # as many boxes as rounding decides
            if a.is_floating_point() and key != INPUT:  # one rounding of another kernel, whatever the input
                rounding[part] = torch.finfo(a.dtype).eps / 2
        for part, sums in found.items():
            row = self.sums[key].setdefault(part, PartSums())
            measured = np.inf if sums.moved == np.inf else sums.relative_l2 or 0.0
            row.noise = max(row.noise or 0.0, measured, rounding.get(part, 0.0))

    # the result

    def comparison(self) -> Comparison:
        a, b = self.a.facts, self.b.facts
        rows = tuple(self._rows())
        only = self.pairing.only_a, self.pairing.only_b
        training = [sum(module.training for module in side.net.model.modules()) for side in (self.a, self.b)]
        for side, count in zip("AB", training, strict=True):
            if count:
                self.notes[f"{side} is in training mode: {counted(count, 'layer')}"] = None
        self.notes |= dict.fromkeys((*self.a.notes, *self.b.notes))
        if self.lost:
            self.notes[f"{counted(self.lost, 'image')} could not be used"] = None
        matrix = self.cka_sums.matrix(len(self.names)) if self.matrix else None
        provenance = {
            **package_versions(),
            "a": _provenance(self.a, a),
            "b": _provenance(self.b, b),
            "images": [
                {"image": os.path.basename(name), "sha256": sha256}
                for name, sha256 in zip(self.names, self.sha256, strict=True)
            ],
        }
        return Comparison(
            a,
            b,
            tuple(self.names),
            find_answer(rows, a, b, *only, self.evidence),
            rows,
            *only,
            self.agreement.result(),
            matrix,
            tuple(self.maps),
            provenance,
            tuple(self.notes),
        )

    def _rows(self) -> Iterator[PairedCall]:
        for key, parts in self.sums.items():
            pair = self.by_a.get(key)
            if pair is None:
                kinds = ("" if key == INPUT else type(side.net.model).__name__ for side in (self.a, self.b))
                pair = Pair(Call(key, next(kinds), 0, None), Call(key, next(kinds), 0, None), "name")
            for part, sums in parts.items():
                cka = self.cka.get((key, part))
                yield PairedCall(
                    pair.a,
                    pair.b,
                    part,
                    pair.how,
                    sums.shape_a,
                    sums.shape_b,
                    None if sums.shapes_differ else sums.difference.difference(),
                    sums.noise,
                    sums.alone.relative_l2 if sums.alone.values else None,
                    None if cka is None else cka.value,
                    sums.only_dead_in(sums.dead_a, sums.dead_b),
                    sums.only_dead_in(sums.dead_b, sums.dead_a),
                    self._change(pair, "named_parameters"),
                    self._change(pair, "named_buffers"),
                )

    def _own(self, pair: Pair, what: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters or buffers that both layers of a pair hold themselves, with the same name and shape."""
        names = ("" if call.name == MODEL else call.name for call in (pair.a, pair.b))
        layers = self.modules_a.get(next(names)), self.modules_b.get(next(names))
        if layers[0] is None or layers[1] is None or pair.how == "folded":
            return
        a, b = (dict(getattr(layer, what)(recurse=False)) for layer in layers)
        if a.keys() == b.keys() and all(a[name].shape == b[name].shape for name in a):
            yield from ((a[name], b[name]) for name in a)

    def _change(self, pair: Pair, what: str) -> float | None:
        sums = DifferenceSums()
        for a, b in self._own(pair, what):
            sums.add(a, b, (0,))
        return sums.relative_l2 if sums.values else None


def _parts(
    a: Any, b: Any, positions: Sequence[int], listed: bool
) -> Iterator[tuple[str, Tensor, Tensor, Sequence[int]]]:
    """The tensors of both outputs that belong together, and the images that they are of.

    ``listed`` outputs are lists with an item for each image, such as those of a detector. Parts belong together by
    name, or by position if no name is on both sides.
    """
    if listed and isinstance(a, list) and isinstance(b, list) and len(a) == len(b) == len(positions):
        for one, two, position in zip(a, b, positions, strict=True):
            yield from _parts(one, two, (position,), False)
        return
    of_a, of_b = tensors_in(a), tensors_in(b)
    common = [name for name in of_a if name in of_b]
    if common:
        yield from ((name, of_a[name], of_b[name], positions) for name in common)
        return
    for (name, one), two in zip(of_a.items(), of_b.values(), strict=False):
        yield name, one, two, positions


def _add_gram(grams: dict[str, Tensor], key: str, output: Any, images: int) -> None:
    tensor = next(iter(tensors_in(output).values()), None)
    if tensor is not None and tensor.dim() and len(tensor) == images:
        grams[key] = gram(tensor)


def _has_fractions(value: Any) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors_in(value).values())


def _decoded(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if tensor.is_quantized else tensor


def _rounded(tensor: Tensor) -> Tensor:
    """``tensor`` with each value changed by about one unit in the last place, up or down."""
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(2, tensor.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    step = torch.finfo(tensor.dtype).eps * signs.to(tensor.device)
    return (tensor.double() * (1 + step.double())).to(tensor.dtype) if tensor.device.type != "mps" else tensor


def _sliced(batch: PairedBatch, part: slice) -> PairedBatch:
    if len(batch.names[part]) == len(batch.names):
        return batch
    a, b = (tuple(value[part] for value in inputs) for inputs in (batch.a, batch.b))
    return PairedBatch(batch.positions[part], batch.names[part], batch.sha256[part], a, b)


def _size_of(inputs: tuple[Any, ...]) -> InputSize | None:
    """The size of the images of a batch, None for other inputs."""
    tensor = next(iter(tensors_in(inputs).values()), None)
    if tensor is None or tensor.dim() < 3 or (isinstance(inputs[0], Tensor) and tensor.dim() < 4):
        return None
    return input_size_of(tensor[0] if isinstance(inputs[0], Tensor) else tensor)


def _compared_maps(
    key: str, module_a: Any, module_b: Any, output_a: Any, output_b: Any, image: int, size: InputSize | None
) -> Iterator[ComparedMaps]:
    """The maps of the first image of a batch, of the channels that changed most."""
    modules = (module if isinstance(module, nn.Module) else None for module in (module_a, module_b))
    try:
        sides = [maps_or_vectors(output, m, size) for output, m in zip((output_a, output_b), modules, strict=True)]
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
        yield ComparedMaps(label, image, tuple(channels.tolist()), drawn[0], drawn[1], drawn[2])


def _provenance(side: Side, facts: SideFacts) -> dict[str, Any]:
    file = side.net.checkpoint
    checkpoint = None
    if file and os.path.isfile(file):
        with open(file, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        checkpoint = {"file": os.path.basename(file), "sha256": digest}
    named = {name: getattr(facts, name) for name in SideFacts.__slots__}
    return {**named, "checkpoint": checkpoint, "seed": None if file else side.net.seed}
