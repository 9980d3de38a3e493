"""Options from environment variables."""

import click
import pytest

from hookscope.cli.main import COMMANDS, cli, main, options_by_name


@pytest.mark.parametrize(
    ("variables", "words", "rows"),
    [
        ({}, [], 5),
        ({"HOOKSCOPE_TOP": "2"}, [], 2),
        ({"HOOKSCOPE_PREDICT_TOP": "3", "HOOKSCOPE_TOP": "2"}, [], 3),
        ({"HOOKSCOPE_PREDICT_TOP": "3"}, ["--top", "4"], 4),
        ({"HOOKSCOPE_CAM_TOP": "3"}, [], 5),
    ],
)
def test_the_command_line_comes_first_then_the_variable_of_the_command_then_that_of_all(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    words: list[str],
    rows: int,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["predict", "shapes", "samples/shapes/star.png", "--format", "csv", *words])
    assert len(capsys.readouterr().out.splitlines()) == 1 + rows


def test_every_option_has_its_variables_and_a_wrong_value_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {name: cli.get_command(click.Context(cli), name) for name in COMMANDS}
    for name, command in commands.items():
        assert command is not None
        for word, option in options_by_name(command).items():
            names = [f"HOOKSCOPE_{of}{word}".upper().replace("-", "_") for of in (f"{name}_", "")]
            assert option.envvar == names or len(option.opts) > 1
    monkeypatch.setenv("HOOKSCOPE_TOP", "many")
    with pytest.raises(SystemExit) as caught:
        main(["predict", "shapes", "samples/shapes/star.png"])
    assert (caught.value.code, capsys.readouterr().err.count("\n")) == (2, 1)
