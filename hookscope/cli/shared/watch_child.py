"""``hookscope watch SCRIPT``: a process that the script has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from multiprocessing import process, util
from typing import Any

from hookscope.cli.output.formats import Output
from hookscope.cli.shared.watch_run import WatchRun
from hookscope.system import after_import
from hookscope.training import LateLog


class _WatchedChild(WatchRun):
    """A process that a watched script has started; its log has ``.process1``, ``.process2``... in the name."""

    def __init__(self, path: str, script: str, settings: Mapping[str, Any], quiet: bool) -> None:
        self._output = Output(quiet=quiet)
        self._name, self._path = script, path
        self._settings = {
            **settings,
            "on_trouble": lambda text: self._say(f"Note: {self._name}: {text}"),
        }
        self._pid, self._stderr = os.getpid(), sys.stderr
        self._monitor: Any = None
        self._error: BaseException | None = None
        self._sinks = []
        self._opened: Any = LateLog(self._own_log, _loads_data)

    def _own_log(self) -> str:
        number = "-".join(map(str, process.current_process()._identity))
        begin, suffix = os.path.splitext(self._path)
        self._name = f"process {number} of {self._name}"
        self._path = self._log = f"{begin}.process{number}{suffix}"
        return self._path

    def begin(self) -> None:
        after_import("torch", self._enter)

    def leave(self) -> None:
        error = sys.exc_info()[1]
        self._error = SystemExit(error.code) if isinstance(error, SystemExit) else error
        note = self._close()
        if self._monitor is not None and self._monitor.steps and not _loads_data():
            self._say(note)


def _loads_data() -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


_here: _WatchedChild | None = None


def watch_child(settings: tuple[str, str, Mapping[str, Any], bool]) -> None:
    """Watch this process, which a watched script has started."""
    global _here
    if _here is None or _here._pid != os.getpid():
        if WatchRun.of_script is not None:  # forked off: take the hooks of the parent away
            WatchRun.of_script.forget()
        _here = _WatchedChild(*settings)
        _here.begin()
    util.Finalize(None, _here.leave, exitpriority=-1)
