"""Models that a function in a package or in a file builds."""

import sys
import types
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from hookscope.errors import ModelError, UsageError, WeightsError, is_out_of_memory
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
    made = "from factory (seed 0): untrained unless it loads its own"  # a module is made only once
    assert loaded.weights == (made if factory == "ready" else "random (seed 0)")
    assert (loaded.name, loaded.categories) == (f"{net}:{factory}", None)
    assert not loaded.model.training and not loaded.model[0].training
    assert loaded.preprocess.channels == (1 if factory == "grey" else 3)
    assert sys.path == path


def test_a_factory_is_seeded_and_the_global_random_state_stays(net: str) -> None:
    state = torch.get_rng_state()
    one, same, other = (load_model(f"{net}:make", seed=seed).model[0].weight for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


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


ARGUMENTS = """
from torch import nn
from torch.nn import ReLU
from torchvision.models import resnet18
from torchvision.transforms import Resize

resize = Resize(8)
loss = nn.CrossEntropyLoss()
class Block(nn.Module):
    def __init__(self, width: int, name: str, *, act=True): super().__init__()
def make(width=2, names=(), **options):
    net = nn.Sequential(nn.Conv2d(3, width, 1))
    net.said = (names, options)
    return net
def main(): return Block(1, "")
def train() -> None: raise ValueError
"""


@pytest.fixture
def arguments(tmp_path: Path) -> str:
    (tmp_path / "arguments.py").write_text(ARGUMENTS)
    return str(tmp_path / "arguments.py")


@pytest.mark.parametrize(
    ("words", "width", "said"),
    [
        ("(width=5)", 5, ((), {})),
        ("(3)", 3, ((), {})),
        ("()", 2, ((), {})),
        (
            "(2, ['a:b', \"c(/d)\"], deep={'x': (1, None)}, y=-1.5)",
            2,
            (["a:b", "c(/d)"], {"deep": {"x": (1, None)}, "y": -1.5}),
        ),
        ("(\n  width = 4,\n)", 4, ((), {})),
    ],
)
def test_a_factory_with_arguments(arguments: str, words: str, width: int, said: object) -> None:
    loaded = load_model(f"{arguments}:make{words}")
    assert loaded.name == f"{arguments}:make{words}"
    assert (loaded.model[0].out_channels, loaded.model.said) == (width, said)


NO_LITERALS = [
    "(width=w)",
    "(__import__('os').mkdir('x'))",
    "(*[1])",
    "(**{'width': 1})",
    "(1)(2)",
    "(1, 1 for _ in ())",
    "(a=1, a=2)",
]
NO_LITERALS += ["(2 ** 9)", "(f'{1}')", "(lambda: 1)", "(" + "[" * 300 + "]" * 300 + ")", "(\0)"]


@pytest.mark.parametrize("words", NO_LITERALS)
def test_arguments_are_literals_and_run_no_code(arguments: str, words: str) -> None:
    with pytest.raises(UsageError, match=r"cannot read the arguments of .*; give literals: numbers, 'text', True, "):
        load_model(f"{arguments}:make{words}")


@pytest.mark.parametrize("words", ["(2", "2)", "(2))(", ""])
def test_a_factory_that_cannot_be_read(arguments: str, words: str) -> None:
    with pytest.raises((UsageError, ModelError)) as caught:
        load_model(f"{arguments}:{'make' if words else ''}{words}")
    assert "\n" not in str(caught.value)


def test_a_file_alone_is_its_only_factory(arguments: str) -> None:
    loaded, named = load_model(arguments), load_model(f"{arguments}:make")
    assert loaded.name == f"{arguments}:make"
    assert loaded.notes == (f"{arguments} has one factory: {arguments}:make is taken",)
    assert torch.equal(loaded.model[0].weight, named.model[0].weight)


ALONE = {
    "x = 3": "no factory in {file}; write a function or class that makes an nn.Module",
    "class A(nn.Module): pass\ndef b(): pass\nclass C(nn.Module):\n def __init__(self, n): pass": (
        "{file} has 2 factories; they are A, b; with arguments C; write {file}:A"
    ),
    "class A(nn.Module):\n def __init__(self, n: 'int', *, kind: str, m=3): pass": (
        "{file}:A: missing a required argument: 'n'; it is A(n: 'int', *, kind: str, m=3); "
        "write \"{file}:A(n=8, kind='name')\""
    ),
    "def make(width, depth=2): pass": "{file}:make: missing a required argument: 'width'; it is make(width, depth=2); "
    'write "{file}:make(width=8)"',
    "from torchvision.models import resnet18, alexnet": "{file} has 2 factories; they are resnet18, "
    "alexnet; write {file}:resnet18",
    "from torch.nn import ReLU, Linear, Tanh": "{file} has 2 factories; they are ReLU, Tanh; write {file}:ReLU",
}


@pytest.mark.parametrize("lines", ALONE)
def test_a_file_alone_with_no_or_several_factories_is_refused(tmp_path: Path, lines: str) -> None:
    file = tmp_path / "alone.py"
    file.write_text(f"from torch import nn\n{lines}\n")
    with pytest.raises(ModelError) as caught:
        load_model(str(file))
    assert str(caught.value) == ALONE[lines].format(file=file)


def test_an_imported_factory_is_taken_where_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "imported.py").write_text("from torchvision.models import squeezenet1_1\n")
    assert type(load_model(f"{tmp_path}/imported.py").model).__name__ == "SqueezeNet"


def test_a_package_of_the_current_folder_with_and_without_a_factory(
    net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text("from torch import nn\ndef make(): return nn.Conv2d(3, 7, 1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    assert load_model("own_package.nets:make").model.out_channels == 7
    loaded = load_model("own_package.nets")
    assert (loaded.name, loaded.model.out_channels) == ("own_package.nets:make", 7)
    with pytest.raises(ModelError, match=r"No module named 'own_package\.make'; write own_package:make"):
        load_model("own_package.make")
    with pytest.raises(ModelError, match=r"no model 'resnet18\.x'; nearest: "):
        load_model("resnet18.x")
    (tmp_path / "arguments.py").write_text("")
    with pytest.raises(ModelError, match=r"no model 'arguments'; write arguments\.py"):
        load_model("arguments")


def test_the_class_names_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "labels.py").write_text(
        "import types\nfrom torch import nn\ndef make(names=('cat', 'dog')):\n    net = nn.Conv2d(3, 2, 1)\n"
        "    net.config = types.SimpleNamespace(id2label=dict(enumerate(names)))\n    return net\n"
    )
    assert load_model(f"{tmp_path}/labels.py").categories == ("cat", "dog")
    assert load_model(f"{tmp_path}/labels.py:make(('LABEL_0', 'LABEL_1'))").categories is None


REFUSED = {
    "{net}:make(wide=3)": "{net}:make(wide=3): got an unexpected keyword argument 'wide'; it is make(width=4)",
    "{net}:ready(3)": "{net}:ready(3): ready is a module already; write {net}:ready",
    "{net}:full_width": "{net}:full_width is not a factory but int; name a function or class",
    "{net}:mak": "no 'mak' in {net}; nearest: make",
    "{net}:ful": "no 'ful' in {net}; nearest: full, gpu_full, fails",
    "{net}:number": "{net}:number returned int; return an nn.Module",
    "{net}:fails": "{net}:fails failed: ValueError: no width at all, at {net}:25 in fails; its cause shows all",
    "{net}:leaves": "{net}:leaves failed: SystemExit: 4, at {net}:26 in leaves; its cause shows all",
    "{net}:needs": "{net}:needs: missing a required argument: 'width'; it is needs(width); "
    'write "{net}:needs(width=8)"',
    "{net}s.py:make": "no file '{net}s.py' for {net}s.py:make; nearest: net.py",
    "{syntax}:make": "cannot import {syntax} for {syntax}:make: SyntaxError: '(' was never closed (syntax.py, line 1)",
    "{leaves}:make": "cannot import {leaves} for {leaves}:make: SystemExit, at {leaves}:1 in <module>; "
    "its cause shows all",
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
    with pytest.raises(SystemExit):  # by a signal
        load_model(f"{net}:ends")


def test_torchvisions_builder_may_run_out_of_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object, **kwargs: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("torchvision.models.get_model", build)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_model("resnet18", weights="none")


def test_a_checkpoint_for_a_factory(net: str, tmp_path: Path) -> None:
    state = {"0.weight": torch.rand(4, 3, 3, 3), "0.bias": torch.full((4,), float("nan"))}
    path = str(tmp_path / "own.pth")
    torch.save({"state_dict": state}, path)
    loaded = load_model(f"{net}:make", weights=path)
    assert torch.equal(loaded.model[0].weight, state["0.weight"])
    assert (loaded.weights, loaded.notes) == ("own.pth", (f"{path} holds 4 values that are NaN or infinite",))
    with pytest.raises(WeightsError, match=r"does not fit .*:grey; 0 of 2 keys of the model match"):
        load_model(f"{net}:grey", weights=path)


def test_the_family_of_a_factory_is_that_of_its_class(tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text("from torchvision.models.video import mc3_18\ndef clip(): return mc3_18()\n")
    clip = load_model(f"{tmp_path}/family.py:clip")
    assert (clip.family, clip.preprocess(Image.new("RGB", (50, 40))).shape) == ("video", (3, 16, 112, 112))


def test_a_model_of_timm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in with the names of timm that are used."""
    timm = types.ModuleType("timm")
    timm.is_model = lambda name: name == "tiny"
    timm.list_models = lambda: ["tiny", "large"]

    def create_model(name: str, pretrained: bool, num_classes: int = 4) -> nn.Module:
        if pretrained:
            raise OSError("no network\nmore words")
        model = nn.Conv2d(3, num_classes, 1)
        model.pretrained_cfg = {"input_size": (3, 96, 96), "crop_pct": 0.75, "mean": (0.5,) * 3, "std": (0.25,) * 3}
        return model

    timm.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", timm)
    net = load_model("timm:tiny", seed=2)
    assert net.weights == "random (seed 2)"
    assert net.notes == ("weights of timm:tiny are random (seed 2): no network",)
    assert net.preprocess.describe() == "resize 128 bicubic, crop 96, mean 0.5, std 0.25"
    with pytest.raises(WeightsError, match="no weights for timm:tiny: no network; use weights='none'"):
        load_model("timm:tiny", weights="default")
    tuned = nn.Conv2d(3, 7, 1)
    torch.save({f"module.{key}": value for key, value in tuned.state_dict().items()}, tmp_path / "tuned.pth")
    assert torch.equal(load_model("timm:tiny", weights=f"{tmp_path}/tuned.pth").model.weight, tuned.weight)
    with pytest.raises(ModelError, match="no timm model 'tinny'; nearest: tiny"):
        load_model("timm:tinny")


ORIGINS = """
import torch
from torch import nn
def own():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    net.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    return net
def new_head(): return nn.Sequential(*own()[:2], nn.Conv2d(4, 2, 1))
def constant(): return nn.Sequential(nn.BatchNorm2d(3))
kept = nn.Conv2d(3, 4, 3)
def same_object(): return kept
calls = []
def once():
    calls.append(1)
    if len(calls) > 1: raise RuntimeError("once")
    return nn.Conv2d(3, 4, 3)
"""
UNKNOWN = "from factory (seed 5): untrained unless it loads its own"


@pytest.mark.parametrize(
    ("factory", "label"),
    [
        ("own", "from factory: the same for every seed"),
        ("new_head", "from factory: 2 of 4 tensors are random (seed 5)"),
        ("constant", UNKNOWN),
        ("same_object", UNKNOWN),
        ("once", UNKNOWN),
    ],
)
def test_what_a_factory_loads_is_told_by_a_build_from_another_seed(tmp_path: Path, factory: str, label: str) -> None:
    weights = tmp_path / "own.pth"
    torch.save(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).state_dict(), weights)
    (tmp_path / "origins.py").write_text(ORIGINS.replace("WEIGHTS", repr(str(weights))))
    before = torch.get_rng_state()
    assert load_model(f"{tmp_path}/origins.py:{factory}", seed=5).weights == label
    assert torch.equal(torch.get_rng_state(), before)
