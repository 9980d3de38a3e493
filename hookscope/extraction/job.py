"""Features of a batch: the job that an engine runs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.drawing import input_size_of
from hookscope.errors import InputError, LayerError, UsageError
from hookscope.extraction.facts import FeatureBatch
from hookscope.findings import listed
from hookscope.hooks import (
    MODEL,
    Call,
    InputSize,
    Layers,
    Observer,
    Selection,
    as_plain,
    by_channel,
    channel_axis,
    evaluating,
    key_of,
    output_of,
    tensors_in,
    token_grid,
)
from hookscope.images import label_of
from hookscope.models import Batch, LoadedModel
from hookscope.scores import Target, class_label, class_scores, probabilities

_ADVICE = "choose the block around the layer, or one image for each pass (‹batch_size=1|--batch-size 1›)"


def pooled(tensor: Tensor, images: int, pool: str, module: nn.Module | None, shown: InputSize, key: str) -> Tensor:
    """One row for each of the ``images``, whose axis is the first one, as `extract` describes."""
    if not tensor.dim() or len(tensor) != images:
        text = "x".join(map(str, tensor.shape)) or "one value"
        exists = f"its output is {text} for {images} images"
        raise LayerError(f"{key} has no row for each image", exists, _ADVICE, name=key)
    rows = as_plain(tensor)
    if pool == "none":
        return rows
    if pool == "flatten":
        return rows.reshape(images, -1)
    axis = (channel_axis(rows, module, shown) or 1) if rows.dim() > 2 else 1
    grid = token_grid(rows.shape[1], shown) if rows.dim() == 3 and axis == 2 else None
    if pool == "cls":
        return _class_token(rows, grid, key)
    if rows.dim() < 3:
        return rows
    values = rows.movedim(axis, 1).flatten(2)
    return _reduced(values if grid is None else values[:, :, grid[0] :], pool)


def pooled_whole(tensor: Tensor, pool: str, module: nn.Module | None, shown: InputSize, key: str) -> Tensor:
    """One row ``(1, ...)`` for the only image of a pass, to which the whole tensor belongs, such as all its boxes."""
    whole = as_plain(tensor)[None]
    if pool == "none":
        return whole
    if pool == "flatten" or whole.dim() < 2:
        return whole.reshape(1, -1)
    if pool == "cls":
        return _class_token(whole, None, key)
    if whole.dim() == 2:  # a value for each box
        return _reduced(whole[:, None], pool)[:, 0]
    return _reduced(by_channel(whole[0], module, shown).transpose(0, 1).flatten(1)[None], pool)


def _class_token(rows: Tensor, grid: tuple[int, int, int, int] | None, key: str) -> Tensor:
    if grid is None or not grid[0]:
        exists = f"its output is {'x'.join(map(str, rows.shape[1:])) or 'one value'} for each image"
        raise LayerError(f"{key} has no class token", exists, "pool by mean or max", name=key)
    return rows[:, 0]


def _reduced(values: Tensor, pool: str) -> Tensor:
    """The mean or the largest of the positions of ``(N, C, positions)``; NaN where there is no position."""
    if not values.is_floating_point():
        values = values.double()
    if not values.shape[2]:
        return values.new_full(values.shape[:2], torch.nan)
    return values.amax(2) if pool == "max" else values.mean(2)


def converted(tensor: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, int]:
    """A copy on the CPU, floats in ``dtype`` or their own (float32 for bfloat16), and how many values became Inf."""
    if not tensor.is_floating_point():
        dtype = tensor.dtype
    elif dtype is None:
        dtype = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
    copy = torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(tensor)
    if torch.promote_types(dtype, tensor.dtype) == dtype or not bool((infinite := copy.isinf()).any()):
        return copy, 0
    return copy, int((infinite & tensor.cpu().isfinite()).sum())


@dataclass(frozen=True, slots=True)
class ExtractionJob:
    """The `Job` of `extract`, whose arguments the first fields are; a label is a folder inside one of ``folders``."""

    layers: Layers | None
    types: tuple[Any, ...] | None
    pool: str
    dtype: str
    batch_size: int
    workers: int
    targets: tuple[str, ...] = ()
    logits: bool = False
    folders: tuple[str, ...] = ()

    @contextlib.contextmanager
    def open(self, net: LoadedModel) -> Iterator[Callable[[Batch], FeatureBatch]]:
        """Extract from batches; hooks are on the model during each pass only."""
        yield _Extractor(self, net).extract

    def merge(self, values: Sequence[FeatureBatch]) -> FeatureBatch:
        """One value for several that follow each other."""
        shapes = {column: tuple(rows.shape[1:]) for column, rows in values[0].features.items()}
        for value in values[1:]:
            check_alike(shapes, value.features, value.names[0])
        return FeatureBatch(
            tuple(position for value in values for position in value.positions),
            tuple(name for value in values for name in value.names),
            tuple(sha256 for value in values for sha256 in value.sha256),
            tuple(label for value in values for label in value.labels),
            {key: torch.cat([value.features[key] for value in values]) for key in values[0].features},
            sum((Counter(value.overflowed) for value in values), Counter()),
        )


def check_alike(shapes: Mapping[str, tuple[int, ...]], features: Mapping[str, Tensor], name: str) -> None:
    """Raise a LayerError if ``features``, from the image ``name`` on, have other columns or rows of other shapes."""
    if others := sorted(shapes.keys() ^ features.keys()):
        asked = f"only some images have features of {listed(others)}"
        raise LayerError(asked, do="choose layers that run for each image")
    for column, shape in shapes.items():
        if (other := tuple(features[column].shape[1:])) != shape:
            raise different_shapes(column, shape, other, name)


def different_shapes(key: str, here: Sequence[int], there: Sequence[int], name: str) -> LayerError:
    shapes = ("x".join(map(str, shape)) or "one value" for shape in (there, here))
    exists = f"it has {next(shapes)} for {name} after {next(shapes)}"
    do = "pool it by mean or max, or make images of one size"
    return LayerError(f"{key} has rows of different shapes", exists, do)


class _Extractor:
    """Extracts from one batch after another. The first pass is whole; the next stop after its last wanted call."""

    def __init__(self, job: ExtractionJob, net: LoadedModel) -> None:
        self.job, self.net = job, net
        self.dtype: torch.dtype | None = getattr(torch, job.dtype) if job.dtype else None
        self.calls: list[Call] | None = None
        self.exact: Selection | None = None

    def extract(self, batch: Batch) -> FeatureBatch:
        job, kept, overflowed = self.job, dict[Call, dict[str, Tensor]](), dict[str, int]()
        image = batch.inputs[0][0]
        shown = input_size_of(image) if image.dim() > 2 else InputSize(1, 1)

        def keep(column: str, tensor: Tensor) -> Tensor:
            value, count = converted(tensor, self.dtype)
            if count:
                overflowed[column] = count
            return value

        def on_call(call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            parts = self._parts(call, module, output, batch.count, shown)
            kept[call] = {key: keep(key, rows) for key, rows in parts.items()}

        output = None
        with torch.no_grad(), evaluating(self.net.model), contextlib.ExitStack() as stack:
            if job.layers is not None:
                observer = Observer(self.net.model, self.exact or job.layers, job.types, on_call)
                if self.exact is not None and not (job.logits or job.targets):
                    observer.stop_early()
                stack.enter_context(observer)
            output = output_of(self.net.model, *batch.inputs)
        if job.layers is not None:
            kept = self._checked(observer, kept, batch)
        features = {key: rows for parts in kept.values() for key, rows in parts.items()}
        if job.logits or job.targets:
            for column, values in self._scores(output, batch.count):
                if column in features:
                    raise UsageError(f"two columns are called '{column}'", "a layer has this name", "leave one out")
                features[column] = keep(column, values)
        labels = batch.labels or tuple(label_of(name, job.folders) for name in batch.names)
        return FeatureBatch(batch.positions, batch.names, batch.sha256, labels, features, overflowed)

    def _parts(self, call: Call, module: nn.Module, output: Any, images: int, shown: InputSize) -> dict[str, Tensor]:
        pool = self.job.pool
        is_list = isinstance(output, list) and len(output) == images
        if is_list and all(isinstance(item, Mapping) for item in output):  # the boxes, labels and scores of a detector
            rows = dict[str, list[Tensor]]()
            for item in output:
                for part, tensor in tensors_in(item).items():
                    key = key_of(call, part)
                    rows.setdefault(key, []).append(pooled_whole(self._wide(tensor), pool, None, shown, key))
            for key, tensors in rows.items():
                if (other := next((row for row in tensors if row.shape != tensors[0].shape), None)) is not None:
                    raise different_shapes(key, tensors[0].shape[1:], other.shape[1:], "another image")
            return {key: torch.cat(values) for key, values in rows.items()}
        parts = {key_of(call, part): self._wide(tensor) for part, tensor in tensors_in(output).items()}
        if not parts:
            raise LayerError(f"{call.key or MODEL} returned no tensor", do="choose another layer", name=call.name)
        return {
            key: pooled_whole(tensor, pool, module, shown, key)
            if self.job.batch_size == 1 and tensor.shape[:1] != (1,)
            else pooled(tensor, images, pool, module, shown, key)
            for key, tensor in parts.items()
        }

    def _wide(self, tensor: Tensor) -> Tensor:
        """A mean is calculated in the data type of the features if that is the wider one."""
        if self.job.pool != "mean" or self.dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(torch.promote_types(tensor.dtype, self.dtype))

    def _checked(
        self, observer: Observer, kept: Mapping[Call, dict[str, Tensor]], batch: Batch
    ) -> dict[Call, dict[str, Tensor]]:
        """What the wanted calls return, the same calls in each pass."""
        if self.calls is None:
            calls = [call for call in kept if observer.wanted(call)]
            observer.selection.check_named_ran(observer.progress.did_not_run, bool(calls))
            self.calls = calls
            self.exact = Selection.of_calls(calls)
        ran = {call.key: parts for call, parts in kept.items()}
        for call in self.calls:
            if call.key not in ran:
                raise InputError(f"{call.key or MODEL} did not run, although it ran on earlier images")
        return {call: ran[call.key] for call in self.calls}

    def _scores(self, output: Any, images: int) -> Iterator[tuple[str, Tensor]]:
        scores = class_scores(output, self.net.name)
        if len(scores) != images:
            raise UsageError(f"{self.net.name} gives {len(scores)} rows of scores for {images} images")
        if self.job.logits:
            yield "logits", scores.as_subclass(torch.Tensor)
        if self.job.targets:
            shares, categories = probabilities(scores).to(scores.dtype), self.net.categories
            zeros = [0.0] * scores.shape[1]
            targets = [Target.of(text).indices(zeros, categories) for text in self.job.targets]
            for at in dict.fromkeys(at for classes in targets for at in classes):
                yield f"probability {column_name(at, categories)}", shares[:, at]


def column_name(index: int, categories: Sequence[str] | None) -> str:
    """The name of a class in the name of its column; the number with it where two classes have this name."""
    label = class_label(index, categories)
    if label is None:
        return str(index)
    return label if categories and list(categories).count(label) == 1 else f"{index} {label}"
