"""A job on images in memory: of Pillow, or as tensors of the input, as an iterable, a Dataset or a DataLoader."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hookscope.errors import UsageError, kind_of, path_of
from hookscope.hooks import map_tensors
from hookscope.images import as_picture, is_picture, list_pictures
from hookscope.jobs.run import Job, Part
from hookscope.models import Batch, LoadedModel, as_batch, model_errors_as_input_errors

Images = str | os.PathLike[str] | Iterable[Any]


def paths_or_items(images: Images) -> tuple[list[str] | None, Any]:
    """The files and folders, or what gives tensors; the first one of an iterable says which."""
    if isinstance(images, str | os.PathLike):
        return [os.fspath(images)], None
    if isinstance(images, Dataset | DataLoader | Tensor):
        return None, images
    items = iter(images if isinstance(images, Iterable) else list_pictures(images))
    first = next(items, None)
    if first is None:
        raise UsageError("there is no image", do="give files, folders or tensors")
    if isinstance(first, str | os.PathLike):
        images = [first, *items]
        if not any(is_picture(item) and not isinstance(item, str | os.PathLike) for item in images):
            return list(map(path_of, images)), None
    return None, images if isinstance(images, Sequence) else itertools.chain([first], items)


@dataclass(frozen=True)
class MemoryEngine:
    """Runs a job in this process on images or tensors that ``items`` gives."""

    items: Any

    def run(self, job: Job[Any], net: LoadedModel, paths: Sequence[str], first: int = 0) -> Generator[Part[Any]]:
        with job.open(net) as measure:
            for batch in memory_batches(net, self.items, job.batch_size, job.workers, first):
                with model_errors_as_input_errors(net.name, batch.inputs):
                    value = measure(batch)
                yield Part(value, batch.positions[-1] + 1, batch.positions, batch.names, batch.sha256)


def memory_batches(
    net: LoadedModel, items: Any, size: int, workers: int = 0, first: int = 0
) -> Generator[Batch, None, None]:
    """The batches of images or tensors in memory, from position ``first`` on; a name is a number."""
    for position, images, labels in _batches_of(net, items, size, workers, first):
        inputs = (images,) if isinstance(images, Tensor) else as_batch(net.family, images)
        inputs = map_tensors(inputs, lambda tensor: tensor.to(net.device))
        positions = tuple(range(position, position + len(labels)))
        yield Batch(tuple(map(str, positions)), positions, inputs, ("",) * len(labels), labels=labels)


def _batches_of(
    net: LoadedModel, items: Any, size: int, workers: int, first: int
) -> Iterator[tuple[int, Any, tuple[str, ...]]]:
    """Position, images and labels for each pass, from position ``first`` on."""
    if isinstance(items, DataLoader):
        done = 0
        for item in items:
            images, labels = _split(item, net)
            done += len(images)
            if isinstance(labels, Mapping) or labels is None or len(labels) != len(images):
                labels = [None] * len(images)
            if done > first:
                begin = max(0, first - done + len(images))  # an earlier run may have had other batches
                yield done - len(images[begin:]), images[begin:], tuple(map(_label, labels[begin:]))
        return
    for item in _lists_of(items, size, workers, first):
        pairs = [_split(entry, net) for entry in item]
        for _, run in itertools.groupby(pairs, lambda pair: pair[0].shape):
            members = list(run)
            yield first, [image for image, _ in members], tuple(_label(label) for _, label in members)
            first += len(members)


def _lists_of(items: Any, size: int, workers: int, first: int) -> Iterator[list[Any]]:
    """The items for each pass, from position ``first`` on; the batches are the same, wherever a run goes on."""
    done, room = 0, size - first % size
    if isinstance(items, Dataset):
        if not isinstance(items, IterableDataset):
            items, done = Subset(items, range(first, len(items))), first  # type: ignore[arg-type]
        loader: DataLoader[Any] = DataLoader(
            items,
            batch_size=size,  # of a worker
            num_workers=workers,
            collate_fn=list,
            generator=torch.Generator(),  # else it draws its seed from the global random state
        )
        items = itertools.chain.from_iterable(loader)
    rest = itertools.islice(items, first - done, None)
    while some := list(itertools.islice(rest, room)):
        yield some
        room = size


def _split(item: Any, net: LoadedModel) -> tuple[Any, Any]:
    images, label = (item[0], item[1] if len(item) > 1 else None) if isinstance(item, tuple | list) else (item, None)
    if is_picture(images):
        images = net.prepare(as_picture(images, net.preprocess.frames))
    first = images[0] if isinstance(images, tuple | list) and images else images
    if not isinstance(first, Tensor):
        do = "give images of Pillow or tensors (C, H, W)"
        raise UsageError(f"expected an image, got {kind_of(first)}", do=do)
    return images, label


def _label(label: Any) -> str:
    """The text of a class, by name or number; empty for other things, such as the boxes of a detector."""
    if isinstance(label, Tensor) and label.numel() == 1:
        label = label.item()
    return str(label) if isinstance(label, str | Integral) else ""
