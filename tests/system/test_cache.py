"""The cache: a stored value comes back, and a broken cache never hurts."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hookscope.system import cache

ROOT = Path(__file__).parents[2]
KEY = {"torch": "2.15.0+cu132", "model": "resnet34", "sizes": [1, 2]}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own for each test; it does not exist yet."""
    place = tmp_path / "deep" / "cache"
    monkeypatch.setattr(cache, "folder", lambda: str(place))
    return place


def only_file(place: Path) -> Path:
    (path,) = place.iterdir()
    return path


@pytest.mark.parametrize("value", [0, "", [], {"a": [1.5, None, True]}, "ä\n\u2028", [[]] * 3, 1e300])
def test_a_stored_value_comes_back_until_a_later_one_replaces_it(place: Path, value: Any) -> None:
    assert cache.load("kind", KEY) is None
    cache.store("kind", KEY, value)
    assert cache.load("kind", dict(reversed(KEY.items()))) == value
    cache.store("kind", KEY, "later")
    assert cache.load("kind", KEY) == "later"
    assert only_file(place).suffix == ".json"


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("other", KEY),
        ("kind", {**KEY, "torch": "2.15.0"}),
        ("kind", {**KEY, "more": None}),
        ("kind", {}),
        ("kind", {**KEY, "sizes": [True, 2]}),  # True == 1 in Python, not in JSON
    ],
)
def test_another_kind_or_key_is_another_value(kind: str, key: dict[str, Any]) -> None:
    cache.store("kind", KEY, 1)
    assert cache.load(kind, key) is None


def test_the_file_holds_its_key_and_its_name_is_short(place: Path) -> None:
    key = {**KEY, "x": "y" * 5000}
    cache.store("a kind/../x", key, [1])
    path = only_file(place)
    assert path.name.startswith("a-kind-..-x-model-resnet34-torch-2.15.0-cu132-") and len(path.name) < 130
    header = {"format": cache.FORMAT, "kind": "a kind/../x", "key": key}
    assert json.loads(path.read_text()) == {"header": header, "value": [1]}


def changed(**entries: Any) -> Callable[[bytes], bytes]:
    """Another header with an entry that is not what was stored."""

    def change(content: bytes) -> bytes:
        stored = json.loads(content)
        return json.dumps({**stored, "header": {**stored["header"], **entries}}).encode()

    return change


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "bytes": lambda content: b"\xff\xfe\x00" + content,
    "deep": lambda content: b"[" * 200_000,
    "list": lambda content: b"[]",
    "object": lambda content: b"{}",
    "no value": lambda content: content.replace(b'"value"', b'"velue"'),
    "format": changed(format=cache.FORMAT + 1),
    "key": changed(key={**KEY, "model": "vgg16"}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_none_and_is_replaced(place: Path, damage: str) -> None:
    cache.store("kind", KEY, {"answer": 42})
    path = only_file(place)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert cache.load("kind", KEY) is None
    cache.store("kind", KEY, {"answer": 43})
    assert cache.load("kind", KEY) == {"answer": 43}


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_in_place_of_the_file_is_none(place: Path, make: Callable[[Path], None]) -> None:
    cache.store("kind", KEY, 1)
    path = only_file(place)
    path.unlink()
    make(path)
    assert cache.load("kind", KEY) is None


def test_without_a_folder_nothing_is_kept_and_a_file_in_its_place_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.parent.write_text("in the way")
    for folder in (place, None):
        monkeypatch.setattr(cache, "folder", lambda folder=folder: folder and str(folder))
        cache.store("kind", KEY, 1)
        assert cache.load("kind", KEY) is None
    assert place.parent.read_text() == "in the way"


@pytest.mark.parametrize("function", ["makedirs", "replace"])
def test_a_failing_system_call_is_no_error(place: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    cache.store("kind", KEY, "before")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, function, fail)
    cache.store("kind", KEY, "after")
    assert cache.load("kind", KEY) == "before"
    only_file(place)  # and no temporary file beside it


def test_a_value_or_a_key_that_is_no_json_is_an_error(place: Path) -> None:
    with pytest.raises(TypeError):
        cache.store("kind", KEY, {1, 2})
    with pytest.raises(TypeError):
        cache.load("kind", {"x": object()})
    assert not place.exists()


def printed(code: str, here: Path, odd: dict[str, str]) -> str:
    """What Python prints in the empty folder ``here``, with other homes; it leaves nothing there."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment |= odd | {"PYTHONPATH": str(ROOT)}
    here.mkdir()
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env=environment, capture_output=True, check=True, text=True
    )
    assert answer.stderr == "" and list(here.iterdir()) == []
    return answer.stdout


@pytest.mark.parametrize("odd", [{}, {"HOME": "~"}])
def test_without_a_home_no_folder_is_made_in_the_current_one(tmp_path: Path, odd: dict[str, str]) -> None:
    # A user without an entry in the password file, as in a container started with a bare number.
    code = """
import sys; sys.modules["pwd"] = None
from hookscope.system import cache
cache.store("kind", {"a": 1}, 2); print(cache.folder(), cache.load("kind", {"a": 1}))
"""
    assert printed(code, tmp_path / "here", odd) == "None None\n"


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"HOME": ""},
        {"HOME": "relative"},
        {"HOME": os.fsdecode(b"/tmp/caf\xe9")},
        {"XDG_CACHE_HOME": "relative"},
        {"XDG_CACHE_HOME": os.fsdecode(b"/tmp/caf\xe9"), "HOME": "~"},
    ],
)
def test_odd_homes_fall_back_to_the_home_of_the_user_data_base(odd: dict[str, str], tmp_path: Path) -> None:
    code = f"""
import os, pwd
pwd.getpwuid = lambda number: pwd.struct_passwd(("me", "", 0, 0, "", {str(tmp_path / "home")!r}, ""))
from hookscope.system import cache
from hookscope.cli.shared.output_paths import check_plot
cache.store("kind", {{"a": 1}}, 2)
check_plot("plot.png")
print(cache.folder(), cache.load("kind", {{"a": 1}}), cache.other_homes() == bool({odd!r}))
import matplotlib.font_manager
"""
    assert printed(code, tmp_path / "here", odd) == f"{tmp_path}/home/.cache/hookscope 2 True\n"
    assert not os.path.lexists(b"/tmp/caf\xe9")


def links(place: Path, path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def pipes(place: Path, path: Path, target: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("attack", [links, pipes])
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_or_pipe_in_place_of_a_file_is_replaced_itself(
    place: Path, tmp_path: Path, attack: Callable[[Path, Path, Path], None], exists: bool
) -> None:
    cache.store("kind", KEY, 1)
    path, target = only_file(place), tmp_path / "target"
    if exists:
        target.write_bytes(path.read_bytes())  # a valid entry, which is not ours to read
    attack(place, path, target)
    assert cache.load("kind", KEY) is None  # and it does not wait for the pipe
    cache.store("kind", KEY, 2)
    assert cache.load("kind", KEY) == 2 and only_file(place).is_file() and not path.is_symlink()
    assert target.exists() == exists and (not exists or json.loads(target.read_text())["value"] == 1)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owner")
@pytest.mark.parametrize("own", ["", "folder", "file"])
def test_folders_and_files_of_another_user_are_left_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    cache.store("kind", KEY, 1)
    path, user, lstat, stat, fstat = only_file(place), os.geteuid(), os.lstat, os.stat, os.fstat
    before = path.read_bytes()
    theirs = {"folder": [place], "file": [path], "": []}[own]

    def owned(status: os.stat_result) -> Any:
        other = any(os.path.samestat(status, stat(one)) for one in theirs)
        return os.stat_result((*status[:4], user + 1, *status[5:])) if other else status

    monkeypatch.setattr(os, "lstat", lambda *args, **more: owned(lstat(*args, **more)))
    monkeypatch.setattr(os, "fstat", lambda *args: owned(fstat(*args)))
    assert cache.load("kind", KEY) == (None if own else 1)
    cache.store("kind", KEY, 2)
    assert (path.read_bytes() == before) == bool(own)


def test_the_folder_may_be_a_link_of_this_user(place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    place.parent.mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    cache.store("kind", KEY, 1)
    assert cache.load("kind", KEY) == 1
