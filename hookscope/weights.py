"""Weights from torchvision's cache or the network, and from checkpoint files: found, checked, never executed."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hookscope.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["fetch", "fitting_error", "is_weights_file", "load_file", "read_state_dict"]

# Two waits, for the answer and for its first bytes, stay below fifteen seconds even where packets vanish.
PATIENCE_SECONDS = 7.0
_SUFFIXES = (".pth", ".pt", ".ckpt", ".bin", ".tar", ".safetensors")
_WRAPPERS = ("state_dict", "model_state_dict", "model", "model_ema", "net")
_PREFIXES = ("module.", "_orig_mod.")

Progress = Callable[[int, int | None], None]


def is_weights_file(weights: str) -> bool:
    """Whether ``weights`` means a file rather than one of torchvision's names."""
    return "/" in weights or os.sep in weights or weights.endswith(_SUFFIXES) or os.path.isfile(weights)


def fetch(url: str, progress: Progress | None = None) -> Path:
    """The checkpoint at ``url``: torchvision's cached copy when it is whole, else downloaded into that cache.

    Both are held against the hash in the file's name, which torchvision checks for downloads alone.

    Args:
        url: Address whose last part ends in ``-HASH.pth``.
        progress: Called with the bytes so far and their total, None when the server does not say.

    Raises:
        WeightsError: no network, no answer in time, a damaged download, a folder that cannot be written.
    """
    import torch

    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    damaged = ""
    if path.is_file():
        if _hash_fits(path.name, _hash_of(path)):
            return path
        damaged = f"; the cached {path} is damaged"
    try:
        _download(url, path, progress)
    except WeightsError as error:
        raise WeightsError(error.asked + damaged, error.exists, error.do) from error
    except OSError as error:
        raise WeightsError(f"cannot download {url}: {_reason(error)}{damaged}", do=_WITHOUT_NETWORK) from error
    return path


_WITHOUT_NETWORK = "use --weights none, or a checkpoint file"


def _reason(error: BaseException) -> str:
    inner = getattr(error, "reason", None)
    return str(inner or getattr(error, "strerror", None) or error or type(error).__name__)


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_fits(name: str, digest: str) -> bool:
    found = re.search(r"-([0-9a-f]{6,})\.", name)
    return found is None or digest.startswith(found[1])


def _open(url: str) -> Any:
    """The answer to a request, or a WeightsError in time: a name look-up has no timeout of its own."""
    import urllib.request

    answers: list[Any] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "hookscope"})
            answers.append(urllib.request.urlopen(request, timeout=PATIENCE_SECONDS))
        except Exception as error:
            answers.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE_SECONDS)
    if not answers:
        raise TimeoutError(f"no answer within {PATIENCE_SECONDS:g} seconds")
    if isinstance(answers[0], Exception):
        raise answers[0] if isinstance(answers[0], OSError) else OSError(str(answers[0]))
    return answers[0]


def _download(url: str, path: Path, progress: Progress | None) -> None:
    with _open(url) as answer:
        path.parent.mkdir(parents=True, exist_ok=True)
        total = answer.headers.get("Content-Length")
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                digest = _copy(answer, file, int(total) if total else None, progress)
            if not _hash_fits(path.name, digest):
                raise WeightsError(f"the download of {url} is cut short or damaged", do="try again")
            os.chmod(part, 0o644)
            os.replace(part, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part)


def _copy(answer: Any, file: BinaryIO, total: int | None, progress: Progress | None) -> str:
    digest, done = hashlib.sha256(), 0
    while block := answer.read(1 << 20):
        file.write(block)
        digest.update(block)
        done += len(block)
        if progress is not None:
            progress(done, total)
    return digest.hexdigest()


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The state dict in a checkpoint file, with wrappers and prefixes taken off; nothing in the file is executed.

    Understood are ``.safetensors`` and what ``torch.save`` writes, told apart by content; ``state_dict``, ``model``,
    ``model_state_dict`` and ``model_ema`` wrappers; ``module.`` and ``_orig_mod.`` prefixes.

    Raises:
        WeightsError: missing, damaged, not a state dict, or a pickle that wants to run code.
    """
    content = load_file(path)
    for _ in _WRAPPERS:
        inner = next((content[w] for w in _WRAPPERS if isinstance(content.get(w), Mapping)), None)
        if inner is None:
            break
        content = inner
    state = _tensors_of(content)
    if not state:
        keys = ", ".join(map(str, list(content)[:5])) or "nothing"
        raise WeightsError(f"no state dict in {path}", f"it holds {keys}", "save model.state_dict()")
    return _without_prefixes(state)


def _tensors_of(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    import torch

    found = {key: value for key, value in content.items() if isinstance(value, torch.Tensor) and isinstance(key, str)}
    found.pop("n_averaged", None)  # what an averaged model carries beside its weights
    return found


def _without_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    while prefix := next((p for p in _PREFIXES if all(key.startswith(p) for key in state)), None):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def load_file(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The mapping in a checkpoint file, read without executing anything."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read weights {path}: {_reason(error)}") from error
    if not head:
        raise WeightsError(f"cannot read weights {path}: the file is empty")
    content = _load_safetensors(path) if head[8:9] == b"{" else _load_torch(path)
    if not isinstance(content, Mapping):
        held = type(content).__name__
        raise WeightsError(f"no state dict in {path}", f"it holds a {held}", "save model.state_dict()")
    return content


def _load_safetensors(path: str | os.PathLike[str]) -> Any:
    try:
        from safetensors.torch import load_file as load
    except ImportError:
        raise WeightsError(
            f"{path} is a safetensors file and the package is missing", do="pip install 'hookscope[safetensors]'"
        ) from None
    try:
        return load(path)
    except Exception as error:
        raise WeightsError(f"cannot read weights {path}: {_first_line(error)}", "damaged or cut short") from error


def _load_torch(path: str | os.PathLike[str]) -> Any:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own text is long and advises the unsafe switch: it is read here and never shown
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        if refused or "weights_only" in str(error):
            what = f" ({refused[1]})" if refused else ""
            raise WeightsError(
                f"{path} is more than weights: loading it would run code{what}; refused", do="save model.state_dict()"
            ) from error
        raise WeightsError(f"cannot read weights {path}: damaged, cut short or no checkpoint") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def mismatches(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """The keys that are missing, left over or of another shape when ``state`` is loaded into ``model``."""
    own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    given = {key: tuple(value.shape) for key, value in state.items()}
    optional = {key for key in own if key.endswith("num_batches_tracked")}  # old checkpoints have none
    return [key for key in sorted(own.keys() | given.keys()) if own.get(key) != given.get(key) and key not in optional]


def fitting_error(
    path: str, name: str, model: nn.Module, state: Mapping[str, Tensor], fits: str | None
) -> WeightsError:
    """The one line for a checkpoint of another architecture: how many keys match, and which model would fit."""
    wrong = mismatches(model, state)
    own = model.state_dict()
    matching = sum(key in own and own[key].shape == value.shape for key, value in state.items())
    first = wrong[0] if wrong else ""
    exists = f"{matching} of {len(own)} keys match, the first that does not is {first}"
    return WeightsError(f"{path} does not fit {name}", exists, f"it would fit {fits}" if fits else "")
