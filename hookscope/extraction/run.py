"""Features of many images: the public call, and the run over files or tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader

from hookscope.display import Cells, Shown
from hookscope.errors import InputError, LayerError, UsageError
from hookscope.extraction.facts import POOLS, FeatureBatch, WrittenFeatures
from hookscope.extraction.files import FeatureRun, FeatureSource, WritingRun
from hookscope.extraction.job import ExtractionJob
from hookscope.extraction.output import check_output
from hookscope.findings import listed
from hookscope.hooks import Layers, Selection
from hookscope.images import find_pictures
from hookscope.jobs import Images, MemoryEngine, RunSettings, layers_in_words, paths_or_items
from hookscope.models import LoadedModel, as_loaded, file_dtypes
from hookscope.scores import Target, check_family
from hookscope.system import StrPath


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
        images: Files and folders; or a Dataset, a DataLoader, or any iterable of images of Pillow, of tensors
            ``(C, H, W)``, which are used as they are, or of tuples ``(image, label)``. A DataLoader gives batches of
            its own size.
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
    paths, items = paths_or_items(images)
    if folders is None:
        folders = [path for path in paths or () if os.path.isdir(path)]
        paths = None if paths is None else find_pictures(paths)
    if paths is None and run.engine is not None:
        raise UsageError("an engine reads files, not images in memory", do="give paths, or leave the engine out")
    chosen = None if layers is None else Selection.of(layers)
    kinds, size = tuple(types) if types else None, run.images_in_pass
    job = ExtractionJob(chosen, kinds, pool, name, size, run.workers, wanted, logits, tuple(folders))
    run = run if paths is not None else replace(run, engine=MemoryEngine(items))
    return Extraction(net, paths, items, job, run)


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
        """The features of all images, an array of NumPy; ``column`` is a layer or its number, needed if several."""
        rows: list[NDArray[Any]] = []
        for batch in self:
            names = [*batch.features]
            key = names[column or 0] if isinstance(column, int) or (column is None and len(names) == 1) else column
            if isinstance(key, str) and key not in names:
                key = key.removeprefix("name:").replace(":", " ", 1)  # "name:part", as activations name it
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
