"""Running statistics in a file: saved during a run, resumed after an interruption, merged with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hookscope.errors import InputError
from hookscope.findings import counted
from hookscope.jobs import Progress, StateKind, read_state, write_state
from hookscope.models import OnNote, warn_of_image
from hookscope.statistics.coverage import Coverage
from hookscope.statistics.totals import RunningStatistics
from hookscope.system import StrPath

_GIVE = "give what `stats --save` wrote"
_KIND = StateKind("saved statistics", _GIVE)


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


@dataclass(frozen=True)
class SavedStatistics:
    """Running statistics, their source, and the progress of their run; None if merged from several runs.

    ``coverage`` is that of the run which made them; it is not saved.
    """

    source: Source
    totals: RunningStatistics
    progress: Progress | None = None
    coverage: Coverage = field(default_factory=Coverage, compare=False)


def save_statistics(path: StrPath, saved: SavedStatistics) -> None:
    """Write ``saved`` to ``path`` as JSON, whole or not at all.

    Raises:
        WriteError: The file cannot be written; an earlier file is unchanged.
    """
    progress = None if saved.progress is None else asdict(saved.progress)
    write_state(path, _KIND, {"source": asdict(saved.source), "progress": progress, "tally": saved.totals.state_dict()})


def load_statistics(path: StrPath) -> SavedStatistics:
    """Read a file of `save_statistics`.

    Raises:
        InputError: There is no such file, or it is damaged, of another kind or of another format.
    """

    def restored(content: dict[str, Any]) -> SavedStatistics:
        progress = content["progress"]
        source, totals = Source(**content["source"]), RunningStatistics.from_state(content["tally"])
        return SavedStatistics(source, totals, None if progress is None else Progress(**progress))

    return read_state(path, _KIND, restored)


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
