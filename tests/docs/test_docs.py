"""The pages against the program: examples run, what they print and draw is shown, and nothing is left out."""

import hashlib
import re
from pathlib import Path

import click
import pytest

from hookscope.cli.main import COMMANDS, cli
from hookscope.findings import CATALOGUE, REPORT_ORDER
from tests.docs.generated import CHINESE, columns, public_names, result_types
from tests.docs.pages import PAGES, ROOT, anchors, commands, examples, links, without_code, without_fences
from tests.docs.renew import NOT_RUN, renew, same_picture, shown_pictures

TEXTS = {name: path.read_text() for name, path in PAGES.items()}
TRANSLATED = "docs/zh-CN/README.md"  # has the examples of README.md, which are run there


@pytest.mark.parametrize("name", [name for name in PAGES if name != TRANSLATED])
def test_a_page_shows_what_the_program_prints_and_draws(name, tmp_path):
    assert renew(name, tmp_path) == TEXTS[name], f"run: python -m tests.docs {name}"
    for stored in shown_pictures(name):
        drawn = tmp_path / stored.name
        assert not drawn.exists() or same_picture(stored, drawn), f"run: python -m tests.docs {name}"


@pytest.mark.parametrize("name", PAGES)
def test_every_fence_is_an_example(name):
    assert len(list(examples(TEXTS[name]))) == len(re.findall(r"^```\w+$", TEXTS[name], re.MULTILINE))


@pytest.mark.parametrize("name", PAGES)
def test_commands_that_another_page_runs_are_there(name):
    for _, example in examples(TEXTS[name]):
        if example.mark.startswith("as in "):
            others = [other for _, other in examples(TEXTS[example.mark.removeprefix("as in ")])]
            run = {line for other in others if other.mark not in NOT_RUN for line in commands(other)}
            assert set(commands(example)) <= run


def test_every_picture_is_drawn_by_an_example_of_a_page_that_shows_it():
    drawn = {path.name for path in ROOT.glob("docs/images/*")}
    code = "".join(example.code for text in TEXTS.values() for _, example in examples(text))
    assert {name for name in drawn if name not in code} == set()
    assert drawn == {path.name for name in PAGES for path in shown_pictures(name)}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    for link in links(TEXTS[name]):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (PAGES[name].parent / path).resolve() if path else PAGES[name]
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_every_page_is_in_the_index():
    linked = {(ROOT / "docs" / link.split("#")[0]).resolve() for link in links(TEXTS["docs/index.md"])}
    assert {path for name, path in PAGES.items() if "README" not in name} - linked == {ROOT / "docs" / "index.md"}


def test_every_command_is_run_by_an_example_outside_the_reference():
    text = "".join(TEXTS[name] for name in TEXTS if name != "docs/cli-reference.md")
    lines = [
        line for _, example in examples(text) if example.language in ("sh", "console") for line in commands(example)
    ]
    run = set(re.findall(r"hookscope ([a-z-]+)", "\n".join(lines)))
    assert set(COMMANDS) <= run


def test_every_option_is_somewhere():
    text = "".join(TEXTS.values())
    context = cli.make_context("hookscope", ["completion"])
    for name in COMMANDS:
        for parameter in cli.get_command(context, name).params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                of_both = re.sub("-[ab]$" if name == "compare" else "^$", "", parameter.opts[-1])  # sides share a text
                assert of_both in text, (name, parameter.name)


def test_every_public_name_is_in_the_python_reference():
    headings = re.findall(r"^### (\S+)$", TEXTS["docs/python-api.md"], re.MULTILINE)
    results = [name.rpartition(".")[2] for name in result_types()]
    assert headings == [*public_names("hookscope"), *public_names("hookscope.interventions"), *results]


@pytest.mark.parametrize("name", ["docs/python-api.md", "docs/howto/notebooks.md"])
def test_the_python_pages_open_with_a_table_of_every_command(name):
    table = (
        TEXTS[name][: TEXTS[name].index("| task |")],
        TEXTS[name][TEXTS[name].index("| task |") :].partition("\n\n")[0],
    )
    assert not re.search(r"^#{2,} |^```", table[0], re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table[1].splitlines()[2:]]
    told = {command for _, words, _ in rows for command in re.findall(r"`([a-z][a-z-]*)", words)}
    assert told == set(COMMANDS) - {"help", "completion"}
    assert {name for *_, words in rows for name in re.findall(r"\[`(\w+)`\]", words)} <= set(public_names("hookscope"))


def test_the_readme_is_short_and_has_the_two_commands():
    for name in ("README.md", TRANSLATED):
        assert TEXTS[name].count("\n") <= 150
        assert {example.mark for _, example in examples(TEXTS[name])} >= {"install command", "test command"}


def test_both_readmes_have_the_same_examples_and_what_they_print():
    english, chinese = (
        [(example.language, example.code, example.mark) for _, example in examples(TEXTS[name])]
        for name in ("README.md", TRANSLATED)
    )
    assert english == chinese


def test_both_readmes_state_the_same_numbers():
    english, chinese = (
        sorted(
            re.findall(r"(?<![\w.])\d+(?:\.\d+)?", re.sub(r"\]\(.*?\)|(?<=\d),(?=\d)", "", without_code(TEXTS[name])))
        )
        for name in ("README.md", TRANSLATED)
    )
    assert len(english) > 5
    assert chinese == english


def test_the_chinese_table_of_commands_has_every_command():
    table = (ROOT / "docs/zh-CN/commands.md").read_text()
    assert sorted(re.findall(r"^\| `(.+?)` \| .+ \|$", table, re.MULTILINE)) == sorted(COMMANDS)


def test_every_finding_has_a_meaning_and_advice_in_chinese():
    """The entries of docs/zh-CN/findings.toml against the catalogue: what is missing there, and what is too much."""
    english = {
        (kind.name, case, word)
        for kind in CATALOGUE.values()
        for case, text in {"": kind, **kind.cases}.items()
        for word in ("meaning", "advice")
        if getattr(text, word)
    }
    chinese = {
        (name, case, word)
        for name, entry in CHINESE["findings"].items()
        for case, text in {"": entry, **entry.get("cases", {})}.items()
        for word in text.keys() - {"name", "cases"}
        if re.search("[\u4e00-\u9fff]", text[word])
    }
    assert sorted(english - chinese) == []
    assert sorted(chinese - english) == []
    assert CHINESE["questions"].keys() == REPORT_ORDER.keys()


def _places() -> list[str]:
    """The names of what an inspection shows beside findings."""
    listed = re.findall(r"^\| (`[^|]*-[^|]*`) \|", TEXTS["docs/howto/inspect.md"], re.MULTILINE)
    return [name.strip("`") for names in listed for name in names.split(", ")]


def test_every_place_of_an_inspection_has_a_meaning_in_chinese():
    assert "carries-answer" in _places()
    assert [name for name in _places() if f"\n| `{name}` | " not in TEXTS["docs/zh-CN/findings.md"]] == []


def test_the_sentences_of_an_inspection_lead_to_their_names_in_chinese():
    """Each phrase stands in a file of the program that names its finding; `…` are names and numbers."""
    sources = [path.read_text() for path in (ROOT / "hookscope").rglob("*.py")]
    table = TEXTS["docs/zh-CN/findings.md"].partition("| 原文里的词 |")[2].partition("\n\n")[0]
    told: set[str] = set()
    for row in table.splitlines()[2:]:
        phrases, names = (re.findall("`(.+?)`", cell) for cell in row.split(" | ")[:2])
        own = [text for text in sources if any(f'"{name}"' in text for name in names)]
        for phrase in phrases:
            words = re.compile(".*".join(map(re.escape, phrase.split(" … "))))
            assert any(map(words.search, own)), (phrase, names)
        told.update(names)
    assert {*REPORT_ORDER["inspection"], *_places()} <= told


def test_the_english_phrases_with_a_meaning_in_chinese_stand_in_the_program():
    """Each on one line; `…` are names and numbers."""
    source = "\n".join(path.read_text() for path in (ROOT / "hookscope").rglob("*.py"))
    table = TEXTS["docs/zh-CN/output.md"].partition("| 命令 | 原文里的词 |")[2].partition("\n\n")[0]
    phrases = [phrase for row in table.splitlines()[2:] for phrase in re.findall("`(.+?)`", row.split(" | ")[1])]
    assert len(phrases) > 50
    assert [one for one in phrases if not re.search(".*".join(map(re.escape, re.split(" ?… ?", one))), source)] == []


def test_the_columns_with_a_meaning_in_chinese_are_the_columns_of_the_commands():
    """A command that the table names has all its columns there; rows without a command are of several."""
    table = TEXTS["docs/zh-CN/output.md"].partition("| 列 | 命令 |")[2].partition("\n\n")[0]
    told: dict[str, set[str]] = {}
    for row in table.splitlines()[2:]:
        names, commands = (re.findall("`(.+?)`", cell) for cell in row.split(" |")[:2])
        for command in commands or [""]:
            told.setdefault(command, set()).update(names)
    general, exist = told.pop(""), {command: set(names) for command, names in columns().items()}
    assert general <= set().union(*exist.values())
    for command, names in told.items():
        assert names <= exist[command] <= names | general, command


@pytest.mark.parametrize("name", [name for name in PAGES if "zh-CN" in name])
def test_chinese_and_latin_words_are_set_apart(name):
    text = re.sub(r"\]\([^)]*\)|\*\*|!?\[|\]", "", re.sub(r"`[^`\n]*`", "a", without_fences(TEXTS[name])))
    glued = re.findall(r".{,9}(?:[\u4e00-\u9fff][A-Za-z0-9]|[A-Za-z0-9%][\u4e00-\u9fff]).{,9}", text)
    halfwidth = re.findall(r".{,9}(?:[\u4e00-\u9fff] ?[,;:?!()]|[,;:?!()] ?[\u4e00-\u9fff]).{,9}", text)
    padded = re.findall(
        r".{,9}(?:[，。、；：？！（）“”] | [，。、；：？！（）“”]).{,9}", text.replace("| ", "|").replace(" |", "|")
    )
    assert [*glued, *halfwidth, *padded] == []


def test_pictures_are_small_and_kept_once():
    files = list(Path(ROOT / "docs").rglob("*.png"))
    assert sum(path.stat().st_size for path in files) < 3_600_000
    assert len({hashlib.sha256(path.read_bytes()).digest() for path in files}) == len(files)
