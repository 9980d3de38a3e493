"""One file of HTML from a template: styles and scripts in it, and a policy that forbids every request."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hookscope.display import words
from hookscope.errors import printable

MAX_SIZE = 50_000_000
"""The largest size of a page in bytes that browsers open at once."""

_FOLDER = Path(__file__).parent


def render(template: str, styles: Sequence[str], scripts: Sequence[str], **values: Any) -> str:
    """The page of ``template`` with ``values``; ``styles`` and ``scripts`` are files of this folder.

    Text in ``values`` stays text: markup is escaped, and control characters and marks of direction are written out.
    """
    style, script = _joined(tuple(styles)), _joined(tuple(scripts))
    policy = (
        "default-src 'none'; img-src data:; "
        f"style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    page = _environment().get_template(template)
    return page.render(style=Markup(style), script=Markup(script), policy=policy, **values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_as_text,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["words"] = words
    return environment


def _as_text(value: Any) -> Any:
    if value is None:
        return ""
    return printable(value) if type(value) is str else value


@cache
def _joined(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
