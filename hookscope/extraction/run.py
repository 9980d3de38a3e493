"""Features of many images: the public call, and the run over files or tensors."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hookscope.errors import UsageError
from hookscope.extraction.facts import POOLS, FeatureBatch, FeatureSource, WrittenFeatures
from hookscope.extraction.files import write_features
from hookscope.extraction.job import ExtractionJob, check_alike, shapes_of
from hookscope.hooks import Layers, Selection
from hookscope.images import find_pictures
from hookscope.jobs import Engine, LocalEngine, Part, fingerprint_of, layers_in_words
from hookscope.models import (
    FILE_DTYPES,
    Batch,
    LoadedModel,
    OnLost,
    OnNote,
    as_batch,
    as_loaded,
    model_errors_as_input_errors,
    raise_lost,
    warn_of_image,
)
from hookscope.scores import Target, check_family
from hookscope.system import StrPath

Images = str | os.PathLike[str] | Iterable[Any]


def extract(
    net: LoadedModel | nn.Module,
    images: Images,
    layers: Layers | None = None,
    types: Iterable[Any] | None = None,
    *,
    pool: str = "none",
    dtype: str | torch.dtype | None = None,
    batch_size: int = 16,
    workers: int = 0,
    targets: Iterable[Any] = (),
    logits: bool = False,
    folders: Sequence[str] | None = None,
    engine: Engine | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
    on_lost: OnLost = raise_lost,
    on_note: OnNote = warn_of_image,
) -> Extraction:
    """The features of many images: what chosen layers put out, in one pass for all layers, batch by batch.

    Memory does not grow with the number of images. An output is pooled in the hook of its layer, before a later layer
    can overwrite it. Hooks are on the model only while a batch runs, in eval mode; between batches and after any
    exception it is as before. After the first batch, passes stop after the last wanted call.

    The features of a call have a row for each image. ``pool`` says what the row holds:

    - ``none``: the output as it is, such as ``(C, H, W)`` or tokens ``(L, C)``.
    - ``mean``, ``max``: a number for each channel, over all positions (and frames); class tokens are left out. Vectors
      stay as they are.
    - ``cls``: the class token ``(C,)``.
    - ``flatten``: all values, ``(C * H * W,)``.

    With a batch size of 1 the features equal what `capture` keeps, bit for bit; with others torch may sum in another
    order. An output without a row for each image, such as that of the heads of a detector, needs a batch size of 1.

    Args:
        net: What `load_model` returns, or any eager module.
        images: Files and folders; or a Dataset, a DataLoader, or any iterable of tensors ``(C, H, W)`` or of tuples
            ``(tensor, label)``, which are used as they are. A DataLoader gives batches of its own size.
        layers: The calls, as `capture` takes them. None for no layer, only scores.
        types: Class names that indices and ``all`` count, as in `capture`.
        pool: ``none``, ``mean``, ``max``, ``cls`` or ``flatten``.
        dtype: ``float16``, ``float32`` or ``float64``; None for that of the layer (float32 for bfloat16).
        batch_size: Images in one pass.
        workers: Processes that read and prepare images, 0 for none but this one.
        targets: Classes, by number or name, whose probabilities are columns.
        logits: Whether the scores of all classes are a column.
        folders: Folders that were named, if ``images`` lists the files in them: a folder inside one is a label.
        engine: Runs the passes on files; None for this process.
        on_progress: Called with the number of images after each batch.
        on_lost: Called with position, name and error of an image that cannot be used; raises by default.
        on_note: Called with a name and a note on it; warns by default.

    Returns:
        An `Extraction`: iterate over its `FeatureBatch`\\ es, or save it.

    Raises:
        LayerError: The model does not have such a layer, or a layer has no features of this kind.
        TargetError: The model does not have such a class.
        UsageError: Nothing is asked for, or an argument does not exist.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> for batch in extract(net, torch.rand(20, 3, 8, 8), layers=0, pool="mean"):
        ...     print(batch.names[0], tuple(batch.features["0"].shape))
        0 (16, 4)
        16 (4, 4)
    """
    net = as_loaded(net)
    if pool not in POOLS:
        raise UsageError(f"no pool '{pool}'", f"there are {', '.join(POOLS)}")
    name = "" if dtype is None else str(dtype).removeprefix("torch.")
    if name and name not in FILE_DTYPES:
        raise UsageError(f"no dtype '{name}'", f"there are {', '.join(FILE_DTYPES)}")
    if batch_size < 1:
        raise UsageError(f"batch size must be at least 1, not {batch_size}")
    if workers < 0:
        raise UsageError(f"workers must be at least 0, not {workers}")
    if layers is None and types is not None:
        layers = "all"
    wanted = tuple(str(Target.of(target)) for target in targets)
    if layers is None and not wanted and not logits:
        raise UsageError("no layer is chosen", do="give layers, targets or logits=True")
    _check_scores(net, wanted, logits)
    paths, items = _paths_or_items(images)
    if folders is None:
        folders = [path for path in paths or () if os.path.isdir(path)]
        paths = find_pictures(paths) if paths is not None and folders else paths
    if paths is None and engine is not None:
        raise UsageError("an engine reads files, not tensors", do="give paths, or leave the engine out")
    chosen = None if layers is None else Selection.of(layers)
    job = ExtractionJob(
        chosen, tuple(types) if types else None, pool, name, batch_size, workers, wanted, logits, tuple(folders)
    )
    return Extraction(net, paths, items, job, engine or LocalEngine(), on_progress, on_lost, on_note)


def _check_scores(net: LoadedModel, targets: Sequence[str], logits: bool) -> None:
    if targets or logits:
        check_family(net.family, net.name)
    for text in targets:
        if "top:" in text:
            raise UsageError(f"no column for target '{text}'", "each image has others", "give a class number or name")
        Target.of(text).check(net.categories)


def _paths_or_items(images: Images) -> tuple[list[str] | None, Any]:
    """The files and folders, or what gives tensors; the first one of an iterable says which."""
    if isinstance(images, str | os.PathLike):
        return [os.fspath(images)], None
    if isinstance(images, Dataset | DataLoader | Tensor):
        return None, images
    items = iter(images)
    first = next(items, None)
    if first is None:
        raise UsageError("there is no image", do="give files, folders or tensors")
    if isinstance(first, str | os.PathLike):
        return [os.fspath(path) for path in itertools.chain([first], items)], None
    return None, images if isinstance(images, Sequence) else itertools.chain([first], items)


@dataclass(frozen=True, repr=False)
class Extraction:
    """What `extract` returns: iterate over it for a `FeatureBatch` of each batch of images, or save it.

    Attributes:
        net: The model.
        paths: The files; None for tensors.
        items: What gives tensors; None for files.
        job: What is done with a batch.
        engine: What runs the passes.
        on_progress: Called with the number of images after each batch.
        on_lost: Called with position, name and error of an image that cannot be used.
        on_note: Called with a name and a note on it.

    Example:
        >>> import os, tempfile, numpy, torch
        >>> features = extract(torch.nn.Conv2d(3, 4, 3), torch.rand(20, 3, 8, 8), layers="(model)", pool="mean")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     written = features.save(os.path.join(folder, "features.npy"))
        ...     array = numpy.load(written.path)
        >>> written.rows, written.columns, array.shape
        (20, {'(model)': (4,)}, (20, 4))
    """

    net: LoadedModel
    paths: Sequence[str] | None
    items: Any
    job: ExtractionJob
    engine: Engine
    on_progress: Callable[[int], None]
    on_lost: OnLost
    on_note: OnNote

    @cached_property
    def source(self) -> FeatureSource:
        """What the features are made from."""
        net, job = self.net, self.job
        return FeatureSource(
            net.name,
            net.weights,
            fingerprint_of(net.model),
            "none: tensors were given" if self.paths is None else net.preprocess.describe(),
            "" if job.layers is None else layers_in_words(job.layers, job.types),
            job.pool,
            job.dtype,
            job.targets,
            job.logits,
        )

    @property
    def count(self) -> int | None:
        """Number of images; None if what gives the tensors does not know."""
        images: Any = self.items.dataset if isinstance(self.items, DataLoader) else self.items
        try:
            return len(images) if self.paths is None else len(self.paths)
        except TypeError:
            return None

    def __iter__(self) -> Iterator[FeatureBatch]:
        with contextlib.closing(self._parts()) as parts:
            for part in parts:
                if part.value is not None:
                    yield part.value

    def _parts(self, first: int = 0) -> Generator[Part[FeatureBatch]]:
        """The part of each batch, from position ``first`` of the images on; every image comes once, in order.

        Raises:
            LayerError: Images have rows of different shapes.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        overflowed = Counter[str]()
        begin = first - first % self.job.batch_size  # the batches are the same, wherever a run goes on
        parts = self._from_tensors(begin) if self.paths is None else self._from_files(begin)
        with contextlib.closing(parts):
            for part in (_from(first, part) for part in parts if part.done > first):
                part.report(self.on_lost, self.on_note)
                if part.value is not None:
                    shapes = shapes or shapes_of(part.value)
                    check_alike(shapes, part.value.features, part.value.names[0])
                    overflowed.update(part.value.overflowed)
                yield part
                self.on_progress(len(part.positions) + len(part.lost))
        for column, number in overflowed.items():
            self.on_note(column, f"{number:,} finite values are too large for {self.job.dtype} and became Inf")

    def save(
        self,
        path: StrPath,
        shard: int | None = None,
        *,
        overwrite: bool = False,
        resume: bool = False,
        on_start: Callable[[int], None] = lambda done: None,
        on_interrupt: Callable[[int], None] = lambda done: None,
    ) -> WrittenFeatures:
        """Write the features to a ``.npy``, ``.npz``, ``.safetensors``, ``.parquet`` or ``.zarr`` file, or to a folder.

        A row for each image, in constant memory. A run that ends early, for whatever reason, continues with ``resume``.

        Args:
            path: The file, whose suffix names the format, or a folder of ``.parquet`` files.
            shard: Rows of each file in a folder, 10,000 by default.
            overwrite: Replace an output that exists.
            resume: Go on where an earlier run of the same model, images and settings stopped.
            on_start: Called with the number of images that an earlier run has done.
            on_interrupt: Called with the number of images that are saved, 0 for none, when an exception ends the run.

        Raises:
            InputError: No image could be used, or the output belongs to another run or is damaged.
            LayerError: Rows have different shapes.
            UsageError: There is no such format, or it holds one layer alone.
            WriteError: The output exists or cannot be written.
            InstallationError: The format needs a package that is not installed.
        """
        job = self.job
        named = 0 if job.layers is None else max(1, len(set(Selection.of(job.layers).plain_names)))
        return write_features(
            self.source,
            self._parts,
            path,
            self.paths,
            count=self.count,
            shard=shard,
            overwrite=overwrite,
            resume=resume,
            columns=named + job.logits + len(set(job.targets)),
            on_start=on_start,
            on_interrupt=on_interrupt,
        )

    def to_parquet(self, path: StrPath, **options: Any) -> WrittenFeatures:
        """Write a ``.parquet`` file, or a folder of them, with the arguments of `save`."""
        if os.path.splitext(path)[1].lower() not in ("", ".parquet"):
            raise UsageError(f"'{os.fspath(path)}' is no .parquet file", do="use save() for other formats")
        return self.save(path, **options)

    def _from_files(self, first: int) -> Generator[Part[FeatureBatch]]:
        assert self.paths is not None
        return self.engine.run(self.job, self.net, self.paths, first)

    def _from_tensors(self, first: int) -> Generator[Part[FeatureBatch]]:
        """Batches of tensors, which go through the model here."""
        net = self.net
        with self.job.open(net) as measure:
            for position, images, labels in _batches_of(self.items, self.job, first):
                inputs = (images,) if isinstance(images, Tensor) else as_batch(net.family, images)
                inputs = tuple(_on(net.device, each) for each in inputs)
                positions = tuple(range(position, position + len(labels)))
                batch = Batch(tuple(map(str, positions)), positions, inputs, ("",) * len(labels))
                with model_errors_as_input_errors(net.name, inputs):
                    value = replace(measure(batch), labels=labels)
                yield Part(value, position + len(labels), positions, batch.names, batch.sha256)


def _from(first: int, part: Part[FeatureBatch]) -> Part[FeatureBatch]:
    """``part`` without the images before position ``first``."""
    value, skip = part.value, sum(position < first for position in part.positions)
    lost = tuple(each for each in part.lost if each.position >= first)
    if value is None or not skip:
        return replace(part, lost=lost)
    rows = {key: rows[skip:] for key, rows in value.features.items()}
    names = ("positions", "names", "sha256")
    shared = {name: getattr(part, name)[skip:] for name in names}
    value = replace(value, labels=value.labels[skip:], features=rows, **shared) if skip < value.count else None
    return replace(part, value=value, lost=lost, **shared)


def _on(device: str, images: Any) -> Any:
    return images.to(device) if isinstance(images, Tensor) else [image.to(device) for image in images]


def _batches_of(items: Any, job: ExtractionJob, first: int) -> Iterator[tuple[int, Any, tuple[str, ...]]]:
    """Position, images and labels for each pass, from the batch with position ``first`` on."""
    if isinstance(items, DataLoader):
        done = 0
        for item in items:
            images, labels = _split(item)
            done += len(images)
            if isinstance(labels, Mapping) or labels is None or len(labels) != len(images):
                labels = [None] * len(images)
            if done > first:
                yield done - len(images), images, tuple(map(_label, labels))
        return
    for item in _lists_of(items, job, first):
        pairs = [_split(each) for each in item]
        for _, run in itertools.groupby(pairs, lambda pair: pair[0].shape):
            members = list(run)
            yield first, [image for image, _ in members], tuple(_label(label) for _, label in members)
            first += len(members)


def _lists_of(items: Any, job: ExtractionJob, first: int) -> Iterator[list[Any]]:
    """The items for each pass, from position ``first`` on."""
    if isinstance(items, Dataset):
        if not isinstance(items, IterableDataset):
            items, first = Subset(items, range(first, len(items))), 0  # type: ignore[arg-type]
        loader: DataLoader[Any] = DataLoader(
            items,
            batch_size=job.batch_size,
            num_workers=job.workers,
            collate_fn=list,
            generator=torch.Generator(),  # else it draws its seed from the global random state
        )
        items = itertools.chain.from_iterable(loader)
    rest = itertools.islice(items, first, None)
    while some := list(itertools.islice(rest, job.batch_size)):
        yield some


def _split(item: Any) -> tuple[Any, Any]:
    """Images and labels of what a data set or a DataLoader gives."""
    images, label = (item[0], item[1] if len(item) > 1 else None) if isinstance(item, tuple | list) else (item, None)
    if not isinstance(
        images if isinstance(images, Tensor) else images[0] if isinstance(images, tuple | list) else None, Tensor
    ):
        do = "give it a transform that makes tensors, or give the files"
        raise UsageError(f"the data set gives {type(images).__name__}, not a tensor", do=do)
    return images, label


def _label(label: Any) -> str:
    """The text of a class, by name or number; empty for other things, such as the boxes of a detector."""
    if isinstance(label, Tensor) and label.numel() == 1:
        label = label.item()
    return str(label) if isinstance(label, str | Integral) else ""
