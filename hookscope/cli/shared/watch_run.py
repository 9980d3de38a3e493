"""``hookscope watch SCRIPT``: a watched script from its first line to its end, and the processes that it starts."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import process, util
from typing import Any

from hookscope.cli.output.formats import Output
from hookscope.errors import HookscopeError, NonFiniteError
from hookscope.findings import counted, verdict
from hookscope.system import InChildren, Script, after_import, before_termination
from hookscope.training import LateLog, RunLog, Sink, SinkChoice

_QUICKLY_READ = 16 * 2**20  # bytes; about a second
_OWN_OPTIONS = ("--log", "--every", "--layer", "--to", "--tensorboard", "--histograms", "--stop-on", "--reference")


class WatchRun:
    """A script to watch.

    The log is opened at once, so that errors come before anything runs. Torch is imported by the script, not before
    it: a script may set the number of threads first.
    """

    of_script: WatchRun | None = None  # the run of this process

    def __init__(
        self,
        script: Script,
        log: str,
        sinks: Sequence[SinkChoice],
        options: Mapping[str, Any],
        rank: int,
        world_size: int,
    ) -> None:
        self._name, self._script, self._log = script.name, script, log
        self._path = os.path.abspath(log)  # the script may change the current folder
        self._stops = options["stop_on"] is not None
        self._settings = {
            **{name: options[name] for name in ("every", "layers", "stop_on")},
            "reference": os.path.abspath(options["reference"]) if options["reference"] and not rank else None,
            "types": options["types"] or None,
            "histograms": options["histograms"] or 0,
            "command": list(script.words),
            "rank": rank,
            "world_size": world_size,
            "on_trouble": lambda text: self._say(f"Note: {text}"),
        }
        self._pid, self._output = os.getpid(), Output.now
        self._monitor: Any = None
        self._error: BaseException | None = None
        self._last_note = ""
        self._stderr = sys.stderr
        for sink in sinks:
            sink.check()
        self._is_new = not os.path.lexists(log)
        self._opened = RunLog(log)  # and stays open: the reader of a pipe leaves when it is closed
        self._sinks: list[Sink | SinkChoice] = []
        try:
            for sink in sinks:
                Output.now.begin(f"opening {sink}")
                self._sinks.append(sink.ready())
        except BaseException:
            self._opened.close()
            self._remove_empty_log()
            raise

    def run(self) -> None:
        self._stderr, WatchRun.of_script = sys.stderr, self
        atexit.register(self._end)  # registered first, so called last, after the threads of the script have ended
        settings = {name: value for name, value in self._settings.items() if name != "on_trouble"}
        InChildren(
            "hookscope.cli.shared.watch_run", "watch_child", (self._path, self._name, settings, self._output.quiet)
        ).wait()
        self._say(f"Note: watching {self._name}, log in {self._log}")
        after_import("torch", self._enter)
        try:
            self._script.run()
            if self._monitor is not None and self._monitor.stopped is not None:
                raise self._monitor.stopped  # the script has caught it and ended
        except NonFiniteError as error:
            self._error = error
            if not self._stops:  # raised by a Monitor of the script's own
                raise
            self._say(f"Error: {error}", always=True)
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt as error:
            self._error = error
            # Now, not at exit: an import of a dataclass executes text, after which Python forgets the interrupt and
            # leaves with status 1.
            self._last_note = self._close()
            raise
        except BaseException as error:
            # only the status of an exit: its frames would keep objects of the script alive
            self._error = SystemExit(error.code) if isinstance(error, SystemExit) else error
            stopped = None if self._monitor is None else self._monitor.stopped
            if stopped is not None and isinstance(error, SystemExit) and error.code == stopped.exit_code:
                self._error = stopped
                self._say(f"Error: {stopped}", always=True)
            raise

    def forget(self) -> None:
        if self._monitor is not None:
            self._monitor.__exit__(None, None, None)

    def _enter(self) -> None:
        if os.getpid() != self._pid:
            return
        try:
            from hookscope.training import Monitor

            sinks = list(self._opened_sinks())
            self._monitor = Monitor(**self._settings, log=self._opened, to=sinks).__enter__()
            self._monitor.on_caught = self._end_script
            for place in self._monitor.written_to:
                self._say(f"Note: also written to {place}")
            before_termination(self._terminate)
        except Exception as error:  # the `import torch` of the script, in which this runs, has succeeded
            self._say(f"Note: cannot watch, the script goes on: {error}")

    def _opened_sinks(self) -> Iterator[Sink]:
        """The sinks that open; a note tells of others."""
        for sink in self._sinks:
            try:
                yield sink.open() if isinstance(sink, SinkChoice) else sink
            except HookscopeError as error:
                self._say(f"Note: {sink.word} gets no lines, the log goes on: {error}")

    def _end_script(self) -> None:
        """End a script that has caught the error of ``--stop-on``: no ``except Exception`` catches this."""
        raise SystemExit(NonFiniteError.exit_code)

    def _terminate(self) -> None:
        """SIGTERM is about to end the process."""
        self._monitor.__exit__(SystemExit, SystemExit(128 + signal.SIGTERM), None)

    def _end(self) -> None:
        if os.getpid() == self._pid:  # not in a forked child
            with contextlib.suppress(KeyboardInterrupt):  # another one, of a user who does not wait for a sink
                self._say(self._last_note or self._close())
            self._remove_empty_log()

    def _remove_empty_log(self) -> None:
        with contextlib.suppress(OSError):
            if self._is_new and not os.path.getsize(self._path):
                os.unlink(self._path)

    def _close(self) -> str:
        with contextlib.suppress(Exception):  # the exit status of the script must stay
            if self._monitor is not None and os.getpid() == self._pid:
                self._monitor.__exit__(None if self._error is None else type(self._error), self._error, None)
                if self._monitor.reference is not None:
                    model = self._monitor.reference.source.model
                    self._say(f"Note: the reference of {model} is in {self._settings['reference']}")
            elif os.getpid() == self._pid:
                for sink in self._sinks:
                    if isinstance(sink, Sink):
                        sink.close(failed=False)
            self._opened.close()
            return self._summary()
        return ""

    def _summary(self) -> str:
        name = self._name
        if "torch" not in sys.modules:
            return f"Note: {name} did not import torch: there was nothing to watch"
        if self._monitor is None:  # a note has said why
            return ""
        if not self._monitor.steps:
            if self._monitor.stopped:
                return f"Note: {name} was stopped before its first step{self._contents()}"
            contents = self._contents() if self._monitor.backwards else ": there was nothing to watch"
            note = f"Note: no optimizer of torch took a step in {name}{contents}"
            options = [word for word in self._script.words[1:] if word.partition("=")[0] in _OWN_OPTIONS]
            return f"{note}; {options[0]} went to the script: options of watch go before it" if options else note
        return f"Note: {self._monitor.sampled:,} of {counted(self._monitor.steps, 'step')} sampled{self._contents()}"

    def _contents(self) -> str:
        """How much is in the log and how to show it, if it is a file that is quickly read."""
        show = f"; see `hookscope show-run {shlex.quote(self._log)}`"
        try:
            if self._log.startswith(("/dev/", "/proc/")) or not os.path.isfile(self._path):
                return f", in {self._log}" if os.path.exists(self._path) else ""
            if os.path.getsize(self._path) > _QUICKLY_READ:
                return f", in {self._log}{show}"
            from hookscope.training import findings_over_time, judged, read_runs

            run = read_runs(self._path)[-1]
            findings = findings_over_time(run)
        except Exception:  # the script may have changed the file
            return ""
        counts = f"{counted(len(run.rows) or len(run.facts), 'line')} in {self._log}"
        said = verdict(findings, judged(run))
        return f", {counts}; {said}{show}"

    def _say(self, text: str, always: bool = False) -> None:
        """Write a note to standard error as it was before the script, which may have redirected it."""
        with contextlib.suppress(Exception):
            if text and self._stderr is not None:
                with contextlib.redirect_stderr(self._stderr):
                    self._output.note(text, always)


class _WatchedChild(WatchRun):
    """A process that a watched script has started; its log has ``.process1``, ``.process2``... in the name."""

    def __init__(self, path: str, script: str, settings: Mapping[str, Any], quiet: bool) -> None:
        self._output = Output(quiet=quiet)
        self._name, self._path = script, path
        self._settings = {
            **settings,
            "reference": None,  # one file has one writer
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
