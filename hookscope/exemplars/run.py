"""Exemplars of many images in one run, which saves its progress and can be resumed after an interruption."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from hookscope.errors import InputError, LayerError, UsageError
from hookscope.exemplars.facts import LayerExemplars
from hookscope.exemplars.job import MEASURES, ExemplarsJob, FoundExemplars
from hookscope.exemplars.storage import (
    ExemplarsSource,
    SavedExemplars,
    SynthesizedImages,
    load_exemplars,
    save_exemplars,
)
from hookscope.geometry import ReceptiveField, receptive_fields
from hookscope.hooks import AnyModel, Layers, Selection, select_types
from hookscope.images import find_pictures
from hookscope.jobs import (
    AGAIN,
    Part,
    Progress,
    RunSettings,
    SavedRun,
    layers_in_words,
    picture_of,
    pictures_in,
)
from hookscope.models import as_loaded
from hookscope.system import StrPath


def find_exemplars(
    net: AnyModel,
    paths: Sequence[str],
    layers: Layers = "0:",
    types: Iterable[str] | None = None,
    *,
    channels: Iterable[int] | None = None,
    top: int = 9,
    least: bool = False,
    measure: str = "max",
    folders: Iterable[str] | None = None,
    save: StrPath | None = None,
    resume: bool = False,
    run: RunSettings = RunSettings(),
) -> list[LayerExemplars]:
    """Find the images, and the places in them, that excite each channel of the chosen layers most.

    All layers are read in one pass over the images. Memory does not grow with the number of images: it holds what is
    kept. An image counts once for a channel, by its largest value (``measure="max"``), its mean or its largest absolute
    value, and so do near-duplicates of one image: copies, re-encoded and resized ones, and ones a little brighter. Of
    equal values the first image in the list wins. An image on which that value is NaN or Inf is left out for the
    channel, and counted.

    Feature maps ``(N, C, H, W)``, clips, tokens ``(N, L, C)`` and vectors ``(N, C)`` are understood. Tokens have places
    if they fold to a grid; class tokens are then left out. Vectors have no places. If the rows of an output are not the
    images of the batch, as in the heads of a detector, a batch size of 1 makes all of them one image.

    The label of an image is the name of its folder, if that is inside a folder that was named; with labels each channel
    has classes and a selectivity.

    Args:
        net: The model, as `load_model` returns it; or a module, whose usual preprocessing is then assumed.
        paths: Image files and folders, in an order that stays the same between runs.
        layers: A selection, as `capture` takes it; by default every call with an index.
        types: Class names that indices and ``all`` count, see `capture`.
        channels: The channels of each layer, from 0; None for all.
        top: How many exemplars a channel has.
        least: Whether to find the images that excite each channel least, too.
        measure: ``max``, ``mean`` or ``abs``.
        folders: Folders that were named, if ``paths`` lists the files in them.
        save: A file that is written about every ten seconds and whenever the run ends, also by an exception or a
            signal; `read_exemplars` reads it.
        resume: Use only the images that are missing in ``save``.
        run: How the run is done.

    Returns:
        The exemplars of each call, and of each tensor that it returns, in order of execution.

    Raises:
        InputError: No image could be used, an output has rows that are not images, or ``save`` holds exemplars of
            another model, other images or other settings.
        UsageError: ``top``, ``measure`` or ``channels`` is wrong.
        LayerError: ``layers`` or ``types`` name a layer that the model does not have.

    Example:
        >>> import hookscope
        >>> net = hookscope.load_model("shapes")
        >>> images = [f"samples/shapes/{name}.png" for name in ("star", "ring", "cross")]
        >>> [layer] = find_exemplars(net, images, layers="features.10", channels=[3], top=2)
        >>> [len(channel.most) for channel in layer.channels], layer.images
        ([2], 3)
    """
    net = as_loaded(net)
    wanted = None if channels is None else tuple(dict.fromkeys(channels))
    _check(top, measure, wanted)
    classes = select_types(types) if types else None
    if folders is None:
        folders = [path for path in paths if os.path.isdir(path)]
        paths = find_pictures(paths) if folders else paths
    below = tuple(map(os.path.normpath, folders))
    job = ExemplarsJob(layers, classes, wanted, top, least, measure, below, run.images_in_pass, run.workers)
    source = ExemplarsSource.of(
        net,
        layers_in_words(layers, classes),
        save is not None,
        channels="all" if wanted is None else ", ".join(map(str, wanted)),
        measure=measure,
        top=top,
        least=least,
        folders=", ".join(below),
    )
    search = ExemplarsRun(net, paths, job, run, save, source, classes)
    search.do(resume)
    return search.state().layers()


def _check(top: int, measure: str, channels: tuple[int, ...] | None) -> None:
    if top < 1:
        raise UsageError(f"the number of exemplars must be at least 1, not {top}")
    if measure not in MEASURES:
        raise UsageError(f"no measure '{measure}'", f"there are {', '.join(MEASURES)}")
    if channels is not None and (not channels or min(channels) < 0):
        raise UsageError(f"no channel {min(channels)}" if channels else "no channel given", do="count from 0")


@dataclass
class ExemplarsRun(SavedRun[FoundExemplars]):
    """One run over the images: what is found, done and lost so far."""

    source: ExemplarsSource
    types: tuple[str, ...] | None
    found: FoundExemplars = field(default_factory=FoundExemplars)
    fields: Mapping[str, ReceptiveField] = field(default_factory=dict)
    synthesized: SynthesizedImages = field(default_factory=dict)

    @property
    def images(self) -> int:
        return self.found.images

    def load(self, file: StrPath) -> Progress:
        name, saved = str(os.fspath(file)), load_exemplars(file)
        saved.source.check_resumed_by(self.source, name)
        progress = saved.progress
        if Progress.after(self.paths, progress.done, progress.skipped) != progress or progress.done > len(self.paths):
            exists = f"its first {progress.done} are not of this run"
            raise InputError(f"cannot resume '{name}'", exists, AGAIN)
        kept = list(saved.found.seen.values())
        for image, picture in zip(kept, pictures_in([image.name for image in kept]), strict=True):
            if picture is not None and picture != picture_of(image.sha256):
                raise InputError(
                    f"cannot resume '{name}'",
                    f"{image.name} has changed",
                    "start again with ‹overwrite=True|--overwrite›",
                )
        self.found, self.synthesized = saved.found, saved.synthesized
        return progress

    def merge(self, part: Part[FoundExemplars], value: FoundExemplars) -> None:
        self.found.merge(value)

    def finish(self) -> None:
        if self.found.seen:  # else all values are NaN or Inf
            self._add_fields()
        super().finish()

    def _add_fields(self) -> None:
        """Find out what a unit of each layer sees, on noise of the size of an image."""
        height, width = next(iter(self.found.seen.values())).size
        noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
        inputs = self.net.inputs(self.net.prepare(Image.fromarray(noise)))
        calls = Selection.of_calls({layer.call for layer in self.found.layers.values()})
        try:
            self.fields = receptive_fields(self.net, inputs, calls, self.types)
        except (InputError, LayerError) as error:  # a layer that runs only for some images
            self.settings.listener.note(self.net.name, f"what a unit sees is not known: {error}")

    def state(self) -> SavedExemplars:
        return SavedExemplars(self.source, self.found, self.progress, self.fields, self.synthesized)

    def write(self, file: StrPath) -> None:
        save_exemplars(file, self.state())
