"""Exemplars of many images in one run: saved while it goes on, resumed after an interruption, read again as results."""

from __future__ import annotations

import base64
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hookscope.display import Rows, RowTuple
from hookscope.drawing import channel_numbers, image_bytes
from hookscope.errors import ImageError, InputError, LayerError, UsageError, check_whole, printable
from hookscope.exemplars.channels import Candidates
from hookscope.exemplars.facts import ChannelExemplars, Exemplar, LayerExemplars, SynthesizedImage
from hookscope.exemplars.job import MEASURES, ExemplarsJob, FoundExemplars, FoundInLayer, SeenImage
from hookscope.geometry import ReceptiveField, receptive_fields
from hookscope.hooks import AnyModel, Layers, Selection, select_types
from hookscope.images import list_pictures, open_image
from hookscope.jobs import (
    AGAIN,
    Images,
    MemoryEngine,
    Part,
    Progress,
    RunIdentity,
    RunSettings,
    SavedRun,
    StateKind,
    fingerprint_of,
    layers_in_words,
    paths_or_items,
    picture_of,
    pictures_in,
    read_state,
    write_state,
)
from hookscope.models import LoadedModel, as_loaded
from hookscope.system import StrPath

_KIND = StateKind("saved exemplars", "give the exemplars.json of `hookscope exemplars -o FOLDER`", name="exemplars")
_FIND = "run ‹find_exemplars|`hookscope exemplars`› again"
SynthesizedImages = Mapping[str, Mapping[int, tuple[SynthesizedImage, ...]]]
"""By the key of a layer and the channel; none for a channel that no gradient reaches."""

_WHOLE = ReceptiveField("whole", (0.0, 0.0), reason="it was not computed")


@dataclass(frozen=True)
class ExemplarsSource(RunIdentity):
    """What exemplars were found in, and how; a label is a folder inside one of ``folders``."""

    channels: str
    measure: str
    top: int
    least: bool
    folders: str


@dataclass(frozen=True)
class SavedExemplars:
    """What was found so far, its source, how far the run is, and what a unit of each layer sees if it is complete."""

    source: ExemplarsSource
    found: FoundExemplars
    progress: Progress
    receptive_fields: Mapping[str, ReceptiveField] = field(default_factory=dict)
    synthesized: SynthesizedImages = field(default_factory=dict)  # also those that a later best exemplar exceeds

    def layers(self) -> Rows[LayerExemplars]:
        return Rows(self._layer(layer) for layer in self.found.layers.values())

    def _layer(self, layer: FoundInLayer) -> LayerExemplars:
        window = self.receptive_fields.get(layer.key, _WHOLE)
        bests = [self._by_channel(best.best(self.found.prints_of), len(layer.channels), window) for best in layer.bests]
        least = bests[1] if layer.least else [()] * len(layer.channels)
        facts = layer.histograms.shown(), layer.means.selectivity(), layer.nonfinite.tolist()
        made_of, channels = self.synthesized.get(layer.key, {}), []
        rows: Iterator[Any] = zip(layer.channels, bests[0], least, *facts, strict=True)
        for channel, most, fewest, (counts, edges), (best_class, selectivity), nonfinite in rows:
            classes = tuple(Counter(exemplar.label for exemplar in most if exemplar.label).most_common())
            highest = most[0].value if most else None
            made = tuple(image for image in made_of.get(channel, ()) if image.best == highest)
            rest = selectivity, best_class, nonfinite, made, made_of.get(channel) == ()
            channels.append(ChannelExemplars(channel, most, fewest, counts, edges, classes, *rest))
        return LayerExemplars(layer.call, layer.part, self.source.measure, layer.images, window, RowTuple(channels))

    def _by_channel(self, best: Candidates, channels: int, window: ReceptiveField) -> list[tuple[Exemplar, ...]]:
        by_channel: list[list[Exemplar]] = [[] for _ in range(channels)]
        for channel, value, position, row, column in best.tolist():
            image = self.found.seen[position]
            place = None if row < 0 else (row, column)
            box = (0, 0, image.size[1], image.size[0]) if place is None else window.box(place, image.size)
            seen_in = position, image.name, image.sha256, image.label
            by_channel[channel].append(Exemplar(value, *seen_in, place, box, image.size, image.image))
        return [tuple(exemplars) for exemplars in by_channel]


def save_exemplars(path: StrPath, saved: SavedExemplars) -> None:
    """Write ``saved`` to ``path`` as JSON, whole or not at all."""
    exemplars = saved.found
    layers = [layer.state_dict(exemplars.prints_of) for layer in exemplars.layers.values()]
    used = sorted(exemplars.used())
    used_images = [exemplars.seen[position] for position in used]
    prints = np.stack([image.print for image in used_images]) if used_images else np.zeros((0, 0), np.float16)
    padded = np.pad(prints, ((0, 0), (0, -prints.shape[1] % 4)))
    images = {
        "position": used,
        "facts": [[image.name, image.sha256, image.label, list(image.size)] for image in used_images],
        "print": padded.view(np.int64),
        "print_size": prints.shape[1],
    }
    about = {"source": asdict(saved.source), "progress": saved.progress.state_dict(), "count": exemplars.images}
    fields = {key: asdict(window) for key, window in saved.receptive_fields.items()}
    made = {
        key: {channel: [_packed(image) for image in images] for channel, images in by_channel.items()}
        for key, by_channel in saved.synthesized.items()
    }
    write_state(path, _KIND, about | {"images": images, "layers": layers, "fields": fields, "synthesized": made})


def save_synthesized(path: StrPath, layers: Iterable[LayerExemplars]) -> None:
    """Put the synthesized images of ``layers`` into the file of `save_exemplars` from which they come."""
    made = {
        layer.key: {unit.channel: unit.synthesized for unit in layer.channels if unit.synthesized or unit.unreached}
        for layer in layers
    }
    save_exemplars(path, replace(load_exemplars(path), synthesized=made))


def _packed(made: SynthesizedImage) -> list[Any]:
    return [base64.b64encode(image_bytes(made.image)).decode("ascii"), made.value, made.best, made.seed]


def _unpacked(png: str, value: float, best: float | None, seed: int) -> SynthesizedImage:
    try:
        image = open_image(base64.b64decode(png))
    except ImageError as error:
        raise ValueError(f"a synthesized image: {error}") from error
    return SynthesizedImage(image, float(value), None if best is None else float(best), int(seed))


def load_exemplars(path: StrPath) -> SavedExemplars:
    return read_state(path, _KIND, _restored)


def _restored(content: dict[str, Any]) -> SavedExemplars:
    images = content["images"]
    prints = np.ascontiguousarray(images["print"]).view(np.float16)[:, : int(images["print_size"])]
    rows = zip(images["position"], images["facts"], prints, strict=True)
    by_position = {
        int(position): SeenImage(name, sha256, label, (int(size[0]), int(size[1])), vector)
        for position, (name, sha256, label, size), vector in rows
    }
    layers = {layer.key: layer for layer in map(FoundInLayer.from_state, content["layers"])}
    exemplars = FoundExemplars(layers, by_position, int(content["count"]))
    fields = {key: _field(parts) for key, parts in content["fields"].items()}
    made = {
        key: {int(channel): tuple(_unpacked(*image) for image in images) for channel, images in by_channel.items()}
        for key, by_channel in content.get("synthesized", {}).items()
    }
    progress = Progress.from_state(content["progress"])
    return SavedExemplars(ExemplarsSource(**content["source"]), exemplars, progress, fields, made)


def _field(parts: Mapping[str, Any]) -> ReceptiveField:
    named: dict[str, Any] = {name: tuple(part) if isinstance(part, list) else part for name, part in parts.items()}
    return ReceptiveField(**named)


def read_exemplars(path: StrPath) -> Rows[LayerExemplars]:
    """Read the exemplars that `find_exemplars` saved, without the model and the images.

    Of a run that was interrupted they are of the images that it has done, with ``field.source`` ``whole``.

    Raises:
        InputError: There is no such file, or it is damaged, of another kind or of another format.

    Example:
        >>> import os, tempfile, hookscope
        >>> from hookscope import find_exemplars
        >>> net = hookscope.load_model("shapes")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "exemplars.json")
        ...     _ = find_exemplars(net, ["samples/shapes/star.png"], layers="features.10", channels=[0], save=path)
        ...     [layer] = read_exemplars(path)
        >>> layer.call.name, layer.images, layer.channels[0].most[0].name
        ('features.10', 1, 'samples/shapes/star.png')
    """
    return load_exemplars(path).layers()


def read_exemplars_of(path: StrPath, net: LoadedModel) -> Rows[LayerExemplars]:
    """`read_exemplars`, if they were found with this model, its weights and its preprocessing.

    Raises:
        InputError: They were found with others, or the file cannot be read.
    """
    saved, name = load_exemplars(path), printable(str(path))
    if saved.source.fingerprint != fingerprint_of(net.model):
        exists = f"they are of {saved.source.model}, weights {saved.source.weights}"
        raise InputError(f"'{name}' holds no exemplars of {net.name} with these weights", exists, _FIND)
    if saved.source.preprocess != (here := net.preprocess.describe()):
        exists = f"{saved.source.preprocess}, here {here}"
        raise InputError(f"the exemplars in '{name}' had another preprocessing", exists, _FIND)
    return saved.layers()


def find_exemplars(
    net: AnyModel,
    images: Images,
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
) -> Rows[LayerExemplars]:
    """Find the images, and the places in them, that excite each channel of the chosen layers most.

    All layers are read in one pass over the images. Memory does not grow with the number of images: it holds what is
    kept. An image counts by its largest value (``measure="max"``), its mean or its largest absolute value.
    Near-duplicates count once: copies, also re-encoded, resized or a little brighter. Of equal values the first image
    in the list wins. An image on which that value is NaN or Inf is left out for the channel, and counted.

    Feature maps ``(N, C, H, W)``, clips, tokens ``(N, L, C)`` and vectors ``(N, C)`` are understood. Tokens have places
    if they fold to a grid; class tokens are then left out. Vectors have no places. If the rows of an output are not the
    images of the batch, as in the heads of a detector, a batch size of 1 makes all of them one image.

    The label of an image is the name of its folder, if ``images`` names a folder above it, or what a Dataset gives.
    With labels, each channel has classes and a selectivity.

    Args:
        net: The model, as `load_model` returns it; or a module, whose usual preprocessing is then assumed.
        images: Image files and folders, in an order that stays the same between runs; or images in memory, as
            `extract` takes them: images of Pillow, tensors ``(C, H, W)`` of the input, a Dataset or a DataLoader.
        layers: A selection, as `capture` takes it; by default every call with an index.
        types: Class names that indices and ``all`` count, see `capture`.
        channels: The channels of each layer, from 0; None for all.
        top: How many exemplars a channel has.
        least: Whether to find the images that excite each channel least, too.
        measure: ``max``, ``mean`` or ``abs``.
        folders: Folders that were named, if ``images`` lists the files in them.
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
    wanted = None if channels is None else channel_numbers(channels)
    check_whole("top", top)
    if measure not in MEASURES:
        raise UsageError(f"no measure '{measure}'", f"there are {', '.join(MEASURES)}")
    classes = select_types(types) if types else None
    paths, items = paths_or_items(images)
    if paths is None and (save is not None or run.engine is not None):
        raise UsageError("a saved run or an engine reads files, not images in memory", do="give paths, or leave it out")
    run = run if paths is not None else replace(run, engine=MemoryEngine(items))
    files: list[Any] = list_pictures(paths or ()) if folders is None else list(paths or ())
    if folders is None:
        folders = [path for path in paths or () if os.path.isdir(path)]
    below = tuple(map(os.path.normpath, folders))
    job = ExemplarsJob(layers, classes, wanted, top, least, measure, below, run.images_in_pass, run.workers)
    words = "all" if wanted is None else ", ".join(map(str, wanted))
    about: dict[str, Any] = {"channels": words, "measure": measure, "top": top, "least": least}
    about["folders"] = ", ".join(below)
    source = ExemplarsSource.of(net, layers_in_words(layers, classes), save is not None, **about)
    search = ExemplarsRun(net, files, job, run, save, source, classes)
    search.do(resume)
    return search.state().layers()


@dataclass
class ExemplarsRun(SavedRun[FoundExemplars]):
    source: ExemplarsSource
    types: tuple[str, ...] | None
    found: FoundExemplars = field(default_factory=FoundExemplars)
    fields: Mapping[str, ReceptiveField] = field(default_factory=dict)
    synthesized: SynthesizedImages = field(default_factory=dict)

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
                do = "start again with ‹overwrite=True|--overwrite›"
                raise InputError(f"cannot resume '{name}'", f"{image.name} has changed", do)
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
        shape = (*self.net.preprocess.input_shape[:-2], height, width)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=self.net.preprocess.dtype)
        inputs = self.net.inputs(noise.to(self.net.device))
        calls = Selection.of_calls({layer.call for layer in self.found.layers.values()})
        try:
            self.fields = receptive_fields(self.net, inputs, calls, self.types)
        except (InputError, LayerError) as error:  # a layer that runs only for some images
            self.settings.listener.note(self.net.name, f"what a unit sees is not known: {error}")

    def state(self) -> SavedExemplars:
        return SavedExemplars(self.source, self.found, self.progress, self.fields, self.synthesized)

    def write(self, file: StrPath) -> None:
        save_exemplars(file, self.state())
