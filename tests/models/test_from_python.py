"""Models that a function in a package or in a file builds."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from hookscope.errors import ModelError, WeightsError, is_out_of_memory
from hookscope.models.load import load_model
from hookscope.tracing.cached_summary import listing

NET = """
from __future__ import annotations
import sys
from dataclasses import dataclass
import torch
from torch import nn
from blocks_beside import block

@dataclass
class Plan:
    width: int = 4

def make(width=Plan().width):
    return nn.Sequential(block(3, width), nn.ReLU(inplace=True)).train()

def grey():
    return nn.Sequential(nn.Conv2d(1, 2, 3))

class Whole(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 2, 1))

ready = nn.Sequential(nn.Conv2d(3, 2, 1))
def number(): return 3
def fails(): raise ValueError("no width\\nat all")
def leaves(): sys.exit(4)
def needs(width): return None
def full(): raise MemoryError
def gpu_full(): raise torch.OutOfMemoryError
def ends(): raise SystemExit(143)  # SIGTERM
class Full(nn.Module):
    def forward(self, x): raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
class FullPlan: ...
class FullWidth(nn.Module):
    def __init__(self, width): ...
full_width = 3
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "blocks_beside.py").write_text("from torch import nn\ndef block(i, o): return nn.Conv2d(i, o, 3)\n")
    yield str(tmp_path / "net.py")
    for name in [name for name in sys.modules if name.startswith(("blocks_beside", "_hookscope_", "own_package"))]:
        del sys.modules[name]


@pytest.mark.parametrize("factory", ["make", "Whole", "ready", "grey"])
def test_a_factory_in_a_file(net: str, factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = list(sys.path)
    loaded = load_model(f"{net}:{factory}")
    assert isinstance(loaded.model, nn.Sequential)
    assert (loaded.name, loaded.weights, loaded.categories) == (f"{net}:{factory}", "from factory (seed 0)", None)
    assert not loaded.model.training and not loaded.model[0].training
    assert loaded.preprocess.channels == (1 if factory == "grey" else 3)
    assert sys.path == path


def test_a_factory_is_seeded_and_the_global_random_state_stays(net: str) -> None:
    state = torch.get_rng_state()
    one, same, other = (load_model(f"{net}:make", seed=seed).model[0].weight for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_factory_in_a_package_of_the_current_folder(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text("from torch import nn\ndef make(): return nn.Conv2d(3, 7, 1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    assert load_model("own_package.nets:make").model.out_channels == 7


def test_two_files_of_one_name_are_two_modules(net: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "net.py"
    other.write_text("from torch import nn\ndef make(): return nn.Conv2d(3, 9, 1).double()\n")
    assert load_model(f"{net}:make").model[0].out_channels == 4
    loaded = load_model(f"{other}:make")
    assert loaded.model.out_channels == 9
    assert loaded.preprocess(Image.new("RGB", (300, 300))).dtype == torch.float64


def test_a_file_named_as_an_installed_module_does_not_replace_it(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("from torch import nn\ndef make(): return nn.Conv2d(3, 9, 1)\n")
    assert load_model(f"{tmp_path}/json.py:make").model.out_channels == 9
    import json

    assert json.dumps([1]) == "[1]"


REFUSED = {
    "{net}:mak": "no 'mak' in {net}; nearest: make",
    "{net}:ful": "no 'ful' in {net}; nearest: full, gpu_full, fails",
    "{net}:number": "{net}:number returned int; return an nn.Module",
    "{net}:fails": "{net}:fails failed: ValueError: no width at all, at {net}:25 in fails; --traceback shows all",
    "{net}:leaves": "{net}:leaves failed: SystemExit: 4, at {net}:26 in leaves; --traceback shows all",
    "{net}:needs": "{net}:needs failed: TypeError: needs() missing 1 required positional argument: 'width'",
    "{net}s.py:make": "no file '{net}s.py' for {net}s.py:make; nearest: net.py",
    "{syntax}:make": "cannot import {syntax} for {syntax}:make: SyntaxError: '(' was never closed (syntax.py, line 1)",
    "{leaves}:make": "cannot import {leaves} for {leaves}:make: SystemExit, at {leaves}:1 in <module>; "
    "--traceback shows all",
    "no_such_x:make": "cannot import no_such_x for no_such_x:make: ModuleNotFoundError: No module named 'no_such_x'",
}


@pytest.mark.parametrize("model", REFUSED)
def test_a_text_that_gives_no_model_is_refused_in_one_line(net: str, tmp_path: Path, model: str) -> None:
    paths = {"net": net, "syntax": f"{tmp_path}/bad/syntax.py", "leaves": f"{tmp_path}/bad/leaves.py"}
    (tmp_path / "bad").mkdir()
    Path(paths["syntax"]).write_text("def make(")
    Path(paths["leaves"]).write_text("import sys; sys.exit()")
    with pytest.raises(ModelError) as caught:
        load_model(model.format(**paths))
    assert str(caught.value) == REFUSED[model].format(**paths)


@pytest.mark.parametrize("factory", ["full", "gpu_full", "Full"])
def test_a_full_memory_is_no_fault_of_the_factory_or_the_picture(net: str, factory: str) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        listing(f"{net}:{factory}")
    assert is_out_of_memory(caught.value)


def test_torchvisions_builder_may_run_out_of_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object, **kwargs: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("torchvision.models.get_model", build)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_model("resnet18", weights="none")


def test_a_signal_that_ends_a_factory_ends_the_command(net: str) -> None:
    with pytest.raises(SystemExit):
        load_model(f"{net}:ends")


def test_a_checkpoint_for_a_factory(net: str, tmp_path: Path) -> None:
    state = {"0.weight": torch.rand(4, 3, 3, 3), "0.bias": torch.full((4,), float("nan"))}
    path = str(tmp_path / "own.pth")
    torch.save({"state_dict": state}, path)
    loaded = load_model(f"{net}:make", weights=path)
    assert torch.equal(loaded.model[0].weight, state["0.weight"])
    assert (loaded.weights, loaded.notes) == ("own.pth", (f"{path} holds 4 values that are NaN or infinite",))
    with pytest.raises(WeightsError, match=r"does not fit .*:grey; 0 of 2 keys match"):
        load_model(f"{net}:grey", weights=path)


def test_the_family_of_a_factory_is_that_of_its_class(tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text("from torchvision.models.video import mc3_18\ndef clip(): return mc3_18()\n")
    clip = load_model(f"{tmp_path}/family.py:clip")
    assert (clip.family, clip.preprocess(Image.new("RGB", (50, 40))).shape) == ("video", (3, 16, 112, 112))


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_without_timm_it_says_so() -> None:
    with pytest.raises(ModelError, match="timm:resnet18 needs the package timm; pip install timm"):
        load_model("timm:resnet18")


def test_a_model_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the names of timm that are used."""
    timm = types.ModuleType("timm")
    timm.is_model = lambda name: name == "tiny"
    timm.list_models = lambda: ["tiny", "large"]

    def create_model(name: str, pretrained: bool) -> nn.Module:
        if pretrained:
            raise OSError("no network\nmore words")
        model = nn.Conv2d(3, 4, 1)
        model.pretrained_cfg = {"input_size": (3, 96, 96), "crop_pct": 0.75, "mean": (0.5,) * 3, "std": (0.25,) * 3}
        return model

    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    net = load_model("timm:tiny", seed=2)
    assert net.weights == "random (seed 2)"
    assert net.notes == ("weights of timm:tiny are random (seed 2): no network",)
    assert net.preprocess.describe() == "resize 128 bicubic, crop 96, mean 0.5, std 0.25"
    with pytest.raises(ModelError, match="no timm model 'tinny'; nearest: tiny"):
        load_model("timm:tinny")
