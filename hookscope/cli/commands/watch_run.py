"""A watched script from its first line to its end: when the watcher comes, when it goes, and what is said of it."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hookscope.cli.output import rows as output
from hookscope.errors import NonFiniteError
from hookscope.findings import counted
from hookscope.hooks import Selection
from hookscope.system import Script, after_import, check_folder
from hookscope.training import RunLog, read_runs

if TYPE_CHECKING:
    from hookscope.training import Monitor

_QUICKLY_READ = 16 * 2**20  # bytes; about a second
_OWN_OPTIONS = ("--log", "--every", "--layer", "--tensorboard", "--stop-on", "--show", "--plot")


class WatchRun:
    """A script that is to be watched.

    Making one finds out whether the log can be written, before anything runs. Nothing imports torch before the script
    does: it may have something to say before that, such as how many threads there are to be.
    """

    def __init__(
        self,
        script: Script,
        log: str,
        tensorboard: str | None,
        options: Mapping[str, Any],
        rank: int,
        world_size: int,
    ) -> None:
        self._script, self._log = script, log
        self._path = os.path.abspath(log)  # the script may go to another folder
        self._stops = options["stop_on"] is not None
        self._settings = {
            **{name: options[name] for name in ("every", "layers", "types", "stop_on")},
            "tensorboard": None if tensorboard is None else os.path.abspath(tensorboard),
            "command": list(script.words),
            "rank": rank,
            "world_size": world_size,
            "on_trouble": lambda text: self._say(f"Note: {text}"),
        }
        self._pid = os.getpid()
        self._monitor: Monitor | None = None
        self._error: BaseException | None = None
        self._told = ""
        self._stderr = sys.stderr
        self._check(tensorboard)

    def _check(self, tensorboard: str | None) -> None:
        Selection(self._settings["layers"])
        if tensorboard is not None:
            from hookscope.statistics import check_installed

            check_installed()
            check_folder(tensorboard)
        self._is_new = not os.path.lexists(self._log)
        self._opened = RunLog(self._log)  # open from now on: of a pipe, the reader would leave when it is closed

    def run(self) -> None:
        """Run the script; whatever ends it is raised."""
        self._stderr = sys.stderr
        atexit.register(self._end)  # the first to be registered is the last to be called, when threads have ended too
        after_import("torch", self._enter)
        try:
            self._script.run()
            if self._monitor is not None and self._monitor.stopped is not None:
                raise self._monitor.stopped  # the script has caught it, and come to its end
        except NonFiniteError as error:
            self._error = error
            if not self._stops:  # it is of a monitor of the script's own
                raise
            self._say(f"Error: {error}")
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt as error:
            self._error = error
            # Not at the end: any text that is executed there, as an import of a dataclass does, has Python forget
            # that it was interrupted and leave with status 1.
            self._told = self._close()
            raise
        except BaseException as error:
            # of an exit only the status is kept, or what its frames hold would live as long
            self._error = SystemExit(error.code) if isinstance(error, SystemExit) else error
            raise

    def _enter(self) -> None:
        if os.getpid() != self._pid:
            return
        try:
            from hookscope.training import Monitor

            self._monitor = Monitor(**self._settings, log=self._opened).__enter__()
        except Exception as error:  # this is within the script's `import torch`, which has gone well
            self._say(f"Note: cannot watch, the script goes on: {error}")

    def _end(self) -> None:
        if os.getpid() == self._pid:  # a child of the script has no say
            self._say(self._told or self._close())
            self._remove_if_unused()

    def _close(self) -> str:
        """End the watching; what there is to say of it."""
        with contextlib.suppress(Exception):  # the script has ended as it did, whatever goes wrong here
            if self._monitor is not None and os.getpid() == self._pid:
                error = self._error
                self._monitor.__exit__(None if error is None else type(error), error, None)
            self._opened.close()
            return self._summary()
        return ""

    def _summary(self) -> str:
        if "torch" not in sys.modules:
            return f"Note: {self._script.name} did not import torch: there was nothing to watch"
        if self._monitor is None:  # which has been told
            return ""
        if not self._monitor.steps:
            told = f"Note: no optimizer of torch took a step in {self._script.name}: there was nothing to watch"
            strayed = [word for word in self._script.words[1:] if word.partition("=")[0] in _OWN_OPTIONS]
            return f"{told}; {strayed[0]} went to the script, options of watch stand before it" if strayed else told
        sampled = f"{self._monitor.sampled:,} of {counted(self._monitor.steps, 'step')} sampled"
        return f"Note: {sampled}{self._contents()}"

    def _contents(self) -> str:
        """What the log holds, where that is quickly read, and how it is shown, where there is a file to read."""
        show = f"; see `hookscope watch --show {shlex.quote(self._log)}`"
        try:
            if self._log.startswith(("/dev/", "/proc/")) or not os.path.isfile(self._path):
                return f", in {self._log}" if os.path.exists(self._path) else ""
            if os.path.getsize(self._path) > _QUICKLY_READ:
                return f", in {self._log}{show}"
            from hookscope.training import findings_over_time

            run = read_runs(self._path)[-1]
            findings = findings_over_time(run)
        except Exception:  # the script may have done anything to it
            return ""
        told = counted(len(findings), "finding") if findings else "no findings"
        return f", {counted(len(run.rows), 'line')} in {self._log}, {told}{show}"

    def _remove_if_unused(self) -> None:
        """Leave no empty file behind a script that came to nothing."""
        with contextlib.suppress(OSError):
            if self._is_new and not os.path.getsize(self._path):
                os.unlink(self._path)

    def _say(self, text: str) -> None:
        """A note to standard error as it was before the script, which may have turned it elsewhere."""
        with contextlib.suppress(Exception):
            if text and self._stderr is not None:
                with contextlib.redirect_stderr(self._stderr):
                    output.note(text)
