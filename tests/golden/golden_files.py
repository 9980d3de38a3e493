"""The golden files: facts/NAME.json and texts/NAME.json, of the cases of one group of `CASES`."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KINDS = ("facts", "texts")
_WIDTH, _SHORT = 118, 40


def path_of(kind: str, group: str) -> Path:
    """The file with the facts or the texts of a group of cases."""
    return HERE / kind / f"{group}.json"


def read(kind: str, group: str) -> dict[str, Any]:
    """What a golden file holds, by the name of the case; nothing where there is no file."""
    path = path_of(kind, group)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(kind: str, group: str, cases: dict[str, Any]) -> None:
    """Write a golden file in lines that make a readable diff."""
    path = path_of(kind, group)
    path.parent.mkdir(exist_ok=True)
    path.write_text(_laid_out(cases) + "\n", encoding="utf-8")


def _laid_out(value: Any, indent: str = "") -> str:
    """JSON: what fits in a line in one line, and rows always; all else an item a line."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(line) + len(indent) <= _WIDTH or _is_row(value):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key, ensure_ascii=False)}: {_laid_out(item, inner)}" for key, item in value.items()]
    else:
        items = [_laid_out(item, inner) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"


def _is_row(value: dict[str, Any] | list[Any]) -> bool:
    """Whether it holds short values only, or lists of numbers: no sentences, no rows."""
    for item in value.values() if isinstance(value, dict) else value:
        numbers = isinstance(item, list) and not any(isinstance(part, dict | list | str) for part in item)
        if isinstance(item, dict) or (isinstance(item, list) and not numbers):
            return False
        if isinstance(item, str) and len(item) > _SHORT:
            return False
    return True
