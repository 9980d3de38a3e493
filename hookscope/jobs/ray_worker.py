"""What runs in a worker process of Ray: it holds the model and does one block of images after another."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hookscope.errors import InstallationError, ModelError
from hookscope.jobs.job import done_packed, packed_error
from hookscope.models import describe_error, package_versions


class RayWorker:
    """Does packed blocks with the packed job and model; an error of the beginning is the answer to each block."""

    def __init__(self, packed: bytes, versions: Mapping[str, str], folder: str, device: str) -> None:
        self._error = b""
        self._do: Callable[[bytes], bytes] = lambda block: self._error
        try:
            check_versions(versions)
            with contextlib.suppress(OSError):  # another machine may not have it
                os.chdir(folder)  # names of files may be relative
            self._open(packed, device)
        except Exception as error:
            self._error = packed_error(error)

    def _open(self, packed: bytes, device: str) -> None:
        try:
            job, net = pickle.loads(packed)
        except Exception as error:
            asked = f"a worker cannot load the model: {describe_error(error)}"
            raise ModelError(asked, do="install what it imports on every machine") from error
        preprocess = replace(net.preprocess, device=device)
        net = replace(net, model=net.model.to(device), device=device, preprocess=preprocess)
        self._opened: Any = job.open(net)  # until the process ends
        measure = self._opened.__enter__()
        self._do = lambda block: done_packed(job, net, pickle.loads(block), measure)

    def __call__(self, block: bytes) -> bytes:
        """The part of a block, or an error, packed."""
        return self._do(block)


def check_versions(expected: Mapping[str, str]) -> None:
    """Refuse other versions of hookscope, torch and torchvision than the driver's; builds may differ.

    Raises:
        InstallationError: The versions differ.
    """
    here = package_versions()
    for name, version in expected.items():
        if name in here and here[name].partition("+")[0] != version.partition("+")[0]:
            asked = f"a worker has {name} {here[name]}, and this process {version}"
            raise InstallationError(asked, do="install the same versions on all machines of the cluster")
