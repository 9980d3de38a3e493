"""MODEL and weights to a model that is ready to run, and the inputs of its family."""

import sys
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision import models as zoo
from torchvision.models.segmentation import FCN
from torchvision.transforms.functional import pil_to_tensor, to_tensor

import hookscope
from hookscope.errors import InputError, InstallationError, OutputNote, UsageError, WeightsError
from hookscope.images import InputImage
from hookscope.models.load import load_model, pick_device
from hookscope.models.loaded import (
    CLIP_FRAMES,
    LoadedModel,
    as_batch,
    check_size,
    example_inputs,
    family_of,
    in_channels,
    native_size,
)
from hookscope.models.metadata import WeightsMetadata
from hookscope.models.torchvision_builders import build_skeleton
from tests.helpers import same_values

SHAPES = tuple(f"shape {number}" for number in range(10))


@pytest.mark.parametrize(
    ("name", "seed"), [("squeezenet1_1", 0), ("squeezenet1_1", 3), ("lraspp_mobilenet_v3_large", 0)]
)
def test_random_weights_are_those_of_the_seed(name: str, seed: int) -> None:
    state = torch.get_rng_state()
    net = load_model(name, weights="none", seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        extra = {"weights_backbone": None} if "lraspp" in name else {}
        expected = zoo.get_model(name, weights=None, **extra)
    assert same_values(net.model, expected.state_dict())
    assert (net.weights, net.name) == (f"random (seed {seed})", name)
    assert not any(module.training for module in net.model.modules())


def test_preprocessing_and_class_names_belong_to_the_model() -> None:
    net = load_model("squeezenet1_1", weights=None, device="cpu")
    assert (net.family, net.device, net.notes) == ("classification", "cpu", ())
    assert net.categories is not None and len(net.categories) == 1000
    assert net.preprocess.describe() == "resize 256, crop 224, ImageNet mean and std"
    (picture,) = net.inputs(torch.zeros(3, 64, 64))
    assert net.model(picture).shape == (1, 1000)


def test_a_model_without_weights_has_its_own_size() -> None:
    assert zoo.ViT_H_14_Weights.DEFAULT.transforms().crop_size == [518]
    skeleton = build_skeleton("vit_h_14")
    assert skeleton.size == (224, 224)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())  # gigabytes otherwise
    shapes = build_skeleton("shapes").model
    assert all(parameter.is_meta for parameter in shapes.parameters())


@pytest.mark.slow
def test_a_loaded_vit_h_14_prepares_224() -> None:
    net = load_model("vit_h_14", weights="none")
    assert net.preprocess(Image.new("RGB", (300, 400))).shape == (3, 224, 224)


def test_preprocessing_and_size_are_passed_on() -> None:
    net = load_model("squeezenet1_1", weights="none", preprocess="stretch", input_size=(40, 60))
    assert net.preprocess.describe() == "stretch 40x60, range 0..1"
    assert load_model("shapes", weights="none", preprocess="stretch").preprocess.default_size == (128, 128)
    with pytest.raises(
        UsageError,
        match="no preprocessing 'crop'; there are weights, imagenet, half, stretch, none",
    ):
        load_model("squeezenet1_1", preprocess="crop")


def test_a_picture_is_prepared_in_rgb_with_and_without_its_name() -> None:
    net, picture = load_model("shapes"), Image.effect_noise((90, 70), 50)
    named = InputImage(picture.convert("RGB"), "a", "", (), (picture.convert("RGB"),))
    assert torch.equal(net.prepare(picture), net.prepare(named))
    assert net.prepare(picture).shape == (3, 128, 128)


def test_functions_and_transforms_prepare_the_pictures() -> None:
    picture = Image.effect_noise((60, 40), 80).convert("RGB")
    preset = zoo.ResNet50_Weights.IMAGENET1K_V2.transforms()
    net = load_model("squeezenet1_1", weights="none", device="cpu", preprocess=preset)
    assert torch.equal(net.preprocess(picture), preset(picture))
    assert net.preprocess.describe() == "resize 232, crop 224, ImageNet mean and std"

    def small(image: Image.Image) -> torch.Tensor:
        return pil_to_tensor(image.resize((32, 48))) / 255

    net = load_model("squeezenet1_1", weights="none", device="cpu", preprocess=small, mean=0.5, std=(0.1, 0.2, 0.4))
    divide = torch.tensor([0.1, 0.2, 0.4])[:, None, None]
    assert torch.allclose(net.preprocess(picture), (small(picture) - 0.5) / divide)
    assert net.preprocess.describe() == "preprocess small, mean 0.5, std 0.1 0.2 0.4"
    with pytest.raises(UsageError, match="preprocess small makes the whole input, so resize cannot change it"):
        load_model("squeezenet1_1", weights="none", preprocess=small, resize="pad")


def test_a_quantized_name_is_its_float_twin_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net = load_model("quantized_shufflenet_v2_x0_5", weights="none")
    assert type(net.model.conv1[0]) is nn.Conv2d
    fetched = _serve(monkeypatch, tmp_path, load_model("shufflenet_v2_x0_5", weights="none").model.state_dict())
    net = load_model("quantized_shufflenet_v2_x0_5", weights="default")
    assert net.weights == "IMAGENET1K_V1"
    assert fetched == [zoo.ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1.url]
    assert type(net.model.conv1[0]) is nn.Conv2d


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_weights_name_is_the_quantized_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no FBGEMM here")
    name = "quantized_shufflenet_v2_x0_5"
    monkeypatch.setattr(torch.backends.quantized, "engine", torch.backends.quantized.engine)
    quantized = zoo.get_model(name, weights=None, quantize=True)
    fetched = _serve(monkeypatch, tmp_path, quantized.state_dict())
    torch.backends.quantized.engine = "qnnpack"
    net = load_model(name, weights="IMAGENET1K_FBGEMM_V1")
    assert torch.backends.quantized.engine == "qnnpack"  # which the builder sets to fbgemm
    assert fetched == [zoo.quantization.ShuffleNet_V2_X0_5_QuantizedWeights.IMAGENET1K_FBGEMM_V1.url]
    assert net.weights == "IMAGENET1K_FBGEMM_V1"
    assert "quantized" in type(net.model.conv1[0]).__module__
    assert net.model(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
    again = load_model("quantized:shufflenet_v2_x0_5", weights="default")
    assert (again.weights, again.notes) == ("IMAGENET1K_FBGEMM_V1", ())


def _serve(monkeypatch: pytest.MonkeyPatch, folder: Path, state: Any) -> list[str]:
    """Let every download put ``state`` into torch's cache; return the list of addresses asked for."""
    asked: list[str] = []

    def fetch(url: str, progress: Any = None) -> Path:
        asked.append(url)
        path = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)
        return path

    monkeypatch.setenv("TORCH_HOME", str(folder))
    monkeypatch.setattr("hookscope.models.torchvision_builders.fetch", fetch)
    return asked


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("shapes", "auto"),
        ("shapes", "default"),
        ("shapes", "shapes.safetensors"),
        ("squeezenet1_1", "the bundled file"),
    ],
)
def test_shapes_has_its_bundled_weights(
    shapes_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, weights: str
) -> None:
    monkeypatch.chdir(tmp_path)
    net = load_model(model, weights=shapes_file if weights == "the bundled file" else weights, device="cpu")
    assert (net.name, net.weights, net.notes) == (model, "shapes.safetensors", ())
    assert net.categories == SHAPES
    assert net.preprocess.describe() == "resize 144, crop 128, mean 0.25 0.5 0.75, std 0.5 0.25 0.125"
    assert same_values(net.model, {key: value.float() for key, value in load_file(shapes_file).items()})


@pytest.mark.usefixtures("shapes_file")
def test_shapes_without_its_weights_is_random_and_keeps_its_classes() -> None:
    net = load_model("shapes", weights="none", seed=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        assert same_values(net.model, zoo.squeezenet1_1(num_classes=10).state_dict())
    assert (net.weights, net.notes) == ("random (seed 4)", ())
    assert net.categories == SHAPES
    assert net.preprocess.describe() == "resize 144, crop 128, mean 0.25 0.5 0.75, std 0.5 0.25 0.125"


@pytest.mark.usefixtures("shapes_file")
@pytest.mark.parametrize(("file", "classes"), [("own.pth", 10), ("own.pth", 7), ("shapes.safetensors", 10)])
def test_a_users_checkpoint_goes_before_the_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, classes: int
) -> None:
    monkeypatch.chdir(tmp_path)
    state = zoo.squeezenet1_1(num_classes=classes).state_dict()
    (torch.save if file == "own.pth" else save_file)(state, file)
    net = load_model("shapes", weights=file)
    assert same_values(net.model, state)
    assert (net.weights, net.notes) == (file, ())
    assert net.categories == (SHAPES if classes == 10 else None)  # the names are those of ten classes
    assert net.preprocess.describe() == "resize 144, crop 128, mean 0.25 0.5 0.75, std 0.5 0.25 0.125"


@pytest.mark.usefixtures("shapes_file")
def test_shapes_has_no_weights_of_torchvision() -> None:
    for weights in ("IMAGENET1K_V1", zoo.SqueezeNet1_1_Weights.DEFAULT):
        with pytest.raises(WeightsError) as caught:
            load_model("shapes", weights=weights)
        assert str(caught.value) == (
            "no weights 'IMAGENET1K_V1' for shapes; there is shapes.safetensors; give auto, default, none or a file"
        )


def test_shapes_is_never_random_because_its_file_is_damaged_or_missing(shapes_file: Path) -> None:
    shapes_file.write_bytes(shapes_file.read_bytes()[:50_000])
    with pytest.raises(WeightsError, match="damaged or incomplete"):
        load_model("shapes")
    shapes_file.unlink()
    for weights in ("auto", "default", "DEFAULT"):
        with pytest.raises(WeightsError, match=r"^the weights of shapes are missing from the installation; no shapes"):
            load_model("shapes", weights=weights)
    net = load_model("shapes", weights="none")
    assert net.notes == ("the weights of shapes are missing from the installation; so are its class names",)
    assert (net.categories, net.weights) == (None, "random (seed 0)")
    assert net.preprocess.describe() == "resize 128, crop 128, ImageNet mean and std"


def test_devices() -> None:
    have = ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
    assert pick_device("auto") == have[-1]
    assert pick_device("cpu") == "cpu"
    for wrong in ("gpu", "", "cpu:", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "CPU", "meta"):
        with pytest.raises(UsageError, match=f"no device '{wrong}'; this machine has {', '.join(have)}"):
            pick_device(wrong)


def test_devices_of_a_machine_with_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device(device) for device in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]
    with pytest.raises(UsageError, match="no device 'cuda:2'; there are 2 CUDA devices"):
        pick_device("cuda:2")


def test_a_broken_pair_of_torch_and_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("hookscope.models.torchvision_builders.importlib.import_module", broken)
    with pytest.raises(InstallationError) as caught:
        load_model("resnet18", weights="none")
    assert "\n" not in str(caught.value)


def test_no_weights_at_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hookscope.models.torchvision_builders._default_entry", lambda name: None)
    with pytest.warns(OutputNote, match=r"are random \(seed 0\): torchvision has none; its answers mean nothing$"):
        net = load_model("squeezenet1_1")
    assert (net.weights, net.notes) == (
        "random (seed 0)",
        ("weights of squeezenet1_1 are random (seed 0): torchvision has none",),
    )
    with pytest.raises(WeightsError, match="torchvision has no weights for squeezenet1_1"):
        load_model("squeezenet1_1", weights="default")


def test_a_builder_that_warns_is_quiet() -> None:
    assert load_model("googlenet", weights="none").weights == "random (seed 0)"  # warnings are errors here
    assert "timm" not in sys.modules


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="model must be a name or a module, not int"):
        load_model(cast(Any, 3))
    with pytest.raises(UsageError, match=r"not the class Conv2d; give an instance, such as Conv2d\(\)"):
        load_model(cast(Any, nn.Conv2d))
    with pytest.raises(UsageError, match="keeps the image's own size"):
        load_model("squeezenet1_1", weights="none", preprocess="none", input_size=(64, 64))


FAMILIES = {
    "resnet18": "classification",
    "lraspp_mobilenet_v3_large": "segmentation",
    "fasterrcnn_mobilenet_v3_large_fpn": "detection",
    "mvit_v1_b": "video",
    "raft_small": "optical_flow",
}


@pytest.mark.parametrize(("name", "family"), FAMILIES.items())
def test_family_and_input(name: str, family: str) -> None:
    model = build_skeleton(name).model
    assert family_of(model) == family
    inputs = example_inputs(model, (128, 136))
    expected: dict[str, list[Any]] = {
        "classification": [(1, 3, 128, 136)],
        "segmentation": [(1, 3, 128, 136)],
        "detection": [[(3, 128, 136)]],
        "video": [(1, 3, CLIP_FRAMES, 128, 136)],
        "optical_flow": [(1, 3, 128, 136)] * 2,
    }
    assert [[tuple(t.shape) for t in i] if isinstance(i, list) else tuple(i.shape) for i in inputs] == expected[family]


def test_a_subclass_is_of_its_family() -> None:
    assert family_of(type("Own", (FCN,), {})(nn.Identity(), nn.Identity())) == "segmentation"


@pytest.mark.parametrize(
    ("module", "name", "family"),
    [
        ("transformers.models.detr.modeling_detr", "DetrForObjectDetection", "batched_detection"),
        ("transformers.models.segformer.modeling_segformer", "SegformerForSemanticSegmentation", "segmentation"),
        ("ultralytics.nn.tasks", "RTDETRDetectionModel", "batched_detection"),
        ("own.net", "MyDetectionModel", "classification"),
    ],
)
def test_the_family_of_classes_of_other_packages(module: str, name: str, family: str) -> None:
    model = type(name, (nn.Conv2d,), {"__module__": module})(3, 2, 1)
    assert family_of(model) == family
    assert example_inputs(model, (32, 40))[0].shape == (1, 3, 32, 40)


def test_native_size() -> None:
    assert native_size(build_skeleton("vit_b_16").model) == (224, 224)
    assert native_size(nn.Conv2d(3, 4, 3)) is None


@pytest.mark.parametrize(("net", "channels"), [
    (nn.Conv2d(1, 4, 3), 1),
    (nn.Conv2d(3, 4, 3), 3),
    (nn.Sequential(nn.Linear(2, 2), nn.Conv3d(1, 2, 1), nn.Conv2d(3, 2, 1)), 1),
    (nn.Conv2d(12, 4, 3), 3),
    (nn.Linear(4, 3), 3),
])  # fmt: skip
def test_colour_channels(net: nn.Module, channels: int) -> None:
    assert in_channels(net) == channels
    assert example_inputs(net, (5, 6))[0].shape == (1, channels, 5, 6)


def volumes(channels: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(channels, 2, 3), nn.ReLU())


def test_models_of_volumes_take_any_depth_and_number_of_channels() -> None:
    assert family_of(volumes()) == "video"
    assert family_of(nn.Sequential(nn.Conv3d(1, 2, 1), nn.Conv2d(1, 2, 1))) == "classification"
    assert example_inputs(volumes(), (7, 20, 24))[0].shape == (1, 4, 7, 20, 24)
    assert example_inputs(volumes(1), (20, 24))[0].shape == (1, 1, CLIP_FRAMES, 20, 24)
    assert example_inputs(volumes(), (2, 4, 7, 20, 24))[0].shape == (2, 4, 7, 20, 24)
    assert example_inputs(build_skeleton("r3d_18").model, (5, 64, 72))[0].shape == (1, 3, 5, 64, 72)
    assert example_inputs(nn.Conv1d(7, 2, 3), (2, 7, 9))[0].shape == (2, 7, 9)


def test_a_depth_is_for_models_of_volumes() -> None:
    check_size(volumes(), (7, 20, 24))
    check_size(nn.Conv2d(3, 4, 3), (20, 24))
    with pytest.raises(UsageError, match="an input of 7x20x24 has a depth, and Conv2d takes images"):
        check_size(nn.Conv2d(3, 4, 3), (7, 20, 24))


def test_the_depth_of_a_loaded_model_is_that_of_its_clips() -> None:
    net = load_model("r3d_18", weights="none", device="cpu", input_size=(5, 32, 40))
    assert net.preprocess.input_shape == (3, 5, 32, 40)
    assert net.preprocess(Image.new("RGB", (64, 48))).shape == (3, 5, 32, 40)
    with pytest.raises(UsageError, match="ResNet takes images"):
        load_model("resnet18", weights="none", device="cpu", input_size=(5, 32, 40))


def test_a_full_shape_is_kept_with_the_models_dtype_and_device() -> None:
    (example,) = example_inputs(nn.Conv2d(3, 4, 3).half(), (2, 1, 28, 28))
    assert (example.shape, example.dtype, example.device.type) == ((2, 1, 28, 28), torch.float16, "cpu")
    (example,) = example_inputs(nn.Linear(784, 10, device="meta"), [784])
    assert (example.shape, example.dtype, example.device.type) == ((784,), torch.float32, "cpu")
    first, second = example_inputs(build_skeleton("raft_small").model, (2, 3, 128, 128))
    assert first.shape == second.shape == (2, 3, 128, 128)


@pytest.mark.parametrize("size", [(), (0, 5), (5, -1), (1, 3, 0, 4), "8x8", 0])
def test_bad_sizes(size: Any) -> None:
    with pytest.raises(UsageError, match=r"bad input size .*; give \(H, W\) or a full shape"):
        example_inputs(nn.Conv2d(3, 4, 3), size)


def test_pictures_become_a_batch_as_their_family_takes_it() -> None:
    tensors = [torch.full((3, 4, 5), float(n)) for n in range(2)]
    for family in ("classification", "segmentation"):
        (batch,) = as_batch(family, tensors)
        assert torch.equal(batch, torch.stack(tensors))
    (clips,) = as_batch("video", [torch.zeros(3, 16, 4, 4)] * 3)
    assert clips.shape == (3, 3, 16, 4, 4)
    first, second = as_batch("optical_flow", tensors)
    assert torch.equal(first, second) and torch.equal(first, torch.stack(tensors))
    (pictures,) = as_batch("detection", [torch.zeros(3, 4, 5), torch.zeros(3, 6, 7)])
    assert [tuple(picture.shape) for picture in pictures] == [(3, 4, 5), (3, 6, 7)]


def test_one_picture_keeps_the_memory_layout_of_its_transforms_in_memory_of_its_own() -> None:
    picture = torch.rand(8, 8, 3).permute(2, 0, 1)  # as torchvision makes a tensor of a photograph
    (batch,) = as_batch("classification", [picture])
    assert batch.stride() == picture[None].stride() and batch.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(batch[0], picture) and batch.data_ptr() != picture.data_ptr()


def test_two_pictures_of_optical_flow_are_compared_with_each_other() -> None:
    net = LoadedModel.of(nn.Identity(), "net", "none", WeightsMetadata(), family="optical_flow")
    first, second = net.inputs(torch.zeros(3, 4, 5), torch.ones(3, 4, 5))
    assert (float(first.max()), float(second.min())) == (0.0, 1.0)


def test_pictures_of_different_shapes_make_no_batch() -> None:
    with pytest.raises(InputError, match="do not stack; 3x4x5, 3x6x7; make batches of one shape"):
        as_batch("classification", [torch.zeros(3, 4, 5), torch.zeros(3, 6, 7)])
    for family in ("classification", "detection"):
        with pytest.raises(InputError, match="a batch needs at least one image"):
            as_batch(family, [])


def test_a_module_brings_its_own_preprocessing_and_class_names() -> None:
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).train()
    image = Image.new("RGB", (40, 30), (255, 0, 0))
    loaded = load_model(net, preprocess=lambda picture: to_tensor(picture) * 2, categories=["cat", "dog"])
    assert loaded.model is net and net.training and loaded.weights == "as given"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [row] = hookscope.predict(loaded, image, "top:1")
    scores = net(2 * to_tensor(image)[None])[0].detach()
    assert row.label == ["cat", "dog"][int(scores.argmax())] and row.score == pytest.approx(float(scores.max()))
    assert load_model(net, input_size=(64, 96)).preprocess(image).shape == (3, 64, 96)


def test_the_preprocessing_of_another_model_is_a_preprocessing() -> None:
    shapes = load_model("shapes", device="cpu")
    own = load_model(shapes.model, preprocess=shapes.preprocess)
    assert own.preprocess.describe().endswith("ImageNet mean and std")
    picture = Image.new("RGB", (200, 150), "teal")
    assert torch.equal(own.prepare(picture), shapes.prepare(picture))


def test_a_module_gets_the_weights_of_a_file_and_no_others(tmp_path: Path) -> None:
    trained, module = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) for _ in range(2))
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    with pytest.warns(OutputNote, match="Sequential is in train mode: BatchNorm and dropout"):
        loaded = load_model(module, weights=tmp_path / "trained.pth")
    assert loaded.weights == "trained.pth" and torch.equal(module[0].weight, trained[0].weight)
    for weights, error in (("gone.pth", WeightsError), ("default", UsageError)):
        with pytest.raises(error):
            load_model(module, weights=weights)


@pytest.mark.parametrize(
    "names",
    [
        ("ring", "star"),
        {0: "ring", 1: "star"},
        {"1": "star", "0": "ring"},
        {"ring": "0", "star": "1"},
        {"star": 1, "ring": 0},
    ],
)
def test_categories_are_a_list_or_a_dictionary(names: Any) -> None:
    assert load_model(nn.Conv2d(3, 2, 1), categories=names).categories == ("ring", "star")


@pytest.mark.parametrize("names", ["ring", 3, {0: "a", 5: "b"}, {-1: "a", 0: "b"}, {"a": 0, "b": 0}, {None: "x"}])
def test_other_categories_are_refused(names: Any) -> None:
    with pytest.raises(UsageError, match=r"categories must (be the names of|number) the classes"):
        load_model(nn.Conv2d(3, 2, 1), categories=names)
