"""Torchvision's models as its builders make them, with its weights, the bundled ones or a checkpoint; and quantized."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import os
import queue
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn import functional as F

from hookscope.errors import InstallationError, ModelError, WeightsError, is_out_of_memory
from hookscope.models.checkpoints import (
    fitted,
    fitting_error,
    fitting_kwargs,
    load_file,
    load_into,
    mismatches,
    read_checkpoint,
)
from hookscope.models.loaded import LoadedModel, family_of, is_quantized, native_size
from hookscope.models.metadata import WeightsMetadata, read_description, read_metadata
from hookscope.models.model_source import OTHER_WEIGHTS, Progress, Skeleton, WeightsChoice, WeightsKind, random_label
from hookscope.models.names import BUNDLED, BundledModel, broken_pair, torchvision_names, weights_path
from hookscope.models.run import build_on_meta, quiet_and_seeded
from hookscope.models.transforms import Transforms, imagenet_transforms, usual_transforms
from hookscope.system import cache, replacement

# Two waits, for the answer and for its first bytes, stay below fifteen seconds even if packets vanish.
PATIENCE_SECONDS = 7.0


def fetch(url: str, progress: Progress | None = None) -> Path:
    """The checkpoint at ``url``: torch's cached copy if it is whole, else a download into torch's cache.

    Both must have the hash at the end of the file's name. `torch.hub` checks downloads only, has no timeout and prints
    to standard output.

    Raises:
        WeightsError: no network, no answer in time, a damaged download, a folder that cannot be written.
    """
    base = cache.user_folder() if cache.other_homes() and "TORCH_HOME" not in os.environ else None
    path = Path(base, "torch", "hub") if base else Path(torch.hub.get_dir())
    path = path / "checkpoints" / url.rsplit("/", 1)[-1]
    match = re.search(r"-([0-9a-f]{6,})\.", path.name)
    expected = match[1] if match else ""
    damaged = ""
    try:
        if path.is_file():
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest().startswith(expected):
                    return path
            damaged = f"; the cached {path} is damaged"
        with contextlib.closing(_open(url)) as answer:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacement(path) as file:
                if not _copy(answer, file, progress).startswith(expected):
                    raise WeightsError(f"the download of {url} is incomplete or damaged{damaged}", do="try again")
    except OSError as error:
        where = f"{url} to {path.parent}" if error.filename else url
        reason = getattr(error, "reason", None) or error.strerror or error or type(error).__name__
        reason = "there is no network, or no such host" if isinstance(reason, socket.gaierror) else reason
        raise WeightsError(f"cannot download {where}: {reason}{damaged}", do=OTHER_WEIGHTS) from error
    return path


def _open(url: str) -> Any:
    """The server's answer, or an OSError in time. In a thread: the timeout of urlopen excludes the name look-up."""
    answers: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "hookscope"})
            answers.put(urllib.request.urlopen(request, timeout=PATIENCE_SECONDS))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=PATIENCE_SECONDS)
    except queue.Empty:
        answer = TimeoutError()
    if isinstance(getattr(answer, "reason", answer), TimeoutError):
        raise TimeoutError(f"no answer within {PATIENCE_SECONDS:g} seconds")
    if isinstance(answer, urllib.error.HTTPError):
        answer.close()  # it holds its connection
    if isinstance(answer, Exception):
        raise answer if isinstance(answer, OSError) else OSError(str(answer))
    return answer


def _copy(answer: Any, file: BinaryIO, progress: Progress | None) -> str:
    length = answer.headers.get("Content-Length") or ""
    total = int(length) if length.isdecimal() else None
    digest, done = hashlib.sha256(), 0
    try:
        while block := answer.read(1 << 20):
            file.write(block)
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(done, total)
    except HTTPException as error:  # not an OSError, although the network failed
        raise OSError(f"the answer broke off after {done} bytes") from error
    return digest.hexdigest()


_WHAT_TO_GIVE = "give auto, default, none or a file"


@dataclass(frozen=True)
class Architecture:
    """The MODEL argument, torchvision's name of its builder, and the arguments that the builder always gets.

    They are the number of classes of a bundled model, and what keeps builders from downloading and warning.
    """

    name: str
    builder: str
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, name: str) -> Architecture:
        """The architecture of a bundled model or one of torchvision's."""
        if bundled := BUNDLED.get(name):
            return cls(name, bundled.architecture, {"num_classes": bundled.classes})
        kwargs: dict[str, Any] = {}
        if "weights_backbone" in inspect.signature(torchvision_models().get_model_builder(name)).parameters:
            kwargs["weights_backbone"] = None
        if name in ("googlenet", "inception_v3", "quantized_googlenet", "quantized_inception_v3"):
            kwargs["init_weights"] = True
        return cls(name, name, kwargs)

    def build(self, weights: Any = None, **kwargs: Any) -> nn.Module:
        """The model with torchvision's ``weights``, or with random ones; raises a ModelError if it cannot be built."""
        try:
            arguments = {**self.kwargs, **kwargs, "weights": weights}
            model: nn.Module = torchvision_models().get_model(self.builder, **arguments)
        except (RuntimeError, ImportError, ValueError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            what = f"{self.name} with {weights.name}" if weights else self.name
            raise ModelError(f"cannot build {what}: {error}") from error
        return model

    def skeleton(self, **kwargs: Any) -> nn.Module:
        """The model on the meta device; with values if its builder computes with its tensors."""
        try:
            return build_on_meta(lambda: self.build(**kwargs))
        except Exception:
            return self.build(**kwargs)

    def kwargs_for(self, state: Mapping[str, Tensor], usual: nn.Module | None = None) -> dict[str, Any] | None:
        """The builder arguments with which ``state`` fits, None if nothing helps; auxiliary heads may come or go."""
        tries: list[dict[str, Any]] = [{}]
        if any(key.startswith("aux_classifier.") for key in state):
            tries = [{"aux_loss": True}]
        elif self.builder.removeprefix("quantized_") in ("googlenet", "inception_v3"):
            tries = [{}, {"aux_logits": False}]
        return fitting_kwargs(lambda **kwargs: usual if usual and not kwargs else self.skeleton(**kwargs), tries, state)


def torchvision_models() -> Any:
    """``torchvision.models``, or an InstallationError if torchvision is missing or does not fit torch."""
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:
        raise broken_pair(error) or InstallationError(f"cannot import torchvision: {error}") from error


def build_skeleton(name: str) -> Skeleton:
    """The model ``name`` on the meta device, or with values if its builder needs them, and the size of its input."""
    with quiet_and_seeded(0):
        model = Architecture.of(name).skeleton().eval()
    return Skeleton(model, _input_size(name, model))


def _input_size(name: str, model: nn.Module) -> tuple[int, int]:
    if name in BUNDLED:
        return BUNDLED[name].side, BUNDLED[name].side
    if native := native_size(model):
        return native
    family = family_of(model)
    if family in ("detection", "optical_flow"):
        return (320, 320) if family == "detection" else (224, 224)
    return (_metadata_of(_default_entry(name)).transforms or usual_transforms(family)).resize.made_for


def load_from_torchvision(name: str, weights: WeightsChoice, seed: int, progress: Progress | None) -> LoadedModel:
    """The torchvision model ``name`` with ``weights``; ``auto`` falls back on random weights and a note."""
    architecture, default = Architecture.of(name), None
    if name in BUNDLED:
        weights, usual = _of_bundled(BUNDLED[name], weights)
    else:
        default = _default_entry(name)
        usual = _metadata_of(default)
    if weights.kind is WeightsKind.FILE:
        return _from_file(architecture, weights.text, usual)
    entry = _named_entry(name, weights.text) if weights.kind is WeightsKind.NAME else default
    missing = "" if weights.kind is WeightsKind.NONE else "torchvision has none"  # empty: none are wanted
    if missing and entry is None and weights.kind is WeightsKind.DEFAULT:
        raise WeightsError(f"torchvision has no weights for {name}", do=OTHER_WEIGHTS)
    if missing and entry is not None:
        try:
            file = fetch(entry.url, progress)
            loaded = LoadedModel.of(_build_with(architecture, entry, file), name, entry.name, _metadata_of(entry))
            return replace(loaded, checkpoint=str(file))
        except WeightsError as error:
            if weights.kind is not WeightsKind.AUTO:
                asked = f"no weights {entry.name} for {name}: {error.asked}"
                raise WeightsError(asked, error.exists, error.do) from error
            missing = error.asked
    usual = usual.without_weights(f"weights of {name} are random (seed {seed}): {missing}") if missing else usual
    return LoadedModel.of(architecture.build(), name, random_label(seed), usual)


def _of_bundled(bundled: BundledModel, weights: WeightsChoice) -> tuple[WeightsChoice, WeightsMetadata]:
    """The weights of a bundled model, its file, random ones or a checkpoint, never others; and its usual metadata."""
    usual = WeightsMetadata(imagenet_transforms(bundled.side, bundled.side))
    shipped = weights.text == bundled.file and not os.path.exists(bundled.file)
    if shipped or weights.kind in (WeightsKind.AUTO, WeightsKind.DEFAULT):
        return WeightsChoice(WeightsKind.FILE, weights_path(bundled)), usual
    if weights.kind is WeightsKind.NAME:
        raise WeightsError(f"no weights '{weights.text}' for {bundled.name}", f"there is {bundled.file}", _WHAT_TO_GIVE)
    try:
        return weights, read_metadata(weights_path(bundled), bundled.classes, usual)
    except WeightsError as error:
        return weights, usual.noted(f"{error.asked}; so are its class names")


def _metadata_of(entry: Any) -> WeightsMetadata:
    if entry is None:
        return WeightsMetadata()
    return WeightsMetadata(Transforms.of(entry.transforms()), tuple(entry.meta.get("categories") or ()) or None)


def _default_entry(name: str) -> Any:
    """Torchvision's default weights, None if it has none; for a quantized model the weights of its float twin."""
    default = getattr(torchvision_models().get_model_weights(name), "DEFAULT", None)
    return default.meta.get("unquantized", default) if default is not None else None


def _named_entry(name: str, weights: str) -> Any:
    """The weights of that name; a quantized model also has the float weights from which its own were computed."""
    entries = {entry.name: entry for entry in torchvision_models().get_model_weights(name)}
    unquantized = (entry.meta.get("unquantized") for entry in list(entries.values()))
    entries |= {entry.name: entry for entry in unquantized if entry is not None}
    enum, _, member = weights.rpartition(".")
    entry = entries.get(member)
    if entry is None or enum not in ("", type(entry).__name__):
        known = f"it has {', '.join(entries)}" if entries else "it has none"
        raise WeightsError(f"no weights '{weights}' for {name}", known, _WHAT_TO_GIVE)
    return entry


def _build_with(architecture: Architecture, entry: Any, file: Path) -> nn.Module:
    """The model with torchvision's weights, built by torchvision, which sets other arguments to suit the weights.

    Its builder unpickles the cached ``file`` with ``weights_only=False`` and does not check its hash. `fetch` has
    checked the hash, and a load with ``weights_only=True`` proves that the file runs no code.
    """
    load_file(file)
    kwargs: dict[str, Any] = {"quantize": True} if "backend" in entry.meta else {}
    if "init_weights" in architecture.kwargs:
        kwargs["init_weights"] = False
    engine = torch.backends.quantized.engine
    try:
        return architecture.build(entry, **kwargs)
    finally:
        torch.backends.quantized.engine = engine  # with quantize=True the builder sets the engine of the whole process


def _from_file(architecture: Architecture, path: str, usual: WeightsMetadata) -> LoadedModel:
    checkpoint = read_checkpoint(path)
    skeleton = architecture.skeleton()
    state, changes = fitted(skeleton, checkpoint)
    kwargs = architecture.kwargs_for(state, skeleton)
    if kwargs is None:
        raise fitting_error(path, architecture.name, skeleton, state, _model_that_fits(checkpoint.path, state))
    no_values = {"init_weights": False} if "init_weights" in architecture.kwargs else {}
    model = architecture.build(**no_values, **kwargs)
    notes = changes + load_into(model, state, path)
    classes = {**architecture.kwargs, **kwargs}.get("num_classes") or len(usual.categories or ()) or None
    usual = replace(usual, categories=None if "num_classes" in kwargs else usual.categories)
    family = family_of(model)
    metadata = read_metadata(checkpoint.path, classes, usual.noted(*notes), family)
    loaded = LoadedModel.of(model, architecture.name, checkpoint.label, metadata, family)
    return replace(loaded, checkpoint=path)


def _model_that_fits(path: str, state: Mapping[str, Tensor]) -> str | None:
    """The torchvision model that a state dict belongs to, from the file's metadata or the number of parameters."""
    count = sum(value.numel() for key, value in state.items() if "running_" not in key and "num_batches" not in key)
    with suppress(WeightsError):
        name: str = read_description(path).get("model", "")
        if name in torchvision_names() and Architecture.of(name).kwargs_for(state) is not None:
            return name
    for name in torchvision_names():
        entry = _default_entry(name)
        if entry is not None and abs(entry.meta.get("num_params", 0) - count) <= 0.01 * count:
            with suppress(ModelError):
                if not mismatches(Architecture.of(name).skeleton(), state):
                    return name
    return None


_CELLS = (1, 2, 4, 8, 16, 32, 64, 128)
_PICTURES = 8


def load_quantized(
    model: str, builder: str, weights: WeightsChoice, seed: int, progress: Progress | None
) -> LoadedModel:
    """The model ``builder`` of torchvision, whose layers compute in 8 bits, under the name ``model``.

    Float weights (random, a checkpoint, weights of the float model) are quantized here, see `quantize`; ``auto`` and
    ``default`` mean torchvision's quantized weights, and ``auto`` falls back on weights of the float model.
    """
    engines = [engine for engine in torch.backends.quantized.supported_engines if engine != "none"]
    if not engines:
        raise ModelError(f"cannot build {model}: this build of torch has no engine for quantized layers")
    own = WeightsChoice.parse(torchvision_models().get_model_weights(builder).DEFAULT)
    try:
        first = own if weights.kind in (WeightsKind.AUTO, WeightsKind.DEFAULT) else weights
        loaded = load_from_torchvision(builder, first, seed, progress)
    except WeightsError:
        if weights.kind is not WeightsKind.AUTO:
            raise
        loaded = load_from_torchvision(builder, weights, seed, progress)
    loaded = replace(loaded, name=model)
    return loaded if is_quantized(loaded.model) else quantize(loaded)


def quantize(loaded: LoadedModel) -> LoadedModel:
    """A quantizable float model of torchvision with its layers fused and quantized for this machine, in place.

    Ranges of activations are those on synthetic pictures: on photographs a random resnet18 is then 4 % off its float
    twin, 3 % if it is calibrated with the photographs themselves, and 67 % with torchvision's ``torch.rand``.
    """
    net: Any = loaded.model.eval()
    net.fuse_model(is_qat=False)
    net.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
    quantization.prepare(net, inplace=True)
    with torch.no_grad():
        net(calibration_pictures(loaded))
    quantization.convert(net, inplace=True)
    note = f"{loaded.name} is quantized here from float weights, with ranges of {_PICTURES} synthetic images"
    return replace(loaded, notes=(*loaded.notes, note))


def calibration_pictures(loaded: LoadedModel) -> Tensor:
    """``(8, C, H, W)`` prepared pictures of noise at all scales, as photographs have it; always the same ones."""
    channels, height, width = loaded.preprocess.input_shape
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(_PICTURES, channels, height, width)
    for cells in _CELLS:
        noise = torch.randn(_PICTURES, channels, cells, cells, generator=generator)
        total += F.interpolate(noise, size=(height, width), mode="bilinear", align_corners=False)
    low, high = total.amin((1, 2, 3), keepdim=True), total.amax((1, 2, 3), keepdim=True)
    values: Any = loaded.preprocess.transforms
    return torch.stack([values.values(picture) for picture in (total - low) / (high - low)])
