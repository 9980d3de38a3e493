"""A script run by `Script.run` is told apart by nothing from one that Python runs; the judge is Python itself."""

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hookscope
from hookscope.errors import HookscopeError, UsageError
from hookscope.system.processes import find_script

ROOT = Path(hookscope.__file__).parents[1]
NEEDS_POSIX = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")

# Two frames above the script, as a program has them.
RUNNER = """
import sys
from hookscope.system.processes import find_script

def program():
    find_script(sys.argv[1:]).run()

program()
"""
ABOUT = """
'''A script.'''
import sys
names = {name: value for name, value in globals().items() if name not in ("__loader__", "__spec__", "sys")}
print(names, list(globals())[:10], type(__loader__).__name__, __spec__ and __spec__.name)
print(sys.argv, sys.path, sys.modules["__main__"].__dict__ is globals(), __builtins__)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the script ``train.py``, one in a package, one in a folder, one in a zip file and behind a link."""
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner" / "run.py").write_text(RUNNER)
    work = tmp_path / "work"
    (work / "package" / "inner").mkdir(parents=True)
    (work / "folder").mkdir()
    (work / "package" / "__init__.py").write_text("import sys; print('package', sys.argv, sys.path[0])")
    for path in ("train.py", "package/train.py", "package/inner/__main__.py", "folder/__main__.py"):
        (work / path).write_text(ABOUT)
    with zipfile.ZipFile(work / "zipped.pyz", "w") as file:
        file.writestr("__main__.py", ABOUT)
    (work / "link.py").symlink_to("folder/__main__.py")
    return work


def ended(folder: Path, *words: str, flags: tuple[str, ...] = ()) -> tuple[int, bytes, bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    answer = subprocess.run(
        [sys.executable, *flags, *words], cwd=folder, env=environment, capture_output=True, timeout=60
    )
    return answer.returncode, answer.stdout, answer.stderr


def both(folder: Path, *words: str, flags: tuple[str, ...] = ()) -> tuple[int, bytes, bytes]:
    """Status, output and errors, the same whether Python runs the words or we do."""
    plain = ended(folder, *words, flags=flags)
    assert ended(folder, str(folder.parent / "runner" / "run.py"), *words, flags=flags) == plain
    return plain


def written(folder: Path, text: str | bytes, name: str = "train.py") -> str:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


@pytest.mark.parametrize(
    "words",
    [
        ("train.py",),
        ("./train.py", "--epochs", "3", "--", "-m", "--help", "-"),
        ("../work/train.py", "a b", ""),
        ("folder",),
        ("folder/", "--help"),
        ("zipped.pyz", "x"),
        ("link.py",),
        ("-m", "train", "--epochs", "3"),
        ("-m", "package.train", "-m", "x"),
        ("-m", "package.inner"),
    ],
    ids=" ".join,
)
def test_a_script_finds_itself_where_python_puts_it(folder: Path, words: tuple[str, ...]) -> None:
    status, output, errors = both(folder, *words)
    assert status == 0 and b"'__name__': '__main__'" in output and not errors


@pytest.mark.parametrize("words", [("train.py",), ("folder",), ("-m", "site")], ids=" ".join)
def test_a_safe_path_stays_safe(folder: Path, words: tuple[str, ...]) -> None:
    status, output, _ = both(folder, *words, flags=("-P",))
    assert status == 0 and output


def test_a_compiled_script(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-qb", "train.py"], cwd=folder, check=True)
    assert b"'__name__': '__main__'" in both(folder, "train.pyc")[1]


def test_a_script_from_a_pipe_is_read_once(folder: Path) -> None:
    if not os.path.exists("/dev/stdin"):
        pytest.skip("no /dev/stdin")
    runner = str(folder.parent / "runner" / "run.py")
    answer = subprocess.run(
        [sys.executable, runner, "/dev/stdin"], input=b"print(2)", env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
    )  # fmt: skip
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, b"2\n", b"")


ENDS = {
    "status": ("import sys; sys.exit(3)", 3),
    "text": ("import sys; sys.exit('that is all')", 1),
    "none": ("raise SystemExit", 0),
    "large": ("raise SystemExit(259)", 3),
    "at once": ("import os; os._exit(7)", 7),
    "error": ("def f():\n    1 / 0\nf()", 1),
    "chain": ("try:\n    try: {}[1]\n    except KeyError as e: raise ValueError('v') from e\nfinally: {}['é']", 1),
    "group": ("def f():\n    raise ExceptionGroup('two', [ValueError(1), TypeError(2)])\nf()", 1),
    "syntax": ("print('a')\nx = = 2\n", 1),
    "import": ("import nothing_of_this_name", 1),
    "in an import": ("import broken", 1),
    "hook": ("import sys\nsys.excepthook = lambda *a: print(a[1], a[2].tb_frame.f_code.co_name, a[2].tb_next)\n1/0", 1),
    "note": ("e = ValueError('v'); e.add_note('look'); raise e", 1),
    "no finite end": ("e = ValueError('v'); f = KeyError('w'); e.__context__ = f; f.__context__ = e; raise e", 1),
    "exit handlers": (
        "import atexit, threading, time\n"
        "class A:\n    def __del__(self): print('deleted', flush=True)\n"
        "a = A()\natexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('main')\n1/0",
        1,
    ),
    "encoding": ("# -*- coding: latin-1 -*-\nprint(ascii('é'))".encode("latin-1"), 0),
    "nothing from the future": ("def f(x: int): pass\nprint(f.__annotations__, 1/2)", 0),
    "warning": ("import warnings\nwarnings.warn('look')\nwarnings.warn('old', DeprecationWarning)", 0),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_with_python(folder: Path, name: str) -> None:
    source, status = ENDS[name]
    written(folder, "def f():\n    raise RuntimeError('r')\nf()\n", "broken.py")
    assert both(folder, written(folder, source))[0] == status


@pytest.mark.parametrize("source", ["1 / 0", "x = = 2", "import sys; sys.exit(4)"])
def test_a_module_ends_as_with_python(folder: Path, source: str) -> None:
    written(folder, source, "package/train.py")
    assert both(folder, "-m", "package.train")[0] in (1, 4)


@NEEDS_POSIX
@pytest.mark.parametrize("words", [("train.py",), ("-m", "train")], ids=" ".join)
def test_an_interrupted_script_dies_of_it(folder: Path, words: tuple[str, ...]) -> None:
    written(folder, "try: raise KeyboardInterrupt\nfinally: print('finally')")
    assert both(folder, *words)[0] == -signal.SIGINT


def test_a_module_that_its_package_has_imported_is_warned_about(folder: Path) -> None:
    written(folder, "import package.train", "package/__init__.py")
    assert b"RuntimeWarning" in both(folder, "-m", "package.train")[2]


PICKLES = """
import multiprocessing, pickle
class Net: pass
def square(x): return x * x
if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Net())).__class__ is Net, Net.__module__)
    for how in ("spawn", "fork"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(pool.map(square, [1, 2, 3]))
"""


@NEEDS_POSIX
@pytest.mark.parametrize("words", [("train.py",), ("-m", "train")], ids=" ".join)
def test_what_is_in_main_is_found_by_pickles_and_processes(folder: Path, words: tuple[str, ...]) -> None:
    written(folder, PICKLES)
    assert both(folder, *words) == (0, b"True __main__\n[1, 4, 9]\n[1, 4, 9]\n", b"")


def test_frames_of_hookscope_are_left_out_wherever_they_are(folder: Path) -> None:
    source = "from hookscope.system import after_import\ndef f(): 1 / 0\nafter_import('sys', f)\n"
    runner = str(folder.parent / "runner" / "run.py")
    errors = ended(folder, runner, written(folder, source))[2].decode()
    shown = [line.split(", in")[0] for line in errors.splitlines() if "File" in line]
    assert shown == [f'  File "{folder / "train.py"}", line {line}' for line in (3, 2)]


REFUSED = {
    ("trian.py",): "cannot open the script trian.py: No such file or directory; nearest: train.py, link.py",
    ("package",): "package has no __main__.py to run; in it: train.py; name a script in it",
    ("-m",): "-m needs the name of a module",
    (): "there is no script; name a file, or -m and a module",
    ("torchrun", "--nproc_per_node", "2", "train.py", "-x"): "torchrun would run the script unwatched; put hookscope"
    " inside: torchrun --nproc_per_node 2 -m hookscope watch -- train.py -x",
    ("python", "train.py", "-x"): "python would run the script unwatched; hookscope watch -- train.py -x",
    ("/usr/bin/python3.11", "-u", "-m", "train"): "python3.11 would run the script unwatched; put hookscope inside:"
    " /usr/bin/python3.11 -u -m hookscope watch -- -m train",
    ("a\0b",): "cannot open the script a\\x00b: embedded null byte",
}


MISSING = {
    ("-m", "trian"): "no module named trian; nearest: train",
    ("-m", "train.py"): "no module named train.py; leave -m out: it is a file",
}


@pytest.mark.parametrize("words", [*REFUSED, *MISSING], ids=repr)
def test_what_is_no_script_is_wrong_usage_and_what_is_no_module_cannot_be_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    path = list(sys.path)
    with pytest.raises(HookscopeError) as caught:
        find_script(words)
    assert (str(caught.value), caught.value.exit_code) == ((REFUSED | MISSING)[words], 1 if words in MISSING else 2)
    assert sys.path == path and "package" not in sys.modules


def test_a_file_of_the_name_of_a_launcher_is_a_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    written(folder, "1", "torchrun")
    assert find_script(["torchrun"]).source == b"1"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_script_that_may_not_be_read(folder: Path) -> None:
    (folder / "train.py").chmod(0)
    with pytest.raises(UsageError, match="Permission denied"):
        find_script([str(folder / "train.py")])
