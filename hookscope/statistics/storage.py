"""Running statistics in a file: saved during a run, resumed after an interruption, merged with others."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from hookscope._version import __version__
from hookscope.errors import InputError, printable
from hookscope.findings import counted
from hookscope.hooks import tensors_in
from hookscope.models import OnNote, warn_of_image
from hookscope.statistics.coverage import Coverage
from hookscope.statistics.totals import RunningStatistics
from hookscope.system import StrPath, write_atomically

FORMAT = 1
"""Number of the file layout; a file of another number is refused."""
BEGINNING = b'{"hookscope": '
"""The first bytes of every file."""

_MOST_BYTES = 1 << 33  # of resnet50 with --rank it has 400 million
_MOST_PARTS = 2_000_000  # of the JSON; a layer has 150
_MOST_SWELLING = 64  # bytes of arrays for one of the file; a network has about two
_ALWAYS_ALLOWED = 1 << 26  # bytes of arrays, whatever the file has
_GIVE = "give what `stats --save` wrote"
_ARRAYS = ("int64", "float64")


@dataclass(frozen=True, slots=True)
class Source:
    """What was measured, see `fingerprint_of`; only running statistics of the same source can be merged.

    ``assumed`` says that nobody has said the mean and the standard deviation of ``preprocess``.
    """

    model: str
    weights: str
    fingerprint: str
    preprocess: str
    layers: str
    rank: bool = False
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: the number of images measured or lost, SHA-256 of their names, and the number of lost ones."""

    done: int
    names: str
    lost: int = 0

    @classmethod
    def after(cls, paths: Sequence[str], done: int, lost: int = 0) -> Progress:
        """The progress of a run after the first ``done`` of ``paths``."""
        digest = hashlib.sha256()
        for path in paths[:done]:
            digest.update(path.encode("utf-8", "surrogateescape") + b"\0")
        return cls(done, digest.hexdigest(), lost)


@dataclass(frozen=True)
class SavedStatistics:
    """Running statistics, their source, and the progress of their run; None if merged from several runs.

    ``coverage`` is that of the run which made them; it is not saved.
    """

    source: Source
    totals: RunningStatistics
    progress: Progress | None = None
    coverage: Coverage = field(default_factory=Coverage, compare=False)


def fingerprint_of(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers with their names."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(f"{name}\0".encode())
        for tensor in tensors_in(value).values():  # a quantized layer packs weight and bias
            values = tensor.dequantize() if tensor.is_quantized else tensor
            digest.update(f"{values.dtype} {tuple(values.shape)}\0".encode())
            digest.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_statistics(path: StrPath, saved: SavedStatistics) -> None:
    """Write ``saved`` to ``path`` as JSON, whole or not at all.

    Raises:
        WriteError: The file cannot be written; an earlier file is unchanged.
    """
    content = {
        "source": asdict(saved.source),
        "progress": None if saved.progress is None else asdict(saved.progress),
        "tally": _encoded(saved.totals.state_dict()),
    }
    whole = {"hookscope": __version__, "format": FORMAT, "sha256": _digest(content), "content": content}
    write_atomically(path, json.dumps(whole, allow_nan=False).encode("ascii") + b"\n")


def load_statistics(path: StrPath) -> SavedStatistics:
    """Read a file of `save_statistics`.

    Raises:
        InputError: There is no such file, or it is damaged, of another kind or of another format.
    """
    name = printable(os.fspath(path))
    try:
        data = _content(path)
        whole = json.loads(data)
    except OSError as error:
        raise InputError(f"no saved statistics '{name}': {error.strerror or error}") from error
    except (ValueError, RecursionError, MemoryError):
        raise InputError(f"'{name}' holds no saved statistics, or is damaged", do=_GIVE) from None
    if not isinstance(whole, dict) or "hookscope" not in whole or "content" not in whole:
        raise InputError(f"'{name}' holds no saved statistics", do=_GIVE)
    if whole.get("format") != FORMAT:
        formats = f"it has format {whole.get('format')}, this version reads {FORMAT}"
        raise InputError(f"'{name}' was saved by hookscope {whole['hookscope']}", formats, "measure again")
    try:
        if whole.get("sha256") != _digest(whole["content"]):
            raise InputError(f"'{name}' is damaged: its content is not what was saved", do="measure again")
        content = whole["content"]
        progress = content["progress"]
        return SavedStatistics(
            Source(**content["source"]),
            RunningStatistics.from_state(
                _Decoder(_ALWAYS_ALLOWED + _MOST_SWELLING * len(data)).decoded(content["tally"])
            ),
            None if progress is None else Progress(**progress),
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, zlib.error) as error:
        raise InputError(f"'{name}' is damaged: {error}", do="measure again") from error


def _content(path: StrPath) -> bytearray:
    """The bytes of a file of `save_statistics`; of another, which may never end, the beginning."""
    data, parts = bytearray(), 0
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 24 if data else len(BEGINNING)):
            data += chunk
            parts += sum(map(chunk.count, (b",", b"[", b"{")))
            if len(data) > _MOST_BYTES or parts > _MOST_PARTS:
                asked = f"'{printable(os.fspath(path))}' is too large for saved statistics"
                raise InputError(asked, f"{len(data):,} bytes were read", _GIVE)
            if not data.startswith(BEGINNING) or b"\0" in chunk:
                break
    return data


def merge_statistics(paths: Sequence[StrPath], on_note: OnNote = warn_of_image) -> SavedStatistics:
    """Merge the running statistics of several files.

    ``on_note`` gets a file that does not know all its images, which may count twice, and that as text; it warns by
    default.

    Raises:
        InputError: A file cannot be read, the sources differ, or two files hold the same images.
    """
    if not paths:
        raise InputError("no saved statistics to merge", do=_GIVE)
    whole = None
    runs: dict[Progress, StrPath] = {}
    owners: dict[int, StrPath] = {}
    for path in paths:
        saved = load_statistics(path)
        pictures = saved.totals.pictures
        if whole is not None:
            check_same_source(whole.source, saved.source, str(paths[0]), str(path))
        if common := [number for number, picture in enumerate(pictures, 1) if picture in owners]:
            exists = f"{counted(len(common), 'image')} would count twice, the first is number {common[0]} of '{path}'"
            raise _same_images(owners[pictures[common[0] - 1]], path, exists)
        owners |= dict.fromkeys(pictures, path)
        if len(pictures) < saved.totals.images:
            if saved.progress is not None and saved.progress in runs:
                raise _same_images(runs[saved.progress], path, "their names are the same")
            if len(paths) > 1:
                unknown = counted(saved.totals.images - len(pictures), "image")
                on_note(str(path), f"it does not identify {unknown}, which may count twice")
            if saved.progress is not None:
                runs[saved.progress] = path
        if whole is None:
            whole = saved
        else:
            whole.totals.merge(saved.totals)
    assert whole is not None
    return whole if len(paths) == 1 else replace(whole, progress=None)


def _same_images(first: StrPath, second: StrPath, exists: str) -> InputError:
    return InputError(f"'{first}' and '{second}' hold the same images", exists, "leave one of them out")


def picture_of(sha256: str) -> int:
    """The identity of an image: the first 64 bits of the SHA-256 of its file, which has the same under any name."""
    return int.from_bytes(bytes.fromhex(sha256[:16]), "big", signed=True)


def pictures_in(paths: Iterable[str]) -> list[int | None]:
    """The identity of each image file; None for pipes and files that cannot be read."""
    pictures: list[int | None] = []
    for path in paths:
        pictures.append(None)
        with contextlib.suppress(OSError, ValueError):
            if os.path.isfile(path):
                with open(path, "rb") as stream:
                    pictures[-1] = picture_of(hashlib.file_digest(stream, "sha256").hexdigest())
    return pictures


def check_same_source(first: Source, second: Source, first_name: str, second_name: str) -> None:
    """Refuse to merge statistics of different models, weights, preprocessings or layers.

    Raises:
        InputError: The sources differ; the error says in what.
    """
    for name, value in asdict(first).items():
        other = getattr(second, name)
        if name == "layers" and value.replace(", ", ",") == other.replace(", ", ","):
            continue  # version 0.1.0 wrote several selections with a space
        if value != other and name == "fingerprint":
            raise InputError(f"'{first_name}' and '{second_name}' were measured on different weights of {first.model}")
        if value != other:
            raise InputError(f"'{first_name}' and '{second_name}' do not match", f"{name} {value} and {other}")


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _encoded(value: Any) -> Any:
    """``value`` for JSON: arrays packed, NaN and Inf by name."""
    if isinstance(value, np.ndarray):
        packed = zlib.compress(np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<")).tobytes(), 1)
        return {"array": value.dtype.name, "shape": list(value.shape), "data": base64.b64encode(packed).decode("ascii")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        return {str(key): _encoded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encoded(part) for part in value]
    return value


@dataclass
class _Decoder:
    """Unpacks what `_encoded` packed, arrays of at most ``left`` bytes in all."""

    left: int

    def decoded(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decoded(part) for part in value]
        if not isinstance(value, dict):
            return value
        if "float" in value:
            return float(value["float"])
        if "array" in value:
            return self._array(value)
        return {key: self.decoded(part) for key, part in value.items()}

    def _array(self, value: dict[str, Any]) -> np.ndarray[Any, Any]:
        if value["array"] not in _ARRAYS:
            raise ValueError(f"an array of {value['array']}")
        size = math.prod(value["shape"]) * 8
        self.left -= size
        if self.left < 0:
            raise ValueError("its arrays are far larger than the file")
        data = zlib.decompressobj().decompress(base64.b64decode(value["data"]), size + 1)
        kind = np.dtype(value["array"]).newbyteorder("<")
        return np.frombuffer(data, kind).astype(value["array"]).reshape(value["shape"])
