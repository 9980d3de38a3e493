"""What is loaded: a model with its weights, ready to run, and pictures in batches for it.

Pictures are read and prepared in worker processes, and come in their order.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import re
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from PIL import Image
from torch.utils.data import DataLoader

from hookscope.errors import HookscopeError, ImageError, ModelError, UsageError
from hookscope.findings import listed
from hookscope.hooks import one_thread
from hookscope.images import Listener, read_picture, read_pipe
from hookscope.models.choices import AUTOCAST, DTYPES, PreprocessChoice, autocast_dtypes
from hookscope.models.factories import find_in_source, preprocess_of
from hookscope.models.loaded import LoadedModel, as_batch, check_size, dtype_name
from hookscope.models.model_source import ModelSource, Progress, WeightsChoice, WeightsKind
from hookscope.models.preprocess import Preprocess
from hookscope.models.run import quiet_and_seeded
from hookscope.models.sources import find_source


def load_model(
    model: str | ModelSource,
    weights: Any = "auto",
    seed: int = 0,
    device: str = "auto",
    *,
    preprocess: Any = "weights",
    mean: Any = None,
    std: Any = None,
    range: Any = None,
    resize: Any = None,
    input_size: tuple[int, ...] | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Build a model in eval mode with its weights, and find the preprocessing and class names that belong to them.

    Args:
        model: A torchvision name, ``shapes`` (bundled and trained), ``package.module:factory``,
            ``path/to/file.py:factory``, ``timm:NAME``, ``ultralytics:NAME``, or ``quantized:NAME`` for layers that
            compute in 8 bits. A factory may have arguments, which are literals: ``net.py:make(width=2)``; the only one
            of a file need not be named. The names ``input_size``, ``preprocess`` and ``model_inputs`` next to a factory
            say what its model takes, see ``docs/howto/own-model.md``. A folder that transformers saved is a model too,
            and so are ``model.onnx`` and ``model.pt2`` of `torch.export.save`. A text that is parsed works too.
        weights: ``auto`` (torchvision's default weights; seeded random weights if neither cache nor network has
            them, which ``notes`` says), ``default`` or a weights name (fail if unavailable), ``none``, or a checkpoint,
            a file or folder. A `WeightsChoice`, None and ``ResNet34_Weights.DEFAULT`` work too. A safetensors file can
            bring its own class names and transforms, see `hookscope.models.metadata`.
        seed: Seed of random weights; the global random state stays as it was.
        device: ``auto``, ``cpu``, ``cuda`` (``cuda:1``) or ``mps``.
        preprocess: ``weights`` (what belongs to the model), ``imagenet``, ``half``, ``stretch``, ``none``,
            ``file.py:function``, or a function from a PIL image to a tensor ``(C, H, W)``, such as transforms of
            torchvision or an image processor of transformers.
        mean: Subtracted from the colours in ``range``: one number, or one for each channel.
        std: Divides them afterwards, in the same form; goes with ``mean``.
        range: What black and white become, by default ``(0, 1)``; without ``mean`` there is no normalisation.
        resize: ``shorter`` (the shorter side to the input size, then crop the centre), ``shorter:256`` (the same with
            a larger side), ``stretch`` or ``pad``.
        input_size: ``(H, W)`` of the model's input, ``(D, H, W)`` of a clip or volume.
        progress: Called with bytes done and total during a download.

    Raises:
        ModelError: no such model, or it cannot be built.
        WeightsError: no such weights, or they cannot be fetched, trusted or fitted.
        UsageError: an unknown device or preprocessing.

    Example:
        >>> net = load_model("squeezenet1_1", weights="none", seed=1)
        >>> net.weights, net.family, net.preprocess.describe()
        ('random (seed 1)', 'classification', 'resize 256, crop 224, ImageNet mean and std')
    """
    if not isinstance(model, str | ModelSource):
        do = "give a module to capture() or list_layers(), which need no loading"
        raise UsageError(f"model must be a name, not {type(model).__name__}", do=do)
    choice = WeightsChoice.parse(weights)
    chosen = PreprocessChoice.parse(preprocess, mean, std, range, resize)
    chosen.check(input_size)
    source = find_source(model)
    where = "cpu" if source.cpu_only and device == "auto" else pick_device(device)
    if source.cpu_only and where != "cpu":
        raise UsageError(
            f"{source.text} cannot run on '{device}'", "it runs on the CPU only", "give ‹device='cpu'|--device cpu›"
        )
    with quiet_and_seeded(seed):
        loaded = source.build(choice, seed, progress)
    if any(parameter.is_meta for parameter in loaded.model.parameters()):
        raise ModelError(f"{source.text} is on the meta device: it has shapes and no values", do="build it on the cpu")
    loaded.model.eval().to(where)
    check_size(loaded.model, input_size, loaded.family)
    size = None if input_size is None else (input_size[-2], input_size[-1])
    changed = loaded.preprocess.changed(_with_function(chosen), size)
    frames = changed.frames if input_size is None or len(input_size) == 2 else input_size[0]
    preprocess = replace(changed, device=where, frames=frames)
    checkpoint = choice.text if choice.kind is WeightsKind.FILE else loaded.checkpoint
    return replace(loaded, device=where, preprocess=preprocess, checkpoint=checkpoint, seed=seed)


def _with_function(choice: PreprocessChoice) -> PreprocessChoice:
    """``choice`` with what its function means, or the name of one in ``file.py:function``."""
    if isinstance(choice.base, str) and ":" not in choice.base:
        return choice
    function = find_in_source(choice.base) if isinstance(choice.base, str) else choice.base
    preprocess = preprocess_of(function, choice.name)
    if not isinstance(preprocess, PreprocessChoice):
        return replace(choice, base=preprocess)
    parts = {name: getattr(choice, name) for name in ("mean", "std", "range", "resize")}
    return replace(preprocess, **{name: part for name, part in parts.items() if part is not None})


def pick_device(device: str) -> str:
    """``device`` in torch's spelling; ``auto`` is the fastest that this machine has."""
    have = ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
    if device == "auto":
        return have[-1]
    match = re.fullmatch(r"(cpu|cuda|mps)(?::([0-9]{1,3}))?", device)
    if match is None or match[1] not in have or (match[2] and match[1] != "cuda"):
        raise UsageError(f"no device '{device}'", f"this machine has {', '.join(have)}")
    if match[2] and int(match[2]) >= torch.cuda.device_count():
        raise UsageError(f"no device '{device}'", f"there are {torch.cuda.device_count()} CUDA devices")
    return device


def parse_dtype(text: str, device: str) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The type of parameters and inputs, and the type of `torch.autocast`; one of them is None.

    ``text`` is one of `DTYPES`, ``autocast`` for the usual type of ``device``, or such as ``autocast:float16``.

    Raises:
        UsageError: no such type.
    """
    word, _, name = text.partition(":")
    if word == AUTOCAST:
        name = name or dtype_name(torch.get_autocast_dtype(torch.device(device).type))
        if name not in autocast_dtypes():
            raise UsageError(
                f"autocast cannot compute in '{name}'", f"it takes {listed(autocast_dtypes())}", "choose one"
            )
        return None, getattr(torch, name)
    if text not in DTYPES:
        raise UsageError(f"no data type '{text}'", f"there are {listed([*DTYPES, AUTOCAST], 9)}", "choose one")
    return getattr(torch, text), None


@dataclass(frozen=True, eq=False)
class Batch:
    """Pictures for one forward pass.

    Attributes:
        names: Their paths, in order.
        positions: Their positions among all paths, from 0.
        inputs: The positional inputs of the pass, on the model's device.
        sha256: Hexadecimal SHA-256 of the bytes of each file.
    """

    names: tuple[str, ...]
    positions: tuple[int, ...]
    inputs: tuple[Any, ...]
    sha256: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.names)


def load_batches(
    net: LoadedModel,
    paths: Sequence[str],
    batch_size: int = 16,
    workers: int = 0,
    listener: Listener = Listener(),
    first: int = 0,
) -> Generator[Batch, None, None]:
    """Read, prepare and batch pictures on demand; order and values do not depend on the number of workers.

    Of each ``batch_size`` pictures, neighbours of one shape make a batch, see `as_batch`; for
    detection the shapes may differ. A video model gets clips; a still is repeated. About one batch is prepared ahead.
    The workers end when the generator is closed or collected.

    Args:
        net: The loaded model.
        paths: Files, pipes, ``-`` for standard input, as `find_pictures` lists them.
        batch_size: The largest number of pictures in a batch.
        workers: Number of processes that read and prepare, each with one thread; 0 is this process.
        listener: Gets in order the pictures that cannot be used, and the notes.
        first: Position of the first path in a list of which only the rest is wanted. Batches and positions are those
            of the whole list.

    Raises:
        HookscopeError: a worker was killed.
    """
    if batch_size < 1:
        raise UsageError(f"batch size must be at least 1, not {batch_size}")
    if workers < 0:
        raise UsageError(f"workers must be at least 0, not {workers}")
    return _batches(net, _prepared(net.preprocess, paths, batch_size, workers, first), batch_size, listener, first)


def _batches(
    net: LoadedModel, results: Generator[_Item, None, None], size: int, listener: Listener, first: int
) -> Generator[Batch, None, None]:
    room = size - first % size
    with contextlib.closing(results):
        while (taken := _take(results, room, listener)) is not None:
            room = size
            ready = deque(_runs(net, taken))
            del taken
            while ready:
                yield ready.popleft()  # keeps no reference while the model works on it


def _take(results: Iterator[_Item], size: int, listener: Listener) -> list[_Item] | None:
    """The usable ones of the next ``size`` pictures; None at the end.

    Others do not take the place of a skipped one: so a batch is the same whoever works on that part of the list.
    """
    usable: list[_Item] = []
    result = None
    for result in itertools.islice(results, size):
        for text in result.notes:
            listener.note(result.name, text)
        if result.error is not None:
            listener.skipped(result.position, result.name, result.error)
        else:
            usable.append(result)
    return None if result is None else usable


def _runs(net: LoadedModel, results: list[_Item]) -> Iterator[Batch]:
    """One batch for each run of equal shapes."""
    any_shape = net.family == "detection"
    for _, run in itertools.groupby(results, lambda result: any_shape or tuple(result.tensor.shape)):
        members = list(run)
        inputs = as_batch(net.family, [result.tensor.to(net.device) for result in members])
        names, positions = tuple(result.name for result in members), tuple(result.position for result in members)
        yield Batch(names, positions, inputs, tuple(result.sha256 for result in members))


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """One picture: to read, with its ``content`` if only the main process can read it; then as a tensor or an error."""

    position: int
    name: str
    content: bytes | None = None
    error: HookscopeError | None = None
    notes: tuple[str, ...] = ()
    tensor: Any = None
    sha256: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        # Plain bytes between processes: torch would use a file descriptor and shared memory for each tensor, which are
        # limited to 1024 and, in containers, to 64 MB.
        fields = {name: getattr(self, name) for name in self.__slots__}
        if (tensor := self.tensor) is not None:
            flat = tensor.contiguous().view(-1).view(torch.uint8)  # numpy has no bfloat16
            fields["tensor"] = bytearray(flat.numpy()), tensor.dtype, tuple(tensor.shape)
        return _unpacked, (fields,)

    def failed(self, error: HookscopeError) -> _Item:
        """With ``error``, but without traceback and cause, which keep the picture and may not be picklable."""
        return _Item(self.position, self.name, error=type(error)(error.asked, error.exists, error.do))


def _unpacked(fields: dict[str, Any]) -> _Item:
    if fields["tensor"] is not None:
        data, dtype, shape = fields["tensor"]
        fields["tensor"] = torch.frombuffer(data, dtype=dtype).view(shape)
    return _Item(**fields)


@dataclass(frozen=True)
class _Reader:
    """The data set of the DataLoader, from a picture to read to one that is read; an error is a result too."""

    preprocess: Preprocess

    def __getitem__(self, item: _Item) -> _Item:
        if item.error is not None:
            return item
        try:
            return self._prepare(item)
        except HookscopeError as error:
            return item.failed(error)
        except MemoryError:
            return item.failed(ImageError(f"'{item.name}' does not fit into memory", do="give a smaller file"))

    def _prepare(self, item: _Item) -> _Item:
        source = item.name if item.content is None else io.BytesIO(item.content)
        picture = read_picture(source, frames=self.preprocess.frames, name=item.name)
        with one_thread():  # four times as fast as with two
            tensor = self.preprocess(picture.frames if len(picture.frames) > 1 else picture.image)
        return _Item(item.position, item.name, notes=picture.notes, tensor=tensor, sha256=picture.sha256)


def _to_read(position: int, path: str) -> _Item:
    """The picture at a path; runs in the main process, because a worker has another standard input."""
    item = _Item(position, path, read_pipe(path))
    if path == "-" and item.content is None:
        try:
            read_picture(path)
        except HookscopeError as error:
            return item.failed(error)
    return item


def _prepared(
    preprocess: Preprocess, paths: Sequence[str], batch_size: int, workers: int, first: int
) -> Generator[_Item, None, None]:
    workers = min(workers, len(paths))
    iterator: Any = None
    try:
        with _torch_handler_removed():
            iterator = _iterator(replace(preprocess, device="cpu"), paths, batch_size, workers, first)
        while (result := _next(iterator)) is not None:
            yield result
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):  # not the DataLoader's own error
            raise
        do = "use fewer workers or a smaller batch size"
        raise HookscopeError("a worker process was killed", "perhaps the memory was full", do) from error
    finally:
        # Explicitly: an exception that a caller keeps would keep the iterator and its workers alive.
        end = getattr(iterator, "_shutdown_workers", None)
        if end is not None:
            end()


@contextlib.contextmanager
def _torch_handler_removed() -> Iterator[None]:
    """Remove torch's signal handler, which raises at any line of the program when a worker dies."""
    number = _child_signal()
    before = None if number is None else signal.getsignal(number)
    try:
        yield
    finally:
        if number is not None:
            if signal.getsignal(number) is not before:  # torch sets it only once
                _torchs_handler.append(signal.getsignal(number))
            signal.signal(number, before)


_torchs_handler: list[Any] = []


def _child_signal() -> int | None:
    """The signal of a dead child; None if the system has none or this thread may not set a handler."""
    main = threading.current_thread() is threading.main_thread()
    return getattr(signal, "SIGCHLD", None) if main else None


def _next(iterator: Iterator[_Item]) -> _Item | None:
    """The next result, None at the end; raises if a worker dies meanwhile."""
    number = _child_signal()
    workers = getattr(iterator, "_workers", [])
    if number is None or not workers or not _torchs_handler:
        return next(iterator, None)
    before = signal.signal(number, _torchs_handler[-1])
    try:
        for worker in workers:  # no signal comes for a worker that died before
            if worker.exitcode:
                raise RuntimeError(f"DataLoader worker (pid {worker.pid}) has died")
        return next(iterator, None)
    finally:
        signal.signal(number, before)


def _iterator(
    preprocess: Preprocess, paths: Sequence[str], batch_size: int, workers: int, first: int
) -> Iterator[_Item]:
    more: dict[str, Any] = {}
    if workers:
        importlib.import_module("torchvision.transforms.functional")  # once, not in each worker
        Image.init()
        # One batch ahead. "fork" where it is safe: a user's transforms need not be picklable.
        more = {"prefetch_factor": max(2, -(-batch_size // workers)), "worker_init_fn": _keep_quiet}
        more["multiprocessing_context"] = "fork" if sys.platform == "linux" else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than processors
        loader: DataLoader[Any] = DataLoader(
            cast(Any, _Reader(preprocess)),  # the DataLoader uses __getitem__ only
            batch_size=None,
            sampler=cast(Any, itertools.starmap(_to_read, enumerate(paths, first))),  # in this process, on demand
            num_workers=workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # else it draws its seed from the global random state
            **more,
        )
        return iter(loader)


def _as_it_is(result: Any) -> Any:
    return result


def _keep_quiet(worker: int) -> None:
    """Silence a worker and leave signals to the main process, which ends the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)  # the handler of the main process would raise
    warnings.simplefilter("ignore")
    nowhere = open(os.devnull, "w")  # noqa: SIM115  (open until the process ends)
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere.fileno(), stream.fileno())  # type: ignore[union-attr]  # for output of C libraries
    sys.stdout = sys.stderr = nowhere
