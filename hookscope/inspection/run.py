"""The engine of an inspection: one forward and one backward pass for each image."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from hookscope.drawing import input_frames, input_size_of
from hookscope.errors import HookscopeError, LayerError, UsageError
from hookscope.explain import ClassActivationMap
from hookscope.findings import ranked
from hookscope.hooks import (
    InputSize,
    Layers,
    Observer,
    Selection,
    call_key,
    differentiable,
    is_leaf,
    leaves_of,
    matches_type,
    passed_on,
    types_of,
)
from hookscope.images import InputImage, read_picture
from hookscope.inspection.evidence import Evidence
from hookscope.inspection.facts import CallFacts, InspectedImage, InspectedLayer, Inspection
from hookscope.inspection.recorder import DrawnPart, Recorder
from hookscope.models import LoadedModel, WeightsMetadata, model_errors_as_input_errors, package_versions
from hookscope.parameters import parameter_findings, parameter_statistics
from hookscope.scores import (
    Prediction,
    Target,
    check_family,
    check_finite_score,
    class_scores,
    one_picture,
    predictions,
)
from hookscope.statistics import StatisticsCollector, StatisticsThresholds, find_problems
from hookscope.tracing import Trace, rows_of_type, trace

Picture = str | os.PathLike[str] | InputImage | Image.Image

_SHOWN = "top:5"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def inspect(
    net: LoadedModel | nn.Module,
    images: Picture | Iterable[Picture],
    layers: Layers | None = None,
    *,
    types: Iterable[Any] | None = None,
    target: Any = "top:1",
    categories: Sequence[str] | None = None,
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
        target: The class that is explained: its index, its name, or ``top:1`` for the best of each image.
        categories: Names of the classes; None for those of ``net``.

    Returns:
        The `Inspection`: predictions and Grad-CAM of each image, places to look at, numbers of every call, maps of the
        chosen calls with gradient × activation of each channel, findings, and provenance.

    Raises:
        ImageError: an image cannot be read.
        InputError: the model refuses an image.
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
    loaded = net if isinstance(net, LoadedModel) else _as_loaded(net)
    names = loaded.categories if categories is None else tuple(categories)
    loaded = replace(loaded, categories=names)
    pictures = [_read(picture, loaded) for picture in _listed(images)]
    if not pictures:
        raise UsageError("there is no image to inspect", do="give a file or a PIL image")
    run = _Run(loaded, pictures, layers, types, Target.of(target))
    return run.inspection()


def _as_loaded(model: nn.Module) -> LoadedModel:
    loaded = LoadedModel.of(model, type(model).__name__, "as given", WeightsMetadata())
    device = next((str(parameter.device) for parameter in model.parameters()), "cpu")
    return replace(loaded, device=device, preprocess=replace(loaded.preprocess, device=device))


def _listed(images: Picture | Iterable[Picture]) -> list[Picture]:
    return [images] if isinstance(images, str | os.PathLike | InputImage | Image.Image) else list(images)


def _read(picture: Picture, net: LoadedModel) -> InputImage:
    if isinstance(picture, InputImage):
        return picture
    if isinstance(picture, Image.Image):
        still = picture.convert("RGB")
        return InputImage(still, "", "", (), (still,))
    return read_picture(picture, frames=net.preprocess.frames)


class _Run:
    """One inspection: the images one after another, then what all of them say together."""

    def __init__(
        self,
        net: LoadedModel,
        pictures: Sequence[InputImage],
        layers: Layers | None,
        types: Iterable[Any] | None,
        target: Target,
    ) -> None:
        self.net, self.pictures, self.target = net, pictures, target
        self.types = tuple(types) if types else None
        target.check(net.categories)
        self.inputs = tuple((net.prepare(picture),) for picture in pictures)
        model = net.model
        self.trace = trace(model, net.inputs(*self.inputs[0]), name=net.name).without_operations()
        self.blocks = [name for name, module in _blocks(model)]
        self.selection = Selection.of(layers) if layers is not None else self._usual()
        self.collector = StatisticsCollector(model)
        self.recorder = Recorder(self.blocks, self.collector.unseen)
        self.images: list[InspectedImage] = []
        self.scores: list[Tensor | None] = []
        self.drawn: dict[tuple[str, str], list[DrawnPart | None]] = {}

    def _usual(self) -> Selection:
        """Every convolution, and the blocks where convolutions are a minor part."""
        usual, _ = types_of(self.net.model, self.types)
        layers = self.trace.layers
        convolves = [matches_type(layer.types, usual, layer.leaf) for layer in layers]
        macs = sum(call.macs for call in self.trace.calls if convolves[call.layer])
        ran = any(convolves[call.layer] for call in self.trace.calls)
        chosen: list[Selection] = [Selection.of("0:")] if ran else []
        if macs < self.trace.macs / 2 or not ran:
            names = {layers[call.layer].name for call in self.trace.calls}
            chosen.append(Selection.of_names([name for name in self.blocks if name in names]))
        return Selection(chosen)

    def inspection(self) -> Inspection:
        for number in range(len(self.pictures)):
            self._pass(number)
        return self._result()

    @contextmanager
    def _hooks(self) -> Iterator[Observer]:
        """The hooks: of every call, of drawn calls, and of the statistics, which see what the others hand on."""
        everything = Observer(
            self.net.model,
            "*",
            self.types,
            lambda call, module, args, kwargs, output: self.recorder.on_call(call, module, output, everything.input),
            on_input=self.recorder.on_input,
            ordered=True,
        )
        drawn = Observer(self.net.model, self.selection, self.types, self.recorder.on_drawn, ordered=True)
        with ExitStack() as stack:
            for each in (everything, drawn, self.collector):
                stack.enter_context(each)
            yield drawn

    def _pass(self, number: int) -> None:
        net, picture, prepared = self.net, self.pictures[number], self.inputs[number]
        self.recorder.start(input_size_of(prepared[0]))
        self.collector.name_images([picture.name or str(number)])
        answers: tuple[Prediction, ...] = ()
        why, score, label = "", None, None
        self.scores.append(None)
        with model_errors_as_input_errors(net.name, prepared), differentiable(net.model):
            inputs = passed_on(leaves_of(net.inputs(*prepared)))
            with self._hooks() as drawn:
                output = net.model(*inputs)
            try:
                check_family(net.family, net.name)
                scores = one_picture(class_scores(output, net.name))
                self.scores[number] = scores.detach()[None]
                answers = tuple(predictions(scores, net.categories, Target(_SHOWN)))
                label = predictions(scores, net.categories, self.target)[0]
                check_finite_score(label)
                score = scores[label.index]
            except (HookscopeError, UsageError) as error:
                why = error.asked
            if score is not None:
                self._backward(score)
        frames = input_frames(net, prepared)[0]
        size = self.recorder.size or InputSize(*frames[0].size[::-1])
        cam = self._cam(label, size) if label is not None and not why else None
        if cam is None and not why:
            why = "no drawn layer has a map that the score depends on"
        self.images.append(
            InspectedImage(
                picture.name, picture.sha256, frames[len(frames) // 2], len(frames), answers, cam, "" if cam else why
            )
        )
        for (call, part), found in self.recorder.drawn.items():
            if drawn.wanted(call):
                images = self.drawn.setdefault((call.key, part), [None] * len(self.pictures))
                images[number] = found
        self.recorder.start(None)

    def _backward(self, score: Tensor) -> None:
        """The gradients of ``score`` reach the hooks of all drawn tensors that it depends on."""
        tensors = [tensor for _, tensor, *_ in self.recorder.pending.values()]
        if tensors and score.requires_grad:
            torch.autograd.grad(score, tensors, allow_unused=True)

    def _cam(self, label: Prediction, size: InputSize) -> ClassActivationMap | None:
        parts = [part for part in self.recorder.drawn.values() if part.cam is not None and part.maps.items == 1]
        last = next((part for part in reversed(parts) if part.reached), parts[-1] if parts else None)
        if last is None or last.cam is None:
            return None
        values = last.cam
        if last.maps.frames > 1:
            values = values.reshape(len(values), last.maps.frames, -1).transpose(1, 0, 2)
        seen = (size.height, size.width)
        channels, unreached = last.maps.values.shape[0], not last.reached
        return ClassActivationMap(last.call, label, "gradcam", values, channels, seen, unreached)

    def _result(self) -> Inspection:
        net = self.net
        layers = tuple(_layer(parts, len(self.pictures)) for parts in self.drawn.values())
        if not layers:
            first = next(iter(self.recorder.without_map.items()), ("no layer", "nothing was chosen"))
            raise LayerError(f"nothing to draw: {first[0]}", first[1], "choose a layer with feature maps")
        calls = tuple(_call_facts(self.trace, self.recorder, {layer.call.key for layer in layers}))
        totals = self.collector.totals
        thresholds = StatisticsThresholds()
        measured = tuple(totals.statistics(thresholds.correlation))
        assumed = "values" in net.preprocess.assumed
        parameters = tuple(parameter_statistics(net.model))
        findings = find_problems(measured, totals.drifts(), totals.images, thresholds, assumed)
        findings = ranked([*findings, *parameter_findings(parameters)])
        evidence = Evidence(
            net=net,
            inputs=self.inputs,
            images=tuple(self.images),
            scores=tuple(self.scores),
            calls=calls,
            layers=layers,
            totals=totals,
            statistics=measured,
            coverage=self.collector.coverage,
            parameters=parameters,
            findings=tuple(findings),
            changes={key: np.array(values) for key, values in self.recorder.changes.items()},
            block_means={key: np.array(values) for key, values in self.recorder.block_means.items()},
        )
        return Inspection(
            model=net.name,
            weights=net.weights,
            images=evidence.images,
            places=_places(evidence),
            calls=calls,
            layers=layers,
            findings=evidence.findings,
            provenance=self._provenance(),
            notes=tuple(self._notes()),
        )

    def _provenance(self) -> dict[str, Any]:
        images = [{"image": os.path.basename(each.name), "sha256": each.sha256} for each in self.pictures]
        about = {"model": self.net.name, "weights": self.net.weights, "preprocess": self.net.preprocess.describe()}
        return {**package_versions(), **about, "images": images, "command": None}

    def _notes(self) -> Iterator[str]:
        yield from self.net.notes
        for key, reason in self.recorder.without_map.items():
            yield f"{key} is not drawn: {reason}"


def _places(evidence: Evidence) -> tuple[Any, ...]:
    try:
        from hookscope.inspection.places import find_places  # type: ignore
    except ImportError:
        return ()
    return tuple(find_places(evidence))


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers with layers inside that are members of a Sequential or of a list of modules."""
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        if name and not is_leaf(module) and isinstance(parent, _CONTAINERS) and type(module) not in _CONTAINERS:
            yield name, module


def _layer(parts: Sequence[DrawnPart | None], count: int) -> InspectedLayer:
    first = next(part for part in parts if part is not None)
    images = tuple(None if part is None else part.facts for part in parts)
    return InspectedLayer(first.call, first.maps.label, first.maps.axes, first.maps.frames, images)


def _call_facts(traced: Trace, recorder: Recorder, drawn: set[str]) -> Iterator[CallFacts]:
    """The numbers of every call of a single layer and of each drawn block, in order of execution."""
    rows = {call_key(row.name, row.call): row for row in rows_of_type(traced, ("all",)) if row.call is not None}
    for key, numbers in recorder.numbers.items():
        row = rows.get(key)
        if row is None and numbers.call.order is None and key not in drawn:
            continue
        total = numbers.count + numbers.nonfinite
        yield CallFacts(
            numbers.call,
            numbers.shape,
            row.params if row else 0,
            row.macs if row else 0,
            numbers.low if numbers.count else None,
            numbers.total / numbers.count if numbers.count else None,
            numbers.high if numbers.count else None,
            numbers.zeros / total if total else None,
            numbers.nonfinite,
            numbers.histogram,
        )
