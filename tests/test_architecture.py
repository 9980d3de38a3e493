"""The house plan, checked from the imports: who may know whom, and what an import may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A file imports only from the lines above its own. A new file needs a place here before it passes.
TIERS = [
    "errors",
    "after_import cache categories descriptions files findings installation registry scripts shipped signatures"
    " tensors threads",
    "catalogue checkpoints deep_greys directions dry factories folders hooks images inputs kinds layers models observe"
    " preprocess torchvision_models weights",
    "activations activity colours destinations figures grids lettering levels maps pages pictures readback sheets"
    " loading accumulator batchnorm moments parameters patterns quantiles recorder saturation statistics survey tally"
    " trace filters values by_call captured_gradients gradient_hooks targets scores losses cam_methods crops overlays"
    " saliency_methods subjects array_file tensor_facts",
    "cam cam_layers cam_passes gradients health interventions junit limits listing monitor saved_statistics"
    " stats_figure tensorboard"
    " verification visualize checks differences node_by_node untouched witness kernels weight_findings weights_figure"
    " differentiable saliency prediction gradient_report gradient_sizes"
    " gradient_stops gradient_findings gradient_changes"
    " gradient_figure anomaly flow cam_pages saliency_page events effects effect_maps effect_pages ablation"
    " ablation_passes ablation_copies"
    " runs",
    "cli",
    "__init__ __main__",
]
# Within a line only these.
NEIGHBOURS = {
    "folders": {"images"},
    "images": {"deep_greys"},
    "installation": {"registry"},
    "registry": {"shipped"},
    "scripts": {"findings"},
    "directions": {"preprocess"},
    "factories": {"checkpoints", "preprocess"},
    "torchvision_models": {"checkpoints", "directions", "dry", "factories", "inputs", "preprocess", "weights"},
    "models": {"factories", "images", "inputs", "preprocess", "torchvision_models", "weights"},
    "observe": {"hooks", "kinds", "layers"},
    "scores": {"targets"},
    "losses": {"scores", "targets"},
    "activations": {"by_call", "captured_gradients"},
    "captured_gradients": {"by_call"},
    "gradient_hooks": {"activations"},
    "differentiable": {"untouched"},
    "prediction": {"visualize"},
    "saliency": {"differentiable"},
    "lettering": {"colours"},
    "levels": {"colours"},
    "activity": {"levels", "maps"},
    "grids": {"colours", "lettering", "levels", "maps"},
    "pages": {"colours", "lettering"},
    "sheets": {"activity", "colours", "grids", "lettering", "levels", "pages"},
    "readback": {"colours", "pictures"},
    "accumulator": {"moments", "patterns", "quantiles", "saturation", "statistics"},
    "batchnorm": {"maps", "moments"},
    "patterns": {"moments"},
    "tally": {"accumulator", "batchnorm", "statistics"},
    "survey": {"accumulator", "batchnorm", "maps", "moments", "patterns", "saturation", "tally"},
    "statistics": {"moments", "quantiles"},
    "trace": {"recorder"},
    "health": {"limits"},
    "junit": {"limits"},
    "checks": {"differences"},
    "untouched": {"differences"},
    "verification": {"checks", "differences", "node_by_node", "untouched", "witness"},
    "witness": {"node_by_node", "untouched"},
    "cam": {"cam_layers", "cam_passes", "differentiable"},
    "cam_passes": {"cam_layers"},
    "cam_pages": {"cam"},
    "saliency_page": {"saliency"},
    "effects": {"interventions", "untouched"},
    "effect_maps": {"effects"},
    "effect_pages": {"effect_maps", "effects"},
    "ablation": {"ablation_passes", "cam_passes"},
    "ablation_passes": {"ablation_copies", "differentiable", "untouched"},
    "ablation_copies": {"differentiable", "untouched"},
    "monitor": {"runs", "tensorboard"},
    "overlays": {"colours", "lettering"},
    "subjects": {"scores", "sheets"},
    "array_file": {"destinations"},
    "gradient_report": {"gradient_sizes"},
    "gradients": {"differentiable", "flow", "gradient_changes", "gradient_report", "gradient_sizes", "gradient_stops"},
    "gradient_stops": {"differentiable", "flow"},
    "gradient_findings": {"anomaly", "gradient_report", "gradient_sizes", "gradient_stops", "gradients"},
    "gradient_figure": {"gradient_findings", "gradient_report", "gradient_sizes", "gradients"},
    "anomaly": {"differentiable", "flow"},
    "events": {"differentiable", "flow"},
    "filters": {"maps"},
    "parameters": {"filters", "maps", "values"},
    "figures": {"colours"},
    "weights_figure": {"weight_findings"},
}
TIER = {room: height for height, line in enumerate(TIERS) for room in line.split()}
FILES = sorted((ROOT / "hookscope").rglob("*.py"))
LIBRARY = [path for path in FILES if path.parent.name != "cli" and path.name != "__main__.py"]
HEAVY = {"torch", "torchvision", "matplotlib"}


def room(path: Path) -> str:
    return path.relative_to(ROOT / "hookscope").with_suffix("").parts[0]


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
    return path.relative_to(ROOT / "hookscope").as_posix()


@pytest.mark.parametrize("path", FILES, ids=named)
def test_imports_only_from_the_tiers_above(path: Path) -> None:
    here = room(path)
    assert here in TIER, f"{path.name} has no tier yet: give it one in {Path(__file__).name}"
    for module in imports(ast.walk(tree(path))):
        assert not module.startswith("."), f"relative import of {module}"
        package, *parts = module.split(".")
        if package == "hookscope" and parts and parts[0] in TIER and parts[0] != here:
            assert TIER[parts[0]] < TIER[here] or parts[0] in NEIGHBOURS.get(here, set()), module


@pytest.mark.parametrize("path", LIBRARY, ids=named)
def test_the_library_neither_prints_nor_knows_click(path: Path) -> None:
    assert "print" not in set(calls(path))
    assert "click" not in {module.split(".")[0] for module in imports(ast.walk(tree(path)))}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_only_hooks_registers_hooks(path: Path) -> None:
    used = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    hooks = {name for name in used if name.startswith("register_") and name.endswith("hook")}
    assert bool(hooks) == (path.name == "hooks.py"), hooks


@pytest.mark.parametrize("path", FILES, ids=named)
def test_only_models_and_catalogue_know_torchvisions_models(path: Path) -> None:
    users = [module for module in imports(ast.walk(tree(path))) if module.startswith("torchvision.models")]
    if path.name == "node_by_node.py":  # a tool for any model, which torchvision keeps there
        users.remove("torchvision.models.feature_extraction")
    assert not users or path.name in ("torchvision_models.py", "catalogue.py"), users


LIGHT_ROOMS = {*TIERS[0].split(), *TIERS[1].split(), "catalogue", "images", "pictures", "cli", "__init__", "__main__"}
LIGHT = [path for path in FILES if room(path) in LIGHT_ROOMS]


@pytest.mark.parametrize("path", LIGHT, ids=named)
def test_light_files_import_nothing_heavy(path: Path) -> None:
    assert not HEAVY & {module.split(".")[0] for module in imports(when_imported(tree(path)))}


@pytest.mark.parametrize("module", ["hookscope", "hookscope.cli.main", "hookscope.cli.list_models"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(sorted({HEAVY!r} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True)
    assert answer.stdout == "[]\n"


def test_the_checks_see_what_they_forbid() -> None:
    late = "def f():\n    from hookscope import cli\nif TYPE_CHECKING:\n    import click"
    parsed = ast.parse(f"import torch.nn\nfrom .a import b\n{late}")
    assert sorted(imports(ast.walk(parsed))) == [".a.b", "click", "hookscope.cli", "torch.nn"]
    assert sorted(imports(when_imported(parsed))) == [".a.b", "torch.nn"]
