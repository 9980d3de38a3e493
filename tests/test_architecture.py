"""The house plan of docs/architecture.md, checked from the imports: which package knows which, what an import costs."""

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "hookscope"
# A package imports only from the rows above its own.
ROWS = [
    "errors _version",
    "columns",
    "display",
    "findings",
    "system",
    "hooks images",
    "models",
    "geometry jobs",
    "drawing scores",
    "attention gradients interventions parameters statistics",
    "comparison exemplars explain extraction tracing training",
    "faithfulness inspection planning structure verification",
    "report",
    "__init__",
    "cli",
    "__main__",
]
ROW = {package: number for number, row in enumerate(ROWS) for package in row.split()}
FILES = sorted(HOUSE.rglob("*.py"))
LIBRARY = [path for path in FILES if ROW.get(path.relative_to(HOUSE).parts[0], 0) < ROW["cli"]]
HEAVY = {"torch", "torchvision", "matplotlib"}


def package(path: Path) -> str:
    return path.relative_to(HOUSE).with_suffix("").parts[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Every module that ``nodes`` import, ``from a import b`` as ``a.b``; relative imports as ``.a``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def when_imported(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: no function bodies, nothing for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from when_imported(child)


def calls(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def named(path: Path) -> str:
    return path.relative_to(HOUSE).as_posix()


def forbidden(path: Path) -> Iterator[str]:
    """The imports of a file that break the house plan."""
    here = package(path)
    for module in imports(ast.walk(tree(path))):
        root, *parts = module.split(".")
        if module.startswith("."):
            yield f"{named(path)}: relative import of {module}"
        if root == "hookscope" and parts and parts[0] in ROW and here in ROW and parts[0] != here:
            if ROW[parts[0]] >= ROW[here]:
                yield f"{named(path)}: {module} is not above"
            if len(parts) > 2 and (HOUSE / parts[0] / "__init__.pyi").exists():
                yield f"{named(path)}: {module} is inside {parts[0]}: import it from the face"


def test_a_package_imports_from_the_rows_above_and_through_faces() -> None:
    assert [line for path in FILES for line in forbidden(path)] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    modules = {".".join(("hookscope", *path.relative_to(HOUSE).with_suffix("").parts)): path for path in FILES}
    graph = {
        module: {
            imported
            for name in imports(ast.walk(tree(path)))
            for imported in (name, name.rpartition(".")[0])
            if imported in modules and imported != module
        }
        for module, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_the_library_neither_prints_nor_knows_click() -> None:
    assert [named(path) for path in LIBRARY if "print" in calls(path)] == []
    modules = {path: {module.split(".")[0] for module in imports(ast.walk(tree(path)))} for path in LIBRARY}
    assert [named(path) for path, names in modules.items() if "click" in names] == []


def registers_hooks(path: Path) -> bool:
    used = [node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)]
    return any(name.startswith("register_") and name.endswith("hook") for name in used)


def test_one_file_registers_hooks() -> None:
    assert [named(path) for path in FILES if registers_hooks(path)] == ["hooks/registration.py"]


# Parts of other packages that --help, completion, a misspelt name or a repeated list-layers load.
LIGHT_FILES = [
    "drawing/panels.py",
    "drawing/scale.py",
    "explain/saliency_settings.py",
    "comparison/facts.py",
    "comparison/similarities.py",
    "exemplars/facts.py",
    "extraction/facts.py",
    "hooks/calls.py",
    "hooks/selection.py",
    "scores/target.py",
    "parameters/findings.py",
    "statistics/drifts.py",
    "statistics/facts.py",
    "statistics/findings.py",
    "structure/tree.py",
    "structure/graph.py",
    "structure/picture.py",
    "models/choices.py",
    "models/metadata.py",
    "models/model_source.py",
    "models/names.py",
    "models/sources.py",
    "tracing/cached_summary.py",
    "tracing/facts.py",
    "training/sinks.py",
]
LIGHT_PACKAGES = (
    "errors",
    "_version",
    "columns",
    "display",
    "findings",
    "images",
    "system",
    "cli",
    "__init__",
    "__main__",
)
LIGHT = [path for path in FILES if package(path) in LIGHT_PACKAGES or named(path) in LIGHT_FILES]


def test_the_list_of_light_files_names_files() -> None:
    assert set(LIGHT_FILES) <= {named(path) for path in FILES}


def test_light_files_import_nothing_heavy() -> None:  # tests/cli/test_without_torch.py runs them
    modules = {path: {module.split(".")[0] for module in imports(when_imported(tree(path)))} for path in LIGHT}
    assert [named(path) for path, names in modules.items() if HEAVY & names] == []


def test_the_checks_see_what_they_forbid() -> None:
    late = "def f():\n    from hookscope import cli\nif TYPE_CHECKING:\n    import click"
    parsed = ast.parse(f"import torch.nn\nfrom .a import b\n{late}")
    assert sorted(imports(ast.walk(parsed))) == [".a.b", "click", "hookscope.cli", "torch.nn"]
    assert sorted(imports(when_imported(parsed))) == [".a.b", "torch.nn"]
