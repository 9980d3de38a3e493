"""The public names: each there, documented, and loaded when it is first used; and so are the faces of the packages."""

import inspect
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import hookscope

HOUSE = Path(hookscope.__file__).parent
NAMES = sorted(set(hookscope.__all__) - {"__version__", "interventions"})
FACES = sorted(path.parent.name for path in HOUSE.glob("*/__init__.pyi"))


def test_a_public_name_says_what_it_is() -> None:
    values = {name: getattr(hookscope, name) for name in NAMES}
    assert [name for name, value in values.items() if not inspect.getdoc(value)] == []
    assert [name for name, value in values.items() if isinstance(value, types.ModuleType)] == []


def test_public_names_come_from_faces_and_by_a_star_import() -> None:
    assert hookscope.__all__ == sorted(hookscope.__all__) and set(hookscope.__all__) == set(dir(hookscope))
    assert hookscope.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="captrue"):
        hookscope.captrue  # noqa: B018
    names: dict[str, object] = {}
    exec("from hookscope import *", names)
    assert set(hookscope.__all__) <= set(names)


@pytest.mark.parametrize("package", FACES)
def test_every_name_of_a_face_exists(package: str) -> None:
    face = import_module(f"hookscope.{package}")
    assert face.__doc__ and face.__all__
    for name in face.__all__:
        assert getattr(face, name) is not None


@pytest.mark.parametrize("package", FACES)
def test_no_function_of_a_face_has_the_name_of_a_file(package: str) -> None:
    # importing the file would put the module in the place of the function
    face = import_module(f"hookscope.{package}")
    files = {path.stem for path in (HOUSE / package).glob("*.py")}
    assert [name for name in files & set(face.__all__) if not isinstance(getattr(face, name), types.ModuleType)] == []


def test_completion_shows_no_private_package_and_no_plot_needs_pyplot() -> None:
    code = (
        "import sys, hookscope, hookscope.cli.main\n"
        "hookscope.plot(hookscope.parameter_statistics(hookscope.load_model('shapes')))\n"
        "print('matplotlib.pyplot' in sys.modules, *dir(hookscope))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=HOUSE.parent, capture_output=True, text=True, check=True)
    pyplot, *shown = done.stdout.split()
    assert pyplot == "False"
    packages = {path.parent.name for path in HOUSE.glob("*/__init__.py")}
    assert packages & set(shown) == {"interventions"} and len(shown) <= 77
