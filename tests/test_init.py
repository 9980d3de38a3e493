"""The public names: each there, documented, and loaded when it is first used; and so are the faces of the packages."""

import inspect
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest

import hookscope
from hookscope.explain import CAM_METHODS, SALIENCY_METHODS

HOUSE = Path(hookscope.__file__).parent
NAMES = sorted(set(hookscope.__all__) - {"__version__", "interventions"})
FACES = sorted(path.parent.name for path in HOUSE.glob("*/__init__.pyi"))


def test_a_public_name_says_what_it_is() -> None:
    values = {name: getattr(hookscope, name) for name in NAMES}
    assert [name for name, value in values.items() if not inspect.getdoc(value)] == []
    assert [name for name, value in values.items() if isinstance(value, types.ModuleType)] == []
    for name, methods in {"class_activation_maps": CAM_METHODS, "saliency_maps": SALIENCY_METHODS}.items():
        assert ", ".join(f"``{method}``" for method in methods) in str(inspect.getdoc(values[name]))


def test_public_names_come_from_faces_and_by_a_star_import() -> None:
    assert hookscope.__all__ == sorted(hookscope.__all__) and set(hookscope.__all__) == set(dir(hookscope))
    assert hookscope.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'captrue'; nearest: capture"):
        hookscope.captrue  # noqa: B018
    names: dict[str, object] = {}
    exec("from hookscope import *", names)
    assert set(hookscope.__all__) <= set(names)


def test_every_name_of_a_face_exists_and_no_function_has_the_name_of_a_file() -> None:
    for package in FACES:  # importing the file would put the module in the place of the function
        face = import_module(f"hookscope.{package}")
        assert face.__doc__ and face.__all__, package
        values = {name: getattr(face, name) for name in face.__all__}
        files = {path.stem for path in (HOUSE / package).glob("*.py")}
        assert None not in values.values(), package
        assert [name for name in files & {*values} if not isinstance(values[name], types.ModuleType)] == [], package


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
    assert packages & set(shown) == {"interventions"} and len(shown) <= 79
