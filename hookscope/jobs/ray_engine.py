"""The engine that gives blocks of images to the actors of Ray, here or on a cluster."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from hookscope.errors import HookscopeError, InstallationError, ModelError, UsageError
from hookscope.jobs.engines import BATCHES, blocks_of, done_packed, packed_error, refuse_own_files, unpacked
from hookscope.jobs.run import Job, Part
from hookscope.models import LoadedModel, describe_error, package_versions

_SECONDS_TO_ANSWER = 10.0  # of a cluster
_ASK = """
import socket, sys
address, host, port = sys.argv[1:]
if host:
    try:
        socket.create_connection((host, int(port))).close()
    except OSError as error:
        sys.stdout.write(str(error.strerror or error))
        sys.exit(1)
import ray
from ray._private import services
ray._raylet.GcsClient(address=services.canonicalize_bootstrap_address_or_die(address))
"""  # in a process of its own, because names and Ray have no limit of time
_SECONDS_TO_LOOK = 1.0  # at the processes of Ray
_RESTARTS = 3  # of a worker that ended
_LOGGERS = ("ray", "ray.data", "ray.serve", "ray.train", "ray.tune")


class RayEngine:
    """Runs a job on Ray, a part for each block of images; Ray does a block again whose worker or machine was lost.

    Args:
        address: The cluster: ``auto`` for the one of this machine, or ``HOST:PORT``. None starts Ray on this machine
            for the run, or uses the Ray that this process is connected to.
        gpus_per_worker: GPUs of each worker, also a fraction; 0 for workers on the processor.
        workers: The largest number of workers, by default as many as the cluster has processors or GPUs for.
        block: Images in a block, by default four batches.

    Example:
        >>> RayEngine("auto", gpus_per_worker=0.5).gpus_per_worker
        0.5
    """

    def __init__(
        self,
        address: str | None = None,
        gpus_per_worker: float = 0.0,
        workers: int | None = None,
        block: int | None = None,
    ) -> None:
        if not (0 <= gpus_per_worker <= 1 or (gpus_per_worker > 1 and float(gpus_per_worker).is_integer())):
            asked = f"{gpus_per_worker:g} GPUs for each worker"
            raise UsageError(asked, "a share of one GPU, or whole GPUs", "give 0.5, 1 or 2")
        if address is not None and address.startswith("ray://"):
            asked = f"the address {address} is of a Ray client, which Ray Data does not support"
            do = "run on a machine of the cluster with ‹address='auto'|--address auto›, or use `ray job submit`"
            raise UsageError(asked, do=do)
        self.address, self.gpus_per_worker, self.workers, self.block = address, gpus_per_worker, workers, block

    def run(self, job: Job[Any], net: LoadedModel, paths: Sequence[str], first: int = 0) -> Generator[Part[Any]]:
        """Do ``job`` on the images of ``paths`` from position ``first`` on; each part comes once, in order.

        Raises:
            InstallationError: Ray is not installed, or a worker has other versions of hookscope or torch.
            HookscopeError: The cluster does not answer, lacks GPUs, or lost a block too often.
        """
        if first >= len(paths):
            return
        refuse_own_files(paths)
        if importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None:
            raise InstallationError("Ray is not installed", do="pip install 'hookscope[ray]'")
        if self.address is None:  # Ray reads it on import: a machine by itself listens on its loopback alone
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        ray: Any = importlib.import_module("ray")
        importlib.import_module("ray.data")
        packed = _packed(job, net, ray.cloudpickle)
        with _connected(ray, self.address):
            blocks = blocks_of(paths, first, self.block or BATCHES * job.batch_size)
            rows = self._rows(ray, job, packed, [pickle.dumps(block) for block in blocks])
            dead = getattr(ray._private.worker._global_node, "dead_processes", list)
            try:
                with _interrupted_if(dead), contextlib.closing(rows):
                    for row in rows:
                        yield unpacked(row)
            except ray.exceptions.RayError as error:
                raise _in_one_line(error, ray.exceptions) from error

    def _rows(self, ray: Any, job: Job[Any], packed: bytes, blocks: Sequence[bytes]) -> Generator[bytes]:
        data = ray.data.from_items([{"row": block} for block in blocks], override_num_blocks=len(blocks))
        data.context.execution_options.preserve_order = True
        data.context.enable_progress_bars = data.context.print_on_execution_start = False
        processors = 1 + job.workers
        most = self.workers or _most_workers(ray.cluster_resources(), processors, self.gpus_per_worker)
        device = "cuda" if self.gpus_per_worker else "cpu"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")  # nothing else limits the attempts
            answers = data.map_batches(
                _worker_class(),
                batch_size=1,  # of rows, a block of images each
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(most, len(blocks))),
                fn_constructor_args=([ray.put(packed)], package_versions(), os.getcwd(), device),
                num_cpus=processors,
                num_gpus=self.gpus_per_worker,
                max_restarts=_RESTARTS,
                max_task_retries=-1,  # as many as its worker restarts; Ray tries in vain until it misses a machine
            )
        for table in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            yield from (row.as_py() for row in table["row"])


@contextlib.contextmanager
def _interrupted_if(dead: Callable[[], Sequence[tuple[str, Any]]]) -> Iterator[None]:
    """Interrupt the main thread when a process of Ray is ``dead``; else Ray waits, and then ends this process."""
    ended: list[str] = []
    over = threading.Event()
    main = threading.main_thread()

    def look() -> None:
        while not over.wait(_SECONDS_TO_LOOK):
            ended.extend(kind for kind, _ in dead())
            if ended:
                signal.pthread_kill(main.ident or 0, signal.SIGINT)
                return

    if threading.current_thread() is main and hasattr(signal, "pthread_kill"):
        threading.Thread(target=look, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt as error:
        if not ended:
            raise
        asked = f"Ray ended on this machine: its process {ended[0]} was killed or crashed"
        raise HookscopeError(asked, do="try again, or use ‹no engine|--engine local›") from error
    finally:
        over.set()


def _worker_class() -> type:
    """The class of the actors; Ray sends its code, so that it can report that a machine lacks hookscope."""

    class Worker:
        def __init__(self, packed: Any, versions: Any, folder: str, device: str) -> None:
            import importlib
            import socket

            import ray

            self.do: Any = None
            try:
                worker = importlib.import_module("hookscope.jobs.ray_engine")
                self.do = worker.ray_worker(ray.get(packed[0]), versions, folder, device)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error} (on {socket.gethostname()})"

        def __call__(self, table: Any) -> Any:
            import pickle

            import pyarrow

            rows = [self.do(row.as_py()) if self.do else pickle.dumps(self.error) for row in table["row"]]
            return pyarrow.table({"row": pyarrow.array(rows, pyarrow.large_binary())})

    Worker.__module__ = "__main__"
    return Worker


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to the cluster, or start one here, unless the process is connected already."""
    if ray.is_initialized():
        yield
        return
    if address is not None:
        _check_answer(address)
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main else None
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    filtered = importlib.import_module("ray._private.ray_logging").stdout_deduplicator
    skipped = filtered.skip_re
    try:
        filtered.skip_re = skipped or re.compile("")  # Ray prints what it mends, such as a machine that it lost
        more = {"include_dashboard": False} if address is None else {}
        with _silent_core():
            ray.init(address or "local", logging_level=logging.ERROR, log_to_driver=False, **more)
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if handler is not None:  # Ray has set its own
            signal.signal(signal.SIGTERM, handler)
        yield
    except SystemExit as error:
        if error.code == signal.SIGTERM:  # of Ray's own handler, while Ray starts
            raise SystemExit(128 + signal.SIGTERM) from error
        raise
    finally:
        ray.shutdown()
        filtered.skip_re = skipped
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _silent_core() -> Iterator[None]:
    """Let the core of Ray, which reads its level of logging when it starts, write no errors that Ray itself mends."""
    name = "RAY_BACKEND_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        os.environ[name] = "fatal"
        stack.callback(os.environ.pop, name, None)
        saved = os.dup(2)  # it tells its level there
        stack.callback(os.close, saved)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        stack.callback(os.dup2, saved, 2)
        yield


def _check_answer(address: str) -> None:
    """Refuse a cluster that does not answer; Ray itself would try for two minutes and then end the process."""
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"'{address}' is not an address", do="give auto, or HOST:PORT such as head:6379")
    do = "start one with `ray start --head`, or leave ‹address|--address› out to start Ray here"
    asked = "no Ray cluster " + ("is running on this machine" if address == "auto" else f"answers at {address}")
    command = [sys.executable, "-P", "-c", _ASK, address, host.strip("[]"), port]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False)
    except subprocess.TimeoutExpired:
        raise HookscopeError(f"{asked}: it is silent for {_SECONDS_TO_ANSWER:g} s", do=do) from None
    if answer.returncode:
        refused = answer.stdout.strip()
        raise HookscopeError(f"{asked}: {refused}" if refused else asked, do=do)


def _most_workers(has: dict[str, float], processors: int, gpus: float) -> int:
    if gpus and has.get("GPU", 0) < gpus:
        option = f"‹gpus_per_worker={gpus:g}|--gpus-per-worker {gpus:g}›"
        asked = f"{option} needs GPUs, and the cluster has {has.get('GPU', 0):g}"
        raise HookscopeError(asked, do="leave it out, or add machines with GPUs")
    if has.get("CPU", 0) < processors:
        asked = f"a worker needs {processors} processors, and the cluster has {has.get('CPU', 0):g}"
        raise HookscopeError(asked, do="give fewer ‹workers|--workers›, or add machines")
    return max(1, int(min(has["CPU"] / processors, has["GPU"] / gpus if gpus else has["CPU"])))


def _in_one_line(error: BaseException, kinds: Any) -> HookscopeError:
    text = str(error)
    if isinstance(error, kinds.OutOfMemoryError) or "low on memory" in text:  # other texts guess at memory too
        do = "use a smaller ‹batch_size|--batch-size›, fewer workers or larger machines"
        return HookscopeError("Ray ended a worker, because the memory of its machine was full", do=do)
    if isinstance(error, kinds.RayActorError) or "ActorDied" in text or "ActorUnavailable" in text:
        asked = f"a worker ended {_RESTARTS + 1} times: it was killed, or the model crashed it"
        return HookscopeError(asked, do="try ‹no engine|--engine local›, or see the logs of Ray")
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return HookscopeError(f"Ray failed: {type(error).__name__}: {first}")


def _packed(job: Job[Any], net: LoadedModel, cloudpickle: Any) -> bytes:
    """The job and the model on the CPU, with the code of modules that are not installed."""
    if net.device != "cpu":
        preprocess = replace(net.preprocess, device="cpu")
        net = replace(net, model=copy.deepcopy(net.model).cpu(), device="cpu", preprocess=preprocess)
    own = [module for name, module in list(sys.modules.items()) if _is_own_code(name, module)]
    with contextlib.ExitStack() as registered:
        for module in own:
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                registered.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            data: bytes = cloudpickle.dumps((job, net))
        except Exception as error:
            asked = f"{net.name} cannot be sent to other processes: {describe_error(error)}"
            raise ModelError(asked, do="use ‹no engine|--engine local›") from error
    return data


def _is_own_code(name: str, module: ModuleType) -> bool:
    """Whether a module is somebody's file, which other machines do not have."""
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py") or name.partition(".")[0] in ("hookscope", "__main__", "__mp_main__"):
        return False
    library = os.path.dirname(os.__file__)
    return not (file.startswith(library + os.sep) or {"site-packages", "dist-packages"} & set(file.split(os.sep)))


def ray_worker(packed: bytes, versions: Mapping[str, str], folder: str, device: str) -> Callable[[bytes], bytes]:
    """What does packed blocks with the packed job and model; an error of the beginning is its answer to each block."""
    try:
        check_versions(versions)
        with contextlib.suppress(OSError):  # another machine may not have it
            os.chdir(folder)  # names of files may be relative
        try:
            job, net = pickle.loads(packed)
        except Exception as error:
            asked = f"a worker cannot load the model: {describe_error(error)}"
            raise ModelError(asked, do="install what it imports on every machine") from error
        preprocess = replace(net.preprocess, device=device)
        net = replace(net, model=net.model.to(device), device=device, preprocess=preprocess)
        opened = contextlib.ExitStack()
        measure = opened.enter_context(job.open(net))
    except Exception as error:
        failed = packed_error(error)
        return lambda block: failed

    def do(block: bytes, opened: object = opened) -> bytes:  # which stays open until the process ends
        return done_packed(job, net, pickle.loads(block), measure)

    return do


def check_versions(expected: Mapping[str, str]) -> None:
    """Refuse other versions of hookscope, torch and torchvision than the driver's; builds may differ."""
    here = package_versions()
    for name, version in expected.items():
        if name in here and here[name].partition("+")[0] != version.partition("+")[0]:
            asked = f"a worker has {name} {here[name]}, and this process {version}"
            raise InstallationError(asked, do="install the same versions on all machines of the cluster")
