"""The pages of the documentation, and their parts: fenced examples, generated sections, links, headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]}

_GENERATED = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end of generated -->)", re.DOTALL)
_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]+?) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A fenced block: `mark` is the comment before it, `prints` where the block after it shows what it prints.

    ``as in PAGE`` is before commands that the page PAGE runs.
    """

    language: str
    code: str
    mark: str
    line: int


def examples(text: str) -> Iterator[tuple[re.Match[str], Example]]:
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        yield match, Example(match["language"], match["code"], match["mark"] or "", line)


def commands(example: Example) -> list[str]:
    """The command lines of an example, each on one line."""
    lines = example.code.replace("\\\n  ", "").replace("\\\n> ", "").splitlines()
    if example.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [line for line in lines if line.strip() and not line.startswith("#")]


def with_generated(text: str, generate) -> str:
    """`text` with each generated section written by ``generate(words)``."""
    return _GENERATED.sub(lambda match: f"{match[1]}\n{generate(match[2]).strip()}\n\n{match[3]}", text)


def without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", without_fences(text))


def links(text: str) -> list[str]:
    return _LINK.findall(without_code(text))


def anchors(text: str) -> set[str]:
    """The anchors that a code host gives to the headings of a page."""
    names: dict[str, int] = {}
    for heading in _HEADING.findall(without_fences(text)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        names[name] = names.get(name, -1) + 1
    return {f"{name}-{number}" if number else name for name, last in names.items() for number in range(last + 1)}
