"""Values of options that do not stand on the command line: in environment variables, and in ``config.toml``.

`HOOKSCOPE_CAM_METHOD` is for one command and `HOOKSCOPE_METHOD` for all. The file has options of all commands, and a
table ``[cam]`` of each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
from click.core import ParameterSource

from hookscope.errors import UsageError, nearest
from hookscope.system import cache


def config_path() -> str:
    """The file that holds the defaults; it need not exist unless ``HOOKSCOPE_CONFIG`` names it."""
    folder = cache.user_folder("XDG_CONFIG_HOME", ".config")
    usual = os.path.join(folder, "hookscope", "config.toml") if folder else ""
    return os.environ.get("HOOKSCOPE_CONFIG") or usual


def options_by_name(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by their long names without dashes."""
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {name.removeprefix("--"): option for option in options for name in option.opts if name.startswith("--")}


def name_variables(command: click.Command, *prefixes: str) -> None:
    """Let each option of ``command`` read the environment variables that begin with one of ``prefixes``."""
    for name, option in options_by_name(command).items():
        option.envvar = [f"{prefix}_{name}".upper().replace("-", "_") for prefix in prefixes]


def defaults(
    command: str, commands: Iterable[str], options_of: Callable[[str], Mapping[str, click.Option]]
) -> dict[str, Any]:
    """What the file says of the options of ``command``, by the names of its parameters.

    Raises:
        UsageError: a key of the file that is no option, or a value that no option takes.
    """
    content = _read(config_path())
    tables = {name: table for name, table in content.items() if isinstance(table, dict)}
    # `weights` names an option and a command: TOML cannot hold both on one level
    general = {key: value for key, value in content.items() if key not in tables} | tables.pop("all", {})
    for name in tables.keys() - set(commands):
        raise _wrong(f"no command '{name}'", nearest(name, list(commands)))
    own, found = options_of(command), {}
    for key, value in general.items():
        name = key.replace("_", "-")
        if name in own:
            found[str(own[name].name)] = _value(own[name], value, key)
        else:
            _check_known(name, {name: each for each in commands for name in options_of(each)}, "")
    for key, value in tables.get(command, {}).items():
        name = key.replace("_", "-")
        _check_known(name, own, f"[{command}] ")
        found[str(own[name].name)] = _value(own[name], value, key)
    return found


def source_of(context: click.Context, option: click.Parameter) -> str:
    """Where the value of an option stands, if not on the command line: a variable or the file; else empty."""
    source = context.get_parameter_source(str(option.name))
    if source is ParameterSource.ENVIRONMENT and option.envvar:
        names = [option.envvar] if isinstance(option.envvar, str) else option.envvar
        return next(name for name in names if os.environ.get(name))
    return config_path() if source is ParameterSource.DEFAULT_MAP else ""


def sources_in(context: click.Context, text: str) -> str:
    """The options that ``text`` speaks of and whose values do not stand on the command line, and where they stand."""
    found = []
    for name, option in options_by_name(context.command).items():
        if where := source_of(context, option):
            value = os.environ.get(where) or (context.default_map or {}).get(str(option.name))
            values = map(str, value if isinstance(value, list) else [value])
            words = [f"--{name}", *(word for word in values if any(map(str.isalpha, word)))]
            if any(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) for word in words):
                found.append(f"--{name} is from {where}")
    return ", ".join(found)


def _read(path: str) -> dict[str, Any]:
    """The content of the file; empty if there is none."""
    if not os.path.exists(path) and not os.environ.get("HOOKSCOPE_CONFIG"):
        return {}
    import tomllib  # takes a sixth of the time of `hookscope --help`

    try:
        with open(path, "rb") as file:
            return tomllib.loads(file.read().decode("utf-8-sig"))  # editors on Windows may begin with a mark
    except OSError as error:
        raise UsageError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested too deep
        raise UsageError(f"cannot read the configuration {path}: {error}") from error


def _wrong(asked: str, exists: str = "", do: str = "") -> UsageError:
    return UsageError(f"{config_path()}: {asked}", exists, do)


def _check_known(name: str, options: Iterable[str], table: str) -> None:
    if name not in (names := list(options)):
        raise _wrong(f"{table}no option '{name}'", nearest(name, names))


def _value(option: click.Option, value: Any, key: str) -> Any:
    """``value`` as click takes it: texts, which it converts, or true and false for a flag."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise _wrong(f"{key} is {value!r}", "it takes true or false")
        return value
    several = option.multiple or option.nargs != 1
    if several and isinstance(value, list):
        return [list(map(str, part)) if isinstance(part, list) else str(part) for part in value]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _wrong(f"{key} is {value!r}", f"it takes a text or a number{', or a list of them' * several}")
    return [str(value)] if several else str(value)
