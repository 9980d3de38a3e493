"""The engine of an inspection: one forward and one backward pass for each image."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.comparison import against_reference
from hookscope.display import RowTuple
from hookscope.drawing import input_frames, input_size_of, layers_of_classes, names_of_channels
from hookscope.errors import (
    AbsentTargetError,
    InputError,
    ModelError,
    NoMapError,
    UsageError,
    is_out_of_memory,
    spelled,
)
from hookscope.explain import candidates
from hookscope.findings import ranked
from hookscope.hooks import (
    MODEL,
    Call,
    InputSize,
    Layers,
    Observer,
    Selection,
    class_names,
    differentiable,
    enclosing,
    is_leaf,
    leaves_of,
    matches_type,
    output_of,
    passed_on,
    tensors_in,
    types_of,
)
from hookscope.images import AnyImage, InputImage, as_picture, list_pictures, warn_of_image
from hookscope.inspection.answers import answer_of
from hookscope.inspection.facts import ImageMaps, InspectedImage, InspectedLayer, Inspection, InspectionEvidence
from hookscope.inspection.places import find_places
from hookscope.inspection.recorder import PassRecord, Recorder, call_facts
from hookscope.jobs import picture_of
from hookscope.models import LoadedModel, as_loaded, describe_error, model_errors_as_input_errors, package_versions
from hookscope.parameters import drawable_filters, parameter_findings, parameter_statistics
from hookscope.scores import (
    Prediction,
    Score,
    Target,
    check_family,
    check_finite_score,
    class_scores,
    is_distribution,
    objectives,
    one_picture,
    predictions,
    without_scores,
)
from hookscope.statistics import SavedStatistics, StatisticsCollector, StatisticsThresholds, as_reference, find_problems
from hookscope.system import StrPath
from hookscope.tracing import trace

_SHOWN = "top:5"
_LAST_FEW = 16  # maps that are tried for the Grad-CAM of an image
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def inspect(
    net: LoadedModel | nn.Module,
    images: AnyImage | Iterable[AnyImage],
    layers: Layers | None = None,
    *,
    types: Iterable[Any] | None = None,
    also: Iterable[str] = (),
    target: Any = "top:1",
    categories: Sequence[str] | None = None,
    reference: SavedStatistics | StrPath | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_phase: Callable[[str], None] | None = None,
    on_note: Callable[[str, str], None] = warn_of_image,
) -> Inspection:
    """What a model did with some images, and where to look first.

    Each image takes one forward pass, and one backward pass from the score of its best class. Outputs are reduced in
    the hooks of their layers, before a later layer can overwrite them. The model runs in eval mode; its modes, flags,
    ``.grad``, buffers, hooks and the random state stay as they are.

    Args:
        net: What `load_model` returns, or any eager module.
        images: Files, PIL images or `InputImage`; one, or several.
        layers: The calls whose maps are kept, as `capture` takes them. By default every convolution; where these do
            less than half of the multiply-accumulates, also each block of the network.
        types: Class names that indices in ``layers`` count; None for Conv2d (Conv3d in models of clips).
        also: Names of further layers whose maps are kept, such as those that have exemplars.
        target: The class that is explained: its index, its name, or ``top:1`` for the best of each image.
        categories: Names of the classes; None for the names in ``net``.
        reference: Saved statistics with ranges, or their file: the first place is the first call that left its range.
        on_progress: Called as ``on_progress(done, total)`` after each image.
        on_phase: Called with the words for each part of the work that begins.
        on_note: Called with name and text of a note about an image; warns by default.

    Returns:
        The `Inspection`: predictions and Grad-CAM of each image, places to look at, numbers of every call, maps of the
        chosen calls with gradient × activation of each channel, findings, and provenance.

    Raises:
        ImageError: an image cannot be read.
        InputError: the model refuses an image; the reference has no ranges, or cannot be read.
        LayerError: the model has no such layer or type.
        ModelError: for scripted and compiled models, where hooks do not fire.
        TargetError: no such class.
        UsageError: there is no image.

    Example:
        >>> import torch
        >>> from PIL import Image
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        >>> found = inspect(net, Image.new("RGB", (8, 8), "red"))
        >>> [layer.key for layer in found.layers], found.layers[0].images[0].tiles.levels.shape
        (['0'], (4, 222, 222))
    """
    loaded = as_loaded(net)
    names = loaded.categories if categories is None else tuple(categories)
    loaded = replace(loaded, categories=names)
    frames = loaded.preprocess.frames
    input_images = list(_distinct([as_picture(image, frames) for image in list_pictures(images)], on_note))
    if not input_images:
        raise UsageError("there is no image to inspect", do="give a file or a PIL image")
    wanted = Target.of(target)
    wanted.check(names)
    begin = on_phase or (lambda phase: None)
    begin("listing the calls of the network")
    run = InspectionRun(loaded, input_images, layers, types, wanted, tuple(also), reference)
    begin("running the network")
    for number in range(len(input_images)):
        run.add_image(number)
        if on_progress is not None:
            on_progress(number + 1, len(input_images))
    begin("finding where to look")
    return run.inspection()


def _distinct(input_images: Sequence[InputImage], on_note: Callable[[str, str], None]) -> Iterator[InputImage]:
    """Each image once: equal images would look like a network that does not depend on its input."""
    known: set[str] = set()
    for number, image in enumerate(input_images):
        pixels = (frame.tobytes() for frame in image.frames if not image.sha256)  # of an image without a file
        content = image.sha256 or f"{image.image.size} {hashlib.sha256(b''.join(pixels)).hexdigest()}"
        if content in known:
            on_note(image.name or f"image {number}", "left out: an earlier image has the same content")
            continue
        known.add(content)
        yield image


class InspectionRun:
    def __init__(
        self,
        net: LoadedModel,
        input_images: Sequence[InputImage],
        layers: Layers | None,
        types: Iterable[Any] | None,
        target: Target,
        also: Sequence[str] = (),
        reference: SavedStatistics | StrPath | None = None,
    ) -> None:
        self.net, self.input_images, self.target = net, input_images, target
        self.reference = None if reference is None else as_reference(reference)
        self.types = tuple(types) if types else None
        self.inputs = tuple((net.prepare(image),) for image in input_images)
        first = net.inputs(*self.inputs[0])
        # a detector needs values in the middle of a pass
        self.whole = trace(net.model, first, on_meta=net.family != "detection", name=net.name, sources=True)
        self.trace = self.whole.without_operations()
        # layers with layers inside that are members of a Sequential or of a list of modules
        members = [(name, module) for name, module in net.model.named_modules() if name and not is_leaf(module)]
        around = {name: net.model.get_submodule(name.rpartition(".")[0]) for name, _ in members}
        blocks = (name for name, module in members if type(module) not in _CONTAINERS)
        self.blocks = [name for name in blocks if isinstance(around[name], _CONTAINERS)]
        self.chosen = layers is not None
        self.selection = self._usual() if layers is None else Selection.of(layers)
        if also:
            self.selection = Selection([self.selection, Selection.of_names(also)])
        self.followed = self._last_maps(input_size_of(self.inputs[0][0]))
        self.collector = StatisticsCollector(net.model, ranges=reference is not None)
        self.records: list[PassRecord] = []
        self.images: list[InspectedImage] = []
        self.scores: list[Tensor | None] = []
        self.softmax = False

    def _usual(self) -> Selection:
        """Every convolution, and the blocks of other layers where convolutions are a minor part of the network."""
        usual, _ = types_of(self.net.model, self.types)
        whole: Counter[str] = Counter()  # multiply-accumulates of each layer with the layers in it
        other: Counter[str] = Counter()  # and without convolutions
        ran = False
        for call in self.trace.calls:
            layer = self.trace.layers[call.layer]
            convolves = matches_type(layer.types, usual, layer.leaf)
            ran = ran or convolves
            for name in enclosing(layer.name):
                whole[name] += call.macs
                other[name] += 0 if convolves else call.macs
        minor = not ran or 2 * other[""] > whole[""]
        blocks = [name for name in self.blocks if minor and 2 * other[name] > whole[name]]
        chosen = ([Selection("0:")] if ran else []) + ([Selection.of_names(blocks)] if blocks else [])
        return Selection(chosen or "all")

    def _last_maps(self, size: InputSize) -> list[str]:
        """The last few calls with a map: `class_activation_maps` takes the last one that the score depends on."""
        numbers: Counter[int] = Counter()
        outputs = []
        for traced in self.trace.calls:
            layer = self.trace.layers[traced.layer]
            call = Call(layer.name, layer.type, numbers[traced.layer], None)
            numbers[traced.layer] += 1
            shapes = traced.output_shape if isinstance(traced.output_shape, dict) else {"": traced.output_shape or ()}
            output = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
            outputs.append((call, output.get("", output)))
        last = candidates(self.net.model, reversed(outputs), size)
        return list(dict.fromkeys(layer.call.key for layer in last))[:_LAST_FEW]

    def add_image(self, number: int) -> None:
        net, image, prepared = self.net, self.input_images[number], self.inputs[number]
        why = family = _no_scores(net)
        with differentiable(net.model):
            try:
                with torch.set_grad_enabled(not family):
                    recorder, output = self._forward(number)
            except (InputError, ModelError) as error:
                if family:
                    raise
                with torch.no_grad():  # a model may fail only because a gradient is asked for
                    recorder, output = self._forward(number)
                why = error.asked
            scores, answers, best = self._answers(output) if not family else (None, (), None)
            score: Tensor | None = None if scores is None or best is None else scores[best.index]
            label: Score | None = best
            answer = answer_of(output, net, prepared[0])
            is_map = answer is not None and answer.kind == "pixels"
            if scores is None and is_map and not why:
                score, label, why = self._of_a_named_class(output)
            if score is None:
                if answer is not None and answer.kind == "boxes":
                    why = spelled("to explain a box, use ‹BoxTarget(0)|cam --target box:0›")
                why = why or without_scores(output, net.family, net.name)
            elif label is not None and not why:
                why = self._explain(score, label, recorder)
        cam = None if label is None or why else recorder.cam(label, is_map)
        if cam is None:
            why = why or "no layer has a map that the score depends on"
        frames = input_frames(net, prepared)[0]
        about = image.name, image.sha256, frames[len(frames) // 2], len(frames)
        self.images.append(InspectedImage(*about, answers, cam, "" if cam else why, answer))
        self.scores.append(None if scores is None else scores.detach()[None])
        recorder.record.layers = tuple(part.facts for part in recorder.drawn)
        self.records.append(recorder.record)

    def _forward(self, number: int) -> tuple[Recorder, Any]:
        """One pass with hooks of every call, of drawn calls, and of the statistics, which see what these hand on."""
        net, prepared = self.net, self.inputs[number]
        recorder = Recorder(input_size_of(prepared[0]), self.blocks, self.followed, self.collector.unseen)

        def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return recorder.on_call(call, module, args, kwargs, output, everything.input)

        everything = Observer(net.model, "*", self.types, on_call, on_input=recorder.on_input, ordered=True)
        drawn = Observer(net.model, self.selection, self.types, recorder.on_drawn, ordered=True)
        self.collector.name_images([self.input_images[number].name or str(number)])
        with model_errors_as_input_errors(net.name, prepared):
            inputs = passed_on(leaves_of(net.inputs(*prepared)))
            with everything, drawn, self.collector:
                output = output_of(net.model, *inputs)
        recorder.drawn = [part for part in recorder.drawn if drawn.wanted(part.call)]
        return recorder, output

    def _answers(self, output: Any) -> tuple[Tensor | None, tuple[Prediction, ...], Prediction | None]:
        """The scores ``(K,)``, the best classes and the explained one; nothing for an output without scores."""
        self.softmax = any(map(is_distribution, tensors_in(output).values()))
        if without_scores(output, self.net.family, self.net.name):
            return None, (), None
        scores, names = one_picture(class_scores(output, self.net.name)), self.net.categories
        [label, *_] = predictions(scores, names, self.target)
        return scores, tuple(predictions(scores, names, Target(_SHOWN))), label

    def _of_a_named_class(self, output: Any) -> tuple[Tensor | None, Score | None, str]:
        """The score of the class of ``target`` where it is the best, if it has a name or number; else what to do."""
        if self.target.has_top:
            return None, None, spelled("to explain a class, try ‹target=1|--target 1›")
        try:
            [objective] = objectives(self.target, output, self.net.categories, self.net.name)
        except AbsentTargetError as error:
            return None, None, error.asked
        return objective.of(output)[0], objective.score, ""

    def _explain(self, score: Tensor, label: Score, recorder: Recorder) -> str:
        """Let the gradient of the score reach the hooks of all tensors that it depends on, or say why it cannot."""
        try:
            check_finite_score(label)
            if not score.requires_grad:
                return f"no gradient can flow through {self.net.name}"
            if recorder.waiting:  # most tensors lie between the first one and the score
                torch.autograd.grad(score, recorder.waiting[:1], retain_graph=True, allow_unused=True)
            if recorder.waiting:
                torch.autograd.grad(score, recorder.waiting, allow_unused=True)
        except InputError as error:
            return error.asked
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return f"no gradient can flow through {self.net.name}: {describe_error(error)}"
        return ""

    def inspection(self) -> Inspection:
        net = self.net
        layers = tuple(self._layers())
        if not layers and self.chosen:
            reasons = [(key, why) for record in self.records for key, why in record.without_map.items()]
            key, why = reasons[0] if reasons else ("", "no chosen layer ran")
            raise NoMapError(f"nothing to draw in {key or MODEL}: {why}", do="choose a layer with feature maps")
        totals, thresholds = self.collector.totals, StatisticsThresholds()
        measured = tuple(totals.statistics(thresholds.correlation))
        parameters = tuple(parameter_statistics(net.model))
        findings = find_problems(measured, totals.drifts(), totals.images, thresholds, net.preprocess.assumes_values)
        changed = dict.fromkeys(key for record in self.records for key in record.changes)
        totals.pictures.extend(picture_of(image.sha256) for image in self.input_images if image.sha256)
        against = against_reference(SavedStatistics.of(net, totals), self.reference) if self.reference else None
        evidence = InspectionEvidence(
            net=net,
            inputs=self.inputs,
            images=tuple(self.images),
            scores=tuple(self.scores),
            softmax=self.softmax,
            calls=tuple(call_facts(self.trace, self.records, {layer.call.key for layer in layers})),
            layers=layers,
            totals=totals,
            statistics=measured,
            parameters=parameters,
            findings=tuple(ranked([*findings, *parameter_findings(parameters)])),
            trace=self.whole,
            pictures=tuple(image.image for image in self.input_images),
            against=against,
            changes={key: np.array([record.changes.get(key, np.nan) for record in self.records]) for key in changed},
        )
        return Inspection(
            model=net.name,
            weights=net.weights,
            images=RowTuple(evidence.images),
            places=RowTuple(find_places(evidence)),
            calls=RowTuple(evidence.calls),
            layers=RowTuple(layers),
            findings=RowTuple(evidence.findings),
            provenance=self._provenance(),
            notes=tuple(dict.fromkeys([*self._notes(), *([against.sentence] if against else [])])),
            trace=self.whole,
            against=against,
        )

    def _layers(self) -> Iterator[InspectedLayer]:
        """The drawn parts, each with its maps of every image, in order of execution."""
        by_key: dict[str, tuple[InspectedLayer, list[ImageMaps | None]]] = {}
        for number, record in enumerate(self.records):
            for layer in record.layers:
                _, images = by_key.setdefault(layer.key, (layer, [None] * len(self.records)))
                images[number] = layer.images[0]
        modules = dict(self.net.model.named_modules())
        of_classes = layers_of_classes(self.net.model, self.net.categories or ())
        first = next((module for module in modules.values() if "_ConvNd" in class_names(module)), None)
        for layer, images in by_key.values():
            module = modules[layer.call.name]
            names = tuple(names_of_channels(self.net, layer.call, module)) if module in of_classes else ()
            width = max(len(maps.mean) for maps in images if maps is not None)
            filters = drawable_filters(module, module is first)
            names = names if len(names) == width else ()
            yield replace(layer, images=tuple(images), filters=filters, names=names)

    def _provenance(self) -> dict[str, Any]:
        """Versions, model, weights, preprocessing and images; the command line is added by the command."""
        net = self.net
        return {
            **package_versions(),
            "command": None,
            "model": net.name,
            "weights": net.weights,
            "checkpoint": _checkpoint(net.checkpoint),
            "seed": None if net.checkpoint else net.seed,
            "preprocess": net.preprocess.describe(),
            "images": [{"image": os.path.basename(image.name), "sha256": image.sha256} for image in self.input_images],
        }

    def _notes(self) -> Iterator[str]:
        yield from self.net.notes
        if not self.collector.totals.batch_norms and not self.reference:
            yield spelled(
                "no BatchNorm: only ‹reference=|--reference› can tell whether layers get values as in training, and"
                " whether images are prepared as there"
            )
        for image in self.input_images:
            yield from (f"{image.name}: {note}" for note in image.notes)
        for record in self.records:
            yield from (f"{key or MODEL} is not drawn: {why}" for key, why in record.without_map.items())


def _no_scores(net: LoadedModel) -> str:
    """Why a model of this family has no score for each class; empty if it may have."""
    try:
        check_family(net.family, net.name)
    except ModelError as error:
        return error.asked
    return ""


def _checkpoint(path: str) -> dict[str, str] | None:
    """The file of the weights and its SHA-256; None if there is none, or if it is a folder."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return {"file": os.path.basename(path), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
