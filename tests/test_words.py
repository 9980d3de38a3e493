"""Plain English: turns that a reader must solve, and options of the command line in texts of the library."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("hookscope/**/*.py"))
TEXTS = [*SOURCES, *sorted(ROOT.glob("hookscope/**/*.html")), ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
TEXTS += [path for path in sorted(ROOT.glob("docs/*/*.md")) if "zh-CN" not in path.parts]
BANNED = {
    "those of": "repeat the noun",
    "that of": "repeat the noun",
    "is no": "write `is not a`",
    "are no": "write `are not`",
    "put out": "write `output`",
    "likewise": "say what is alike",
    "none of pyplot's": "write `does not belong to pyplot`",
}
_BANNED = re.compile(rf"(?<!there )\b({'|'.join(BANNED)})\b(?! longer| better| more | less )", re.IGNORECASE)
_OF_OTHERS = "force-reinstall|head|help"  # options of pip, of ray, and of any script
_OPTION = re.compile(rf"(?<![\w-])--(?!(?:{_OF_OTHERS})\b)[a-z_][a-z-]*")
_BOTH = re.compile("‹[^|›]*\\|[^›]*›")


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a file of Python with their lines, docstrings too; ``_`` stands for what an f-string inserts."""
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.JoinedStr):
            inserted = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in node.values),
            )
            todo += inserted
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        else:
            todo += ast.iter_child_nodes(node)


def test_no_text_has_a_turn_that_a_reader_must_solve() -> None:
    lines = ((path, at, line) for path in TEXTS for at, line in enumerate(path.read_text().splitlines(), 1))
    found = [
        f"{path.relative_to(ROOT)}:{at}: {line.strip()} ({BANNED[hit[1].lower()]})"
        for path, at, line in lines
        if (hit := _BANNED.search(line))
    ]
    assert not found, "\n".join(found)


def test_the_library_speaks_python() -> None:
    library = [path for path in SOURCES if "cli" not in path.parts and path.name != "errors.py"]  # tells the spellings
    found = [
        f"{path.relative_to(ROOT)}:{at}: {text}"
        for path in library
        for at, text in strings(path)
        if " " in text and "--" in text and _OPTION.search(_BOTH.sub("", text))
    ]
    assert not found, "\n".join(found)
