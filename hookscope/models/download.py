"""Weights from torch's cache or the network: within seconds, whole, or one line that says why not."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import re
import threading
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hookscope.errors import WeightsError
from hookscope.models.model_source import Progress
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
        do = "use ‹weights='none'|--weights none›, or a checkpoint file"
        raise WeightsError(f"cannot download {where}: {reason}{damaged}", do=do) from error
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
    """Write the answer to ``file`` and return its SHA-256."""
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
