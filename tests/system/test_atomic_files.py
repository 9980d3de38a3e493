"""A reader sees the old file or the whole new one, whatever happens in between."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hookscope
from hookscope.errors import WriteError
from hookscope.system.atomic_files import check_folder, check_writable, make_folder, write_atomically, write_errors

ROOT = Path(hookscope.__file__).parents[1]
OLD, NEW = b"the old file", b"the new file" * 1000


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Path]:
    """A file that the test must not change, and beside which it must leave nothing."""
    path = tmp_path / "a.png"
    path.write_bytes(OLD)
    yield path
    assert path.read_bytes() == OLD
    assert names(tmp_path) == ["a.png"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def python(script: str, *words: object, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **more)


def test_a_new_and_an_old_file_hold_the_data_and_have_the_right_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    before = os.umask(0o027)
    try:
        write_atomically(path, OLD)
        assert mode(path) == 0o640  # from the umask
        path.chmod(0o606)
        for data in (NEW, b""):
            write_atomically(path, data)
            assert path.read_bytes() == data
            assert mode(path) == 0o606
    finally:
        os.umask(before)
    assert names(tmp_path) == ["a.png"]


def test_a_relative_name_and_a_long_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "n" * 251 + ".png", "with\nnew line\x1b.png"):
        check_writable(name)
        write_atomically(name, NEW)
        assert (tmp_path / name).read_bytes() == NEW


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["open", "write", "replace"])
def test_a_failure_at_any_step_leaves_the_old_file(
    old: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise error

    if step == "open":
        real = os.open
        monkeypatch.setattr(os, "open", lambda name, *rest: fail() if ".hookscope-" in name else real(name, *rest))
    else:  # fchmod comes when the file is open and empty
        monkeypatch.setattr(os, "fchmod" if step == "write" else "replace", fail)
    with pytest.raises((WriteError, KeyboardInterrupt)) as caught:
        write_atomically(old, NEW)
    expected = f"cannot write {old}: No space left on device; free some space or write elsewhere"
    assert str(caught.value) == (expected if isinstance(error, OSError) else "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_during_the_write_leaves_the_old_file(tmp_path: Path, number: int) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(OLD)
    script = (
        "import os, signal, sys\n"
        "from hookscope.system.atomic_files import write_atomically\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "def stop(*names):\n"
        "    print('writing', flush=True)\n"
        "    sys.stdin.read()\n"
        "os.replace = stop\n"  # the data are written, the name is not yet there
        "write_atomically(sys.argv[1], bytes(1 << 20))\n"
    )
    process = python(script, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    assert path.read_bytes() == OLD
    if number == signal.SIGTERM:
        assert names(tmp_path) == ["a.png"]


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    whole = {bytes([value]) * 200_000 for value in range(2)}
    write_atomically(path, next(iter(whole)))
    done = threading.Event()
    contents: set[bytes] = set()

    def read() -> None:
        while not done.is_set():
            contents.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for data in list(whole) * 50:
        write_atomically(path, data)
    done.set()
    reader.join()
    assert contents <= whole


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_is_followed_and_stays(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    target, link = folder / "a.png", tmp_path / "link.png"
    if exists:
        target.write_bytes(OLD)
    link.symlink_to("elsewhere/a.png")
    check_writable(link)
    write_atomically(link, NEW)
    assert link.is_symlink()
    assert target.read_bytes() == NEW
    assert names(tmp_path) == ["elsewhere", "link.png"]
    assert names(folder) == ["a.png"]


def test_a_device_and_a_fifo_are_written_directly_and_a_full_one_is_one_line(tmp_path: Path) -> None:
    if os.path.exists("/dev/full"):
        with pytest.raises(WriteError, match=r"^cannot write /dev/full: No space left on device; free some space"):
            write_atomically("/dev/full", NEW)
    check_writable("/dev/null")
    write_atomically("/dev/null", NEW)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    check_writable(fifo)
    contents: list[bytes] = []
    reader = threading.Thread(target=lambda: contents.append(fifo.read_bytes()))
    reader.start()
    write_atomically(fifo, NEW)
    reader.join()
    assert contents == [NEW]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_standard_output_by_name_is_appended_to(tmp_path: Path) -> None:
    script = (
        "from hookscope.system.atomic_files import check_writable, write_atomically\n"
        "print('row', flush=True)\n"
        "check_writable('/dev/stdout')\n"
        "write_atomically('/dev/stdout', b'picture\\n')\n"
        "write_atomically('/dev/fd/1', b'another\\n')\n"
        "print('row', flush=True)\n"
    )
    path = tmp_path / "log"
    path.write_text("before\n")
    with open(path, "a") as log:
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=log, check=True)
    assert path.read_text() == "before\nrow\npicture\nanother\nrow\n"
    piped = python(script).communicate(timeout=60)
    assert piped == ("row\npicture\nanother\nrow\n", "")


@pytest.mark.parametrize("function", [check_writable, lambda path: write_atomically(path, NEW)])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "cannot write to an empty name; name a file"),
        ("folder", "cannot write folder: Is a directory; name a file in it"),
        ("folder/", "cannot write folder/: Is a directory; name a file in it"),
        ("file/a.png", "cannot write file/a.png: Not a directory; name a file in a folder"),
        ("n" * 256, f"cannot write {'n' * 256}: File name too long; use a shorter name"),
        ("a\0b", "cannot write a\\x00b: embedded null byte"),
        ("ring", "cannot write ring: Too many levels of symbolic links"),
        (
            "no such/deeper/a.png",
            "cannot write no such/deeper/a.png: its folder does not exist; there is HERE; "
            "mkdir -p 'HERE/no such/deeper'",
        ),
    ],
)
def test_unwritable_paths_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Any, name: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(OLD)
    (tmp_path / "ring").symlink_to("ring")
    with pytest.raises(WriteError) as caught:
        function(name)
    assert str(caught.value) == text.replace("HERE", os.path.realpath(tmp_path))
    assert names(tmp_path) == ["file", "folder", "ring"] and (tmp_path / "ring").is_symlink()


@pytest.mark.parametrize("call", ["check_writable(sys.argv[1])", "write_atomically(sys.argv[1], b'new')"])
@pytest.mark.parametrize("protected", ["file", "folder", "nothing"])
def test_a_protected_file_or_folder_is_unchanged(tmp_path: Path, call: str, protected: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "a.png"
    path.write_bytes(OLD)
    path.chmod(0o444 if protected == "file" else 0o666)
    folder.chmod(0o555 if protected == "folder" else 0o777)
    here = os.open(folder, os.O_RDONLY)
    # Root, to whom nothing is forbidden, becomes nobody once the imports are done. The folder is handed over open,
    # because nobody may not enter the ones above it.
    script = (
        "import os, sys\nfrom hookscope.errors import WriteError\n"
        "from hookscope.system.atomic_files import check_writable, write_atomically\n"
        f"os.fchdir({here})\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"try: {call}\nexcept WriteError as error: print(error)\n"
        "else: print('written')\n"
    )
    output, errors = python(script, "a.png", pass_fds=[here]).communicate(timeout=60)
    os.close(here)
    folder.chmod(0o755)
    assert errors == ""
    assert names(folder) == ["a.png"]
    if protected == "nothing":  # so that the other two fail for the reason they are here for
        assert output == "written\n"
        return
    assert output == "cannot write a.png: Permission denied; write where you have the right to\n"
    assert path.read_bytes() == OLD


def test_checks_write_nothing_and_folders_are_made(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    check_writable(tmp_path / "a.png")
    check_folder(deep)
    assert names(tmp_path) == []
    make_folder(deep)
    make_folder(deep)
    check_folder(deep)
    file = deep / "file"
    file.write_bytes(OLD)
    for path in (file, file / "c"):
        for function in (check_folder, make_folder):
            with pytest.raises(WriteError, match=r"Not a directory|File exists"):
                function(path)
        with pytest.raises(WriteError, match=r"Not a directory; name a folder$"):
            check_folder(path)
    with pytest.raises(WriteError) as caught, write_errors(deep):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")  # as mkdir in /proc
    assert str(caught.value) == f"cannot write {deep}: No such file or directory"
