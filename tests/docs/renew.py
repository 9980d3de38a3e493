"""A page as it would be if it were written now: its examples are run, its generated sections generated."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tests.docs.generated import generate
from tests.docs.pages import PAGES, Example, commands, examples, links, with_generated
from tests.docs.recipes import follow
from tests.docs.running import newcomer, run_line, run_python

NOT_RUN = ("test command", "not run")
_FIRST_LINES = re.compile(r"first (\d+) lines\b")
_CONSOLE_COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*$", re.MULTILINE)
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")
_THUMBNAIL = 32
_TOLERANCE = 5e-3  # relative: errors of 16-bit numbers differ by 3e-3 between processors


def renew(name: str, pictures: Path) -> str:
    """The text of a page, written anew. The pictures that it shows and its examples draw are copied to `pictures`."""
    text = PAGES[name].read_text()
    page_examples = [example for _, example in examples(text)]
    recipes = follow(page_examples) if any(example.mark == "recipe run" for example in page_examples) else {}
    with newcomer() as folder:
        text = with_generated(text, generate)
        pieces, end, printed = [], 0, ""
        for match, example in examples(text):
            if _is_run(example):
                place = f"{name}:{example.line}"
                try:
                    code, printed = _run(example, place, printed, recipes)
                except BaseException as error:
                    error.add_note(f"the example at {place}")
                    raise
                if same_text(code, example.code, numbers="times vary" not in example.mark):
                    code = example.code
                pieces += [text[end : match.start("code")], code]
                end = match.end("code")
        for picture in shown_pictures(name):
            if (folder / picture.name).exists():
                shutil.copyfile(folder / picture.name, pictures / picture.name)
    return "".join([*pieces, text[end:]])


def shown_pictures(name: str) -> list[Path]:
    """The drawings that a page shows."""
    page = PAGES[name]
    return [(page.parent / link).resolve() for link in links(page.read_text()) if link.endswith(".png")]


def _is_run(example: Example) -> bool:
    if example.mark == "with a browser" and shutil.which("chromium") is None:
        return False
    return example.mark not in NOT_RUN and not example.mark.startswith(("recipe:", "as in "))


def _run(example: Example, place: str, printed: str, recipes: dict[str, str]) -> tuple[str, str]:
    """The text of an example with what it prints, and what it printed."""
    if example.language == "python":
        return example.code, run_python(example.code, place)
    if example.mark == "prints":
        return printed, ""
    if example.language == "console":
        return "".join(_transcript(example, recipes)), ""
    if example.language == "sh":
        for line in commands(example):
            run_line(line.partition(" && ")[2] if example.mark == "install command" else line)
    return example.code, ""


def _transcript(example: Example, recipes: dict[str, str]) -> Iterator[str]:
    limit = _FIRST_LINES.search(example.mark)
    sources = _CONSOLE_COMMAND.findall(example.code)  # a long one takes several lines
    for line, source in zip(commands(example), sources, strict=True):
        printed = recipes[line] if line in recipes else run_line(line, terminal=True)
        lines = [text.rstrip() for text in printed.splitlines()]
        if limit and len(lines) > int(limit[1]):
            lines = [*lines[: int(limit[1])], "..."]
        yield "\n".join([source, *lines, ""])


def same_text(one: str, other: str, numbers: bool = True) -> bool:
    """Whether two texts are equal but for the last digits of their `numbers`, and the blanks that these move."""
    texts = [re.sub(r"-{3,}", "---", text) for text in (one, other)]
    words = [[" ".join(part.split()) for part in _NUMBER.split(text)] for text in texts]
    if words[0] != words[1]:
        return False
    values = [[float(number) for number in _NUMBER.findall(text)] for text in texts]
    return not numbers or bool(np.allclose(*values, rtol=_TOLERANCE, atol=1e-6))


def same_picture(one: Path, other: Path) -> bool:
    """Whether two pictures look the same; the lettering of other versions of matplotlib may differ by a pixel."""
    pictures = [Image.open(path).convert("RGB") for path in (one, other)]
    if any(abs(a - b) > 0.02 * a for a, b in zip(*(picture.size for picture in pictures), strict=True)):
        return False
    small = [np.asarray(picture.resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX), float) for picture in pictures]
    return float(np.abs(small[0] - small[1]).mean()) < 2
