"""Features of many images: the public call, and the run over files or tensors."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hookscope.display import Cells, Shown
from hookscope.errors import InputError, LayerError, UsageError, path_of
from hookscope.extraction.facts import POOLS, FeatureBatch, WrittenFeatures
from hookscope.extraction.files import FeatureRun, FeatureSource, WritingRun
from hookscope.extraction.job import ExtractionJob
from hookscope.extraction.output import check_output
from hookscope.findings import listed
from hookscope.hooks import Layers, Selection, map_tensors
from hookscope.images import list_pictures
from hookscope.jobs import Job, Part, RunSettings, layers_in_words
from hookscope.models import Batch, LoadedModel, as_batch, as_loaded, file_dtypes, model_errors_as_input_errors
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
    targets: Iterable[Any] = (),
    logits: bool = False,
    folders: Sequence[str] | None = None,
    run: RunSettings = RunSettings(),
) -> Extraction:
    """The features of many images: what chosen layers return, in one pass for all layers, batch by batch.

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
    order. An output without a row for each image, such as the heads of a detector, needs a batch size of 1.

    Args:
        net: What `load_model` returns, or any eager module.
        images: Files and folders; or a Dataset, a DataLoader, or any iterable of tensors ``(C, H, W)`` or of tuples
            ``(tensor, label)``, which are used as they are. A DataLoader gives batches of its own size.
        layers: The calls, as `capture` takes them. None for no layer, only scores.
        types: Class names that indices and ``all`` count, as in `capture`.
        pool: ``none``, ``mean``, ``max``, ``cls`` or ``flatten``.
        dtype: ``float16``, ``float32`` or ``float64``; None for the layer's (float32 for bfloat16).
        targets: Classes, by number or name, whose probabilities are columns.
        logits: Whether the scores of all classes are a column.
        folders: Folders that were named, if ``images`` lists the files in them: a folder inside one is a label.
        run: How the run is done; an engine runs passes on files only.

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
    if name and name not in file_dtypes():
        raise UsageError(f"no dtype '{name}'", f"there are {', '.join(file_dtypes())}")
    if layers is None and types is not None:
        layers = "all"
    wanted = tuple(str(Target.of(target)) for target in targets)
    if layers is None and not wanted and not logits:
        raise UsageError("no layer is chosen", do="give layers, targets or logits=True")
    if wanted or logits:
        check_family(net.family, net.name)
    for text in wanted:
        if "top:" in text:
            raise UsageError(f"no column for target '{text}'", "each image has others", "give a class number or name")
        Target.of(text).check(net.categories)
    paths, items = _paths_or_items(images)
    if folders is None:
        folders = [path for path in paths or () if os.path.isdir(path)]
        paths = None if paths is None else list_pictures(paths)
    if paths is None and run.engine is not None:
        raise UsageError("an engine reads files, not tensors", do="give paths, or leave the engine out")
    chosen = None if layers is None else Selection.of(layers)
    kinds, size = tuple(types) if types else None, run.images_in_pass
    job = ExtractionJob(chosen, kinds, pool, name, size, run.workers, wanted, logits, tuple(folders))
    run = run if paths is not None else replace(run, engine=TensorEngine(items))
    return Extraction(net, paths, items, job, run)


def _paths_or_items(images: Images) -> tuple[list[str] | None, Any]:
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
        return [path_of(path) for path in itertools.chain([first], items)], None
    return None, images if isinstance(images, Sequence) else itertools.chain([first], items)


@dataclass(frozen=True, repr=False)
class Extraction(Shown):
    """What `extract` returns: iterate over it for a `FeatureBatch` of each batch of images, or save it.

    Attributes:
        net: The model.
        paths: The files; None for tensors.
        items: What gives tensors; None for files.
        job: What is done with a batch.
        run: How the run is done.

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
    run: RunSettings

    @cached_property
    def source(self) -> FeatureSource:
        job = self.job
        given: dict[str, Any] = {"preprocess": "none: tensors were given"} if self.paths is None else {}
        layers = "" if job.layers is None else layers_in_words(job.layers, job.types)
        settings: dict[str, Any] = {"pool": job.pool, "dtype": job.dtype, "targets": job.targets, "logits": job.logits}
        return FeatureSource.of(self.net, layers, **settings, **given)

    @property
    def count(self) -> int | None:
        """Number of images; None if what gives the tensors does not know."""
        images: Any = self.items.dataset if isinstance(self.items, DataLoader) else self.items
        try:
            return len(images) if self.paths is None else len(self.paths)
        except TypeError:
            return None

    def _cells(self) -> Cells:
        layers = "" if self.job.layers is None else layers_in_words(self.job.layers, self.job.types)
        cells = {"model": self.net.name, "images": self.count, "layers": layers, "pool": self.job.pool}
        return {**cells, "next": "iterate, or call .array(layer) or .save(file)"}

    def array(self, column: str | int | None = None) -> NDArray[Any]:
        """The features of all images as one array; ``column`` is a layer or its number, needed if there are several."""
        rows: list[NDArray[Any]] = []
        for batch in self:
            names = [*batch.features]
            key = names[column or 0] if isinstance(column, int) or (column is None and len(names) == 1) else column
            if key not in names:
                asked = "several columns, and none is chosen" if key is None else f"no column '{key}'"
                raise LayerError(asked, f"there are {listed(names, 6)}", "give one of them")
            rows.append(batch.features[key].numpy())
        if not rows:
            raise InputError("no image could be used", do="give other images")
        return np.concatenate(rows)

    def __iter__(self) -> Iterator[FeatureBatch]:
        run = FeatureRun(self.net, self.paths or (), self.job, self.run, None)
        with contextlib.closing(run.parts()) as parts:
            for part in parts:
                if part.value is not None:
                    yield part.value

    def save(
        self, path: StrPath, shard: int | None = None, *, overwrite: bool = False, resume: bool = False
    ) -> WrittenFeatures:
        """Write the features to a ``.npy``, ``.npz``, ``.safetensors``, ``.parquet`` or ``.zarr`` file, or to a folder.

        A row for each image, in constant memory. Rows wait in the folder ``.NAME.parts`` beside the file, from which a
        later run with ``resume`` continues. The file appears whole when the last row is done.

        Args:
            path: The file, whose suffix names the format, or a folder of ``.parquet`` files.
            shard: Rows of each file in a folder, 10,000 by default.
            overwrite: Replace an output that exists.
            resume: Go on where an earlier run of the same model, images and settings stopped.

        Raises:
            InputError: No image could be used, or the output belongs to another run or is damaged.
            LayerError: Rows have different shapes.
            UsageError: There is no such format, or it holds one layer alone.
            WriteError: The output exists or cannot be written.
            InstallationError: The format needs a package that is not installed.
        """
        job = self.job
        named = 0 if job.layers is None else max(1, len(set(Selection.of(job.layers).plain_names)))
        columns = named + job.logits + len(set(job.targets))
        output = check_output(path, shard, overwrite=overwrite, resume=resume, columns=columns)
        paths = self.paths or ()
        run = WritingRun(self.net, paths, self.job, self.run, output.state, output, self.source, self.count)
        return run.written(resume)

    def to_parquet(self, path: StrPath, **options: Any) -> WrittenFeatures:
        """Write a ``.parquet`` file, or a folder of them, with the arguments of `save`."""
        if os.path.splitext(path)[1].lower() not in ("", ".parquet"):
            raise UsageError(f"'{os.fspath(path)}' is not a .parquet file", do="use save() for other formats")
        return self.save(path, **options)


@dataclass(frozen=True)
class TensorEngine:
    """Runs a job in this process on tensors that ``items`` gives."""

    items: Any

    def run(self, job: Job[Any], net: LoadedModel, paths: Sequence[str], first: int = 0) -> Generator[Part[Any]]:
        with job.open(net) as measure:
            for position, images, labels in _batches_of(self.items, job, first):
                inputs = (images,) if isinstance(images, Tensor) else as_batch(net.family, images)
                inputs = map_tensors(inputs, lambda tensor: tensor.to(net.device))
                positions = tuple(range(position, position + len(labels)))
                batch = Batch(tuple(map(str, positions)), positions, inputs, ("",) * len(labels))
                with model_errors_as_input_errors(net.name, inputs):
                    value = replace(measure(batch), labels=labels)
                yield Part(value, position + len(labels), positions, batch.names, batch.sha256)


def _batches_of(items: Any, job: Job[Any], first: int) -> Iterator[tuple[int, Any, tuple[str, ...]]]:
    """Position, images and labels for each pass, from position ``first`` on."""
    if isinstance(items, DataLoader):
        done = 0
        for item in items:
            images, labels = _split(item)
            done += len(images)
            if isinstance(labels, Mapping) or labels is None or len(labels) != len(images):
                labels = [None] * len(images)
            if done > first:
                begin = max(0, first - done + len(images))  # an earlier run may have had other batches
                yield done - len(images[begin:]), images[begin:], tuple(map(_label, labels[begin:]))
        return
    for item in _lists_of(items, job, first):
        pairs = [_split(entry) for entry in item]
        for _, run in itertools.groupby(pairs, lambda pair: pair[0].shape):
            members = list(run)
            yield first, [image for image, _ in members], tuple(_label(label) for _, label in members)
            first += len(members)


def _lists_of(items: Any, job: Job[Any], first: int) -> Iterator[list[Any]]:
    """The items for each pass, from position ``first`` on; the batches are the same, wherever a run goes on."""
    done, room = 0, job.batch_size - first % job.batch_size
    if isinstance(items, Dataset):
        if not isinstance(items, IterableDataset):
            items, done = Subset(items, range(first, len(items))), first  # type: ignore[arg-type]
        loader: DataLoader[Any] = DataLoader(
            items,
            batch_size=job.batch_size,  # of a worker
            num_workers=job.workers,
            collate_fn=list,
            generator=torch.Generator(),  # else it draws its seed from the global random state
        )
        items = itertools.chain.from_iterable(loader)
    rest = itertools.islice(items, first - done, None)
    while some := list(itertools.islice(rest, room)):
        yield some
        room = job.batch_size


def _split(item: Any) -> tuple[Any, Any]:
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
