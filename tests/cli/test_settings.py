"""Options from environment variables and from the configuration file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from hookscope.cli import main as main_module
from hookscope.cli.main import main
from hookscope.cli.settings import config_path, options_by_name
from tests.cli.helpers import one_error

Try = Callable[..., tuple[int, str, str]]


@click.command("toy")
@click.argument("model")
@click.option("--weights", default="auto")
@click.option("--layer", "layers", multiple=True)
@click.option("--at", "changes", multiple=True, nargs=2)
@click.option("--input-size", type=click.IntRange(1))
@click.option("--method", type=click.Choice(["a", "b"]), default="a", show_default=True)
@click.option("--fuse", is_flag=True)
@click.option("--ops/--no-ops", default=None)
def toy(**values: Any) -> None:
    """Do nothing."""
    click.echo(json.dumps({name: value for name, value in values.items() if value not in (None, (), False)}))
    if values["weights"] == "lost":
        raise main_module.HookscopeError("no weights 'lost' for it")


@click.command("other")
@click.option("--clip", type=float)
def other(**values: Any) -> None:
    """Do nothing either."""
    click.echo(json.dumps(values))


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Try:
    """Run a command line with the text of a configuration file and variables: status, output, errors."""

    class Modules:
        hookscope_toy = type("toy", (), {"command": toy})
        hookscope_other = type("other", (), {"command": other})

    monkeypatch.setattr(main_module, "COMMANDS", {"toy": "hookscope_toy", "other": "hookscope_other"})
    monkeypatch.setattr(main_module.importlib, "import_module", lambda name: getattr(Modules, name))

    def attempt(words: str, file: str | bytes = "", **variables: str) -> tuple[int, str, str]:
        path = tmp_path / "set.toml"
        path.write_bytes(file if isinstance(file, bytes) else file.encode())
        with monkeypatch.context() as patch:
            for name, value in ({"HOOKSCOPE_CONFIG": str(path)} | variables).items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as caught:
                main(words.split())
        assert isinstance(caught.value.code, int)
        out, errors = capsys.readouterr()
        return caught.value.code, out, errors.replace(str(path), "FILE")

    return attempt


@pytest.mark.parametrize(
    ("words", "file", "variables", "values"),
    [
        ("", "", {}, {"weights": "auto", "method": "a"}),
        ("", 'weights = "none"', {}, {"weights": "none", "method": "a"}),
        ("", "\ufeffweights = 'none'\r\n", {}, {"weights": "none", "method": "a"}),
        ("", "[other]\nclip = 1.5", {}, {"weights": "auto", "method": "a"}),
        ("", "clip = 1.5", {}, {"weights": "auto", "method": "a"}),  # an option of another command
        ("", 'weights = "x"\n[toy]\nweights = "y"\nmethod = "b"', {}, {"weights": "y", "method": "b"}),
        ("", '[all]\nweights = "x"\n[toy]\nmethod = "b"', {}, {"weights": "x", "method": "b"}),
        ("", "input-size = 7\nfuse = true", {}, {"weights": "auto", "input_size": 7, "method": "a", "fuse": True}),
        ("", "input_size = 7", {}, {"weights": "auto", "input_size": 7, "method": "a"}),
        ("", 'layer = "conv1"', {}, {"weights": "auto", "layers": ["conv1"], "method": "a"}),
        ("", "layer = [0, 'fc']", {}, {"weights": "auto", "layers": ["0", "fc"], "method": "a"}),
        ("", "at = [['fc', 'zero']]", {}, {"weights": "auto", "changes": [["fc", "zero"]], "method": "a"}),
        ("", 'weights = "file"', {"HOOKSCOPE_WEIGHTS": "all"}, {"weights": "all", "method": "a"}),
        ("", "", {"HOOKSCOPE_WEIGHTS": "all", "HOOKSCOPE_TOY_WEIGHTS": "one"}, {"weights": "one", "method": "a"}),
        ("", "", {"HOOKSCOPE_LAYER": "1 fc"}, {"weights": "auto", "layers": ["1", "fc"], "method": "a"}),
        (
            "",
            "",
            {"HOOKSCOPE_FUSE": "1", "HOOKSCOPE_OTHER_CLIP": "x"},
            {"weights": "auto", "method": "a", "fuse": True},
        ),
        ("--weights typed", 'weights = "f"', {"HOOKSCOPE_WEIGHTS": "v"}, {"weights": "typed", "method": "a"}),
    ],
)
def test_the_command_line_comes_before_variables_and_these_before_the_file(
    attempt: Try, words: str, file: str, variables: dict[str, str], values: dict[str, Any]
) -> None:
    status, out, errors = attempt(f"toy net {words}", file, **variables)
    assert (status, json.loads(out), errors) == (0, {"model": "net"} | values, "")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ('weigths = "none"', "FILE: no option 'weigths'; nearest: weights"),
        ('[toy]\nlayers = "1"', "FILE: [toy] no option 'layers'; nearest: layer"),
        ("x = " + "[" * 20000, "cannot read the configuration FILE: maximum recursion depth exceeded"),
        ("[tpy]\nlayer = 1", "FILE: no command 'tpy'; nearest: toy"),
        ('[all]\nweigths = "none"', "FILE: no option 'weigths'; nearest: weights"),
        ("fuse = 1", "FILE: fuse is 1; it takes true or false"),
        ("weights = true", "FILE: weights is True; it takes a text or a number"),
        ("weights = [1]", "FILE: weights is [1]; it takes a text or a number"),
        ("weights", "cannot read the configuration FILE: "),
        (b"weights = '\xff'", "cannot read the configuration FILE: "),
        ("[toy]\nmethod = 'c'", "'c' is not one of 'a', 'b'...--method is from FILE"),
        ("input-size = 0", "0 is not in the range x>=1...--input-size is from FILE"),
    ],
)
def test_a_wrong_setting_is_one_line_with_the_file_and_the_key(attempt: Try, file: str, message: str) -> None:
    one_error(attempt("toy net", file), 2, message)


def test_an_error_says_from_where_the_value_is_that_it_speaks_of(attempt: Try) -> None:
    assert attempt("toy net", "weights = 'lost'")[2] == "Error: no weights 'lost' for it; --weights is from FILE\n"
    status, _, errors = attempt("toy net", "method = 'b'", HOOKSCOPE_WEIGHTS="lost")
    assert (status, errors) == (1, "Error: no weights 'lost' for it; --weights is from HOOKSCOPE_WEIGHTS\n")
    assert attempt("toy net --weights lost", "method = 'b'")[2] == "Error: no weights 'lost' for it\n"
    one_error(
        attempt("toy net", HOOKSCOPE_TOY_METHOD="c"), 2, "'c' is not one of...--method is from HOOKSCOPE_TOY_METHOD"
    )


def test_help_shows_the_default_of_the_file(attempt: Try) -> None:
    assert "[default: b]" in attempt("toy --help", "[toy]\nmethod = 'b'")[1]


def test_a_file_that_is_named_must_be_there_and_the_usual_one_need_not(
    attempt: Try, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_error(
        attempt("toy net", HOOKSCOPE_CONFIG="/no/file"), 2, "cannot read the configuration /no/file: No such file"
    )
    one_error(attempt("toy net", HOOKSCOPE_CONFIG=str(tmp_path)), 2, "cannot read the configuration ...Is a directory")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "etc"))
    usual = {"HOOKSCOPE_CONFIG": ""}
    assert attempt("toy net", **usual)[0] == 0
    monkeypatch.setenv("HOOKSCOPE_CONFIG", "")
    path = Path(config_path())
    assert path == tmp_path / "etc" / "hookscope" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text("weights = 'usual'")
    assert '"weights": "usual"' in attempt("toy net", **usual)[1]


def test_completion_reads_no_file(attempt: Try) -> None:
    completed = {"_HOOKSCOPE_COMPLETE": "bash_complete", "COMP_WORDS": "hookscope toy --me", "COMP_CWORD": "2"}
    assert attempt("", "wrong", **completed) == (0, "plain,--method\n", "")


def test_no_two_options_of_a_command_share_a_variable() -> None:
    for name in main_module.COMMANDS:
        command = main_module.cli.get_command(click.Context(main_module.cli), name)
        assert command is not None
        first = [option.envvar[0] for option in set(options_by_name(command).values()) if option.envvar]
        assert len(first) == len(set(first)) and all(variable.startswith("HOOKSCOPE_") for variable in first)
