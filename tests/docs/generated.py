"""The generated sections of the pages: help texts, fields of rows, findings, the Python interface."""

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import hookscope
import hookscope.interventions
from hookscope.cli.main import COMMANDS, cli
from hookscope.errors import spelling_for_shell
from hookscope.findings import CATALOGUE, REPORT_ORDER
from tests.docs.pages import ROOT
from tests.docs.running import run_line

_FIELDS = {
    "list-layers": "tracing:LAYER_CALLS",
    "list-layers --total": "tracing:LAYER_TOTALS",
    "graph": "cli.commands.graph:TREE",
    "visualize": "cli.commands.visualize:COLUMNS",
    "attention": "cli.commands.attention:COLUMNS",
    "inspect": "cli.commands.inspect:PLACES",
    "stats": "statistics:STATISTICS",
    "stats --per-channel": "statistics:CHANNELS",
    "exemplars": "exemplars:EXEMPLARS",
    "predict": "cli.commands.predict:COLUMNS",
    "cam": "cli.commands.cam:COLUMNS",
    "compare-maps": "cli.commands.compare_maps:MAPS",
    "saliency": "cli.commands.saliency:COLUMNS",
    "gradients": "gradients:GRADIENTS",
    "gradients --parameters": "gradients:PARAMETER_GRADIENTS",
    "intervene": "cli.commands.intervene:LAYERS",
    "intervene --classes": "cli.commands.intervene:CLASSES",
    "ablate": "cli.commands.ablate:COLUMNS",
    "check": "cli.commands.check:COLUMNS",
    "compare": "comparison:PAIRS",
    "plan": "cli.commands.plan:COLUMNS",
    "plan --total": "cli.commands.plan:TOTALS",
    "extract": "cli.commands.extract:COLUMNS",
    "weights": "parameters:WEIGHTS",
    "trace": "cli.commands.trace:CALLS",
    "trace --events": "cli.commands.trace:EVENTS",
    "find-nan": "cli.commands.find_nan:COLUMNS",
    "show-run": "cli.commands.show_run:COLUMNS",
    "verify": "cli.commands.verify:COLUMNS",
    "list-models": "cli.commands.list_models:COLUMNS",
}
_QUESTIONS = {
    "activations": "activations: `stats`",
    "gradients": "gradients: `gradients`",
    "weights": "weights: `weights`",
    "training": "a training run: `show-run`",
    "inspection": "a whole network: `inspect`",
}
CHINESE = tomllib.loads((ROOT / "docs/zh-CN/findings.toml").read_text())
SHOWN = {*hookscope.__all__, *hookscope.interventions.__all__}  # in sections of their own
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$")
_QUOTES = re.compile(r"(: |-> )(['\"])(.*?)\2")  # around annotations


def generate(words: str) -> str:
    """The section called NAME or NAME ARGUMENT."""
    name, _, argument = words.partition(" ")
    return _SECTIONS[name](argument)


def _help(command: str) -> str:
    text = run_line(f"hookscope help {command}".strip())
    return f"```text\n{text}```"


def _commands(_: str) -> str:
    """Each command as in ``hookscope --help``, with a link into the reference."""
    context = cli.make_context("hookscope", ["completion"])
    lines = ["| command | what it does |", "| --- | --- |"]
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        lines.append(f"| [`{name}`](cli-reference.md#hookscope-{name}) | {command.get_short_help_str(200)} |")
    return "\n".join(lines)


def _reference(_: str) -> str:
    """The help text of every command."""
    sections = ["## hookscope\n\n" + _help("")]
    sections += [f"## hookscope {name}\n\n{_help(name)}" for name in COMMANDS]
    return "\n\n".join(sections)


def _tasks(_: str) -> str:
    """The table of `docs/python-api.md`, for a page in another folder."""
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    table = page[page.index("| task |") :].partition("\n\n")[0]
    return table.replace("](#", "](../python-api.md#")


def columns() -> dict[str, tuple[str, ...]]:
    """The columns of each command, as tsv has them."""
    places = {command: place.split(":") for command, place in _FIELDS.items()}
    return {command: getattr(import_module(f"hookscope.{at}"), name).flat for command, (at, name) in places.items()}


def _fields(_: str) -> str:
    rows = [f"| `{command}` | `{' '.join(names)}` |" for command, names in columns().items()]
    return "\n".join(["| command | fields |", "| --- | --- |", *rows])


def public_names(module: str) -> list[str]:
    """The names of `hookscope`, or the classes of a package that are not among them."""
    package = import_module(module)
    if package is hookscope:
        names = set(hookscope.__all__) - {"__version__", "interventions"}
    else:
        names = {name for name in package.__all__ if inspect.isclass(getattr(package, name))} - set(hookscope.__all__)
    return sorted(names, key=lambda name: (name.lower(), name.swapcase()))  # plan before Plan: links mean the first


def result_types() -> dict[str, type]:
    """The classes of packages that public names return, and that these hold in fields; by their full names."""
    faces = [import_module(f"hookscope.{path.parent.name}") for path in sorted(ROOT.glob("hookscope/*/__init__.pyi"))]
    known = {f"{face.__name__}.{name}": getattr(face, name) for face in faces for name in face.__all__}
    known = {name: kind for name, kind in known.items() if inspect.isclass(kind) and kind.__name__ not in SHOWN}
    public, found = [getattr(hookscope, name) for name in public_names("hookscope")], dict[str, type]()
    members = [each for thing in public for each in (vars(thing).values() if inspect.isclass(thing) else [thing])]
    todo = [str(getattr(each, "__annotations__", {}).get("return", "")) for each in members]
    while todo:
        text = todo.pop()
        for name, kind in known.items():
            if (
                name not in found
                and re.search(rf"\b{kind.__name__}\b", text)
                and kind.__module__.startswith(f"{name}."[: name.rindex(".")])
            ):
                found[name] = kind
                todo.append(
                    str({key: value for key, value in vars(kind).get("__annotations__", {}).items() if key[0] != "_"})
                )
    return dict(sorted(found.items(), key=lambda item: item[1].__name__))


def _results(_: str) -> str:
    """Every type of result: its package and its docstring."""
    return "\n\n".join(_object(kind.__name__, kind, name) for name, kind in result_types().items())


def _api(module: str) -> str:
    """Every public name of a module: its signature and its docstring."""
    package = import_module(module)
    sections = []
    for name in public_names(module):
        section = _object(name, getattr(package, name))
        if ">>>" not in section and _users(name):
            section += f"\n\nSee {', '.join(_users(name)[:3])}."
        sections.append(section)
    return "\n\n".join(sections)


def _users(name: str) -> list[str]:
    """Links to the public names with `name` in their signature, a method's or their text, with an example."""
    users = []
    for module in ("hookscope", "hookscope.interventions"):
        for user in public_names(module):
            thing = getattr(import_module(module), user)
            text = f"{_signature(user, thing)} {(documentation := inspect.getdoc(thing) or '')}"
            members = vars(thing).values() if inspect.isclass(thing) else ()
            text += str([getattr(member, "__annotations__", "") for member in members])
            base = inspect.isclass(thing) and any(parent.__name__ == name for parent in thing.__mro__[1:])
            if user != name and (base or re.search(rf"\b{name}\b", text)) and ">>>" in documentation:
                users.append(f"[`{user}`](#{user.lower()})")
    return users


def _object(name: str, thing: Any, place: str = "") -> str:
    """A section: name, signature or the ``place`` of a type of result, docstring and members."""
    parts = [f"### {name}"]
    if place:
        parts.append(f"`{place}`")
    elif callable(thing):
        parts.append(f"```text\n{_signature(name, thing)}\n```")
    parts.append(_markdown(inspect.getdoc(thing) or ""))
    if inspect.isclass(thing):
        described = set(re.findall(r"^    (\w+): ", inspect.getdoc(thing) or "", re.MULTILINE))
        members = [_member(thing, member) for member in _members(thing) if member not in described]
        if members:
            parts.append("\n".join(members))
    return "\n\n".join(part for part in parts if part)


def _members(thing: type) -> list[str]:
    """Public methods and properties with a docstring, those of base classes in hookscope too."""
    names: dict[str, None] = {}
    for owner in reversed(thing.__mro__):
        if owner.__module__.startswith("hookscope"):
            for name, value in vars(owner).items():
                is_member = inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
                if is_member and not name.startswith("_") and inspect.getdoc(getattr(thing, name)):
                    names[name] = None
    return list(names)


def _member(owner: type, name: str) -> str:
    value = inspect.getattr_static(owner, name)
    text = inspect.getdoc(value) or inspect.getdoc(getattr(owner, name)) or ""
    summary = " ".join(text.split("\n\n")[0].split())
    if not isinstance(value, property):
        parameters = inspect.signature(getattr(owner, name)).parameters
        name += f"({', '.join(parameter for parameter in parameters if parameter != 'self')})"
    return f"- `.{name}`: {summary}"


def _signature(name: str, thing: Callable[..., Any]) -> str:
    signature = inspect.signature(thing)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    signature = signature.replace(parameters=parameters)
    if inspect.isclass(thing):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    text = _QUOTES.sub(r"\1\3", f"{name}{signature}")
    if len(text) <= 100:
        return _short_names(text)
    lines = [str(parameter) for parameter in parameters]
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        lines.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    end = str(signature.replace(parameters=[])).removeprefix("()")
    return _short_names(_QUOTES.sub(r"\1\3", "\n".join([f"{name}(", *(f"    {line}," for line in lines), f"){end}"])))


def _short_names(text: str) -> str:
    """Class names without the modules that hold them; defaults without addresses."""
    text = re.sub(r"<function .+? at 0x[0-9a-f]+>|<factory>", "...", text)
    text = re.sub(r"<(?:function|class|built-in function) '?([\w.]+)'?.*?>", r"\1", text)
    return re.sub(r"\b(?:hookscope|collections|torch|pathlib|typing|PIL|numpy)(?:\.[a-z_]\w*)*\.(?=[A-Za-z])", "", text)


def _markdown(docstring: str) -> str:
    """A docstring in Google's form as Markdown: arguments as lists, examples as fenced blocks."""
    text, section, lines = [], "", docstring.splitlines()
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in lines:
        heading = _SECTION.match(line)
        if heading:
            section = heading[1]
            blocks.append((section, []))
        elif section and line and not line.startswith(" "):
            section = ""
            blocks.append(("", [line]))
        else:
            blocks[-1][1].append(line)
    for section, content in blocks:
        body = inspect.cleandoc("\n".join(content)) if section else "\n".join(content).strip("\n")
        if not body.strip():
            continue
        if section.startswith("Example"):
            text.append(_example(body))
        elif section in ("Args", "Attributes", "Raises"):
            text.append(f"{ {'Args': 'Arguments'}.get(section, section) }:\n\n{_list(body)}")
        elif section:
            text.append(f"{section}: {' '.join(body.split())}")
        else:
            text.append(_prose(body))
    return "\n\n".join(text)


def _prose(body: str) -> str:
    """Paragraphs; an indented one, and what follows ``::``, is a block of code."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", body):
        if paragraph.startswith("    "):
            paragraphs.append(f"```text\n{inspect.cleandoc(paragraph)}\n```")
        else:
            paragraphs.append(re.sub(r"::$", ":", paragraph))
    return "\n\n".join(paragraphs)


def _example(body: str) -> str:
    return f"```pycon\n{body}\n```" if ">>>" in body else _prose(body)


def _list(body: str) -> str:
    entries = re.split(r"\n(?=\S)", body)
    lines = []
    for entry in entries:
        name, _, meaning = " ".join(entry.split()).partition(": ")
        lines.append(f"- `{name}`: {meaning}" if meaning else f"- {name}")
    return "\n".join(lines)


def _interventions(_: str) -> str:
    """Each word of ``--at`` with its class, its own parameters and its summary."""
    lines = ["| word | class | parameters | what it does |", "| --- | --- | --- | --- |"]
    common = {field.name for field in dataclasses.fields(hookscope.interventions.Zero)}
    for word, kind in sorted(hookscope.interventions.WORDS.items()):
        parameters = [
            _parameter(field, kind.one_pass) for field in dataclasses.fields(kind) if field.name not in common
        ]
        link = f"[`{kind.__name__}`](../python-api.md#{kind.__name__.lower()})"
        lines.append(f"| `{word}` | {link} | {_codes(parameters)} | {kind.summary} |")
    return "\n".join(lines)


def _parameter(field: dataclasses.Field[Any], defaults: Mapping[str, Any]) -> str:
    if field.metadata.get("from_file"):
        return "from"
    default = defaults.get(field.name, field.default)
    if default is dataclasses.MISSING or default is None:
        return field.name
    return f"{field.name}={default}".replace("False", "false").replace("True", "true")


def _codes(words: list[str]) -> str:
    return " ".join(f"`{word}`" for word in words) or "–"


def _questions() -> Iterator[str]:
    for question, names in REPORT_ORDER.items():
        links = ", ".join(f"[`{name}`](#{name})" for name in names)
        yield f"| {_QUESTIONS[question]} | {links} |"


def _findings(_: str) -> str:
    """Every kind of finding with its meaning, its advice, and its thresholds."""
    sections = ["\n".join(["| findings of | the most severe first |", "| --- | --- |", *_questions()])]
    for kind in CATALOGUE.values():
        parts = [f"### {kind.name}", f"{kind.text()} [中文](../zh-CN/findings.md#{kind.name})"]
        cases = [f"- {case}: {kind.text(case)}" for case in kind.cases]
        parts += ["\n".join(cases)] if cases else []
        thresholds = [
            f"| {_codes([threshold.option] if threshold.option else [])} | `{threshold.name}` | {threshold.default:g} "
            f"| {threshold.source} |"
            for threshold in kind.thresholds
        ]
        if thresholds:
            head = ["| --threshold | field | default | source |", "| --- | --- | --- | --- |"]
            parts.append("\n".join([*head, *thresholds]))
        sections.append("\n\n".join(parts))
    return "\n\n".join(sections)


def _chinese_findings(_: str) -> str:
    """Every kind of finding in Chinese, beside the words that the command line prints."""
    texts = CHINESE["findings"]
    lines = ["| 对象和命令 | 诊断名，最严重的在前 |", "| --- | --- |"]
    for question, names in REPORT_ORDER.items():
        links = "、".join(f"[`{name}`](#{name}) {texts[name]['name']}" for name in names)
        lines.append(f"| {CHINESE['questions'][question]} | {links} |")
    sections = ["\n".join(lines)]
    for kind in CATALOGUE.values():
        rows = ["| 一般级别 | 含义 | 怎么办 | 程序输出的原文 |", "| --- | --- | --- | --- |"]
        for case in ["", *kind.cases]:
            text = texts[kind.name] | texts[kind.name].get("cases", {}).get(case, {})
            with spelling_for_shell():
                words = [
                    f"`{kind.severity_of(case)}`",
                    text["meaning"],
                    text["advice"],
                    kind.text(case).replace("|", "\\|"),
                ]
            rows.append(f"| {' | '.join(words)} |")
        name = f"**{texts[kind.name]['name']}**（[英文与阈值](../concepts/findings.md#{kind.name})）"
        sections.append("\n\n".join([f"### {kind.name}", name, "\n".join(rows)]))
    return "\n\n".join(sections)


_SECTIONS: dict[str, Callable[[str], str]] = {
    "help": _help,
    "reference": _reference,
    "commands": _commands,
    "tasks": _tasks,
    "fields": _fields,
    "api": _api,
    "results": _results,
    "interventions": _interventions,
    "findings": _findings,
    "findings-zh-CN": _chinese_findings,
}
