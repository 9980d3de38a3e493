"""Weights from torchvision's cache or the network: in time, whole, or one line that says why not."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hookscope.errors import WeightsError
from hookscope.models.model_source import Progress

# Two waits, for the answer and for its first bytes, stay below fifteen seconds even where packets vanish.
PATIENCE_SECONDS = 7.0


def fetch(url: str, progress: Progress | None = None) -> Path:
    """The checkpoint at ``url``: torchvision's cached copy when it is whole, else downloaded into that cache.

    Both are held against the hash in the file's name, which torchvision checks for downloads alone.

    Args:
        url: Address whose last part ends in ``-HASH.pth``.
        progress: Called with the bytes so far and their total, None when the server does not say.

    Raises:
        WeightsError: no network, no answer in time, a damaged download, a folder that cannot be written.
    """
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    damaged = ""
    try:
        if path.is_file():
            if _hash_fits(path.name, _hash_of(path)):
                return path
            damaged = f"; the cached {path} is damaged"
        _download(url, path, progress)
    except WeightsError as error:
        raise WeightsError(error.asked + damaged, error.exists, error.do) from error
    except OSError as error:
        where = f"{url} to {path.parent}" if error.filename else url
        raise WeightsError(f"cannot download {where}: {_reason(error)}{damaged}", do=_WITHOUT_NETWORK) from error
    return path


_WITHOUT_NETWORK = "use --weights none, or a checkpoint file"


def _reason(error: OSError) -> str:
    inner = getattr(error, "reason", None)
    return str(inner or error.strerror or error or type(error).__name__)


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_fits(name: str, digest: str) -> bool:
    found = re.search(r"-([0-9a-f]{6,})\.", name)
    return found is None or digest.startswith(found[1])


def _open(url: str) -> Any:
    """The answer to a request, or an OSError in time: a name look-up has no timeout of its own."""
    import urllib.error
    import urllib.request

    answers: list[Any] = []
    given_up = threading.Event()

    def ask() -> None:
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "hookscope"})
            answer = urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)
            if given_up.is_set():
                answer.close()
            answers.append(answer)
        except Exception as error:
            answers.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE_SECONDS)
    if not answers:
        given_up.set()
        raise TimeoutError(f"no answer within {PATIENCE_SECONDS:g} seconds")
    if isinstance(answers[0], urllib.error.HTTPError):
        answers[0].close()  # it is an answer too, and holds its connection
    if isinstance(answers[0], Exception):
        raise answers[0] if isinstance(answers[0], OSError) else OSError(str(answers[0]))
    return answers[0]


def _download(url: str, path: Path, progress: Progress | None) -> None:
    with _open(url) as answer:
        path.parent.mkdir(parents=True, exist_ok=True)
        length = answer.headers.get("Content-Length") or ""
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                digest = _copy(answer, file, int(length) if length.isdecimal() else None, progress)
            if not _hash_fits(path.name, digest):
                raise WeightsError(f"the download of {url} is cut short or damaged", do="try again")
            os.chmod(part, 0o644)
            os.replace(part, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part)


def _copy(answer: Any, file: BinaryIO, total: int | None, progress: Progress | None) -> str:
    from http.client import HTTPException

    digest, done = hashlib.sha256(), 0
    try:
        while block := answer.read(1 << 20):
            file.write(block)
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(done, total)
    except HTTPException as error:  # no OSError, though it is the network that failed
        raise OSError(f"the answer broke off after {done} bytes") from error
    return digest.hexdigest()
