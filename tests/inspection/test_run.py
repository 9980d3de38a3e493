"""What `inspect` keeps of a model and its images, against captum, NumPy, `capture` and `list_layers`."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import LayerGradCam, LayerGradientXActivation
from PIL import Image
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer

from hookscope.errors import ImageError, InputError, LayerError, TargetError, UsageError
from hookscope.explain import class_activation_maps
from hookscope.hooks import Call, ModelSnapshot, as_float, capture, feature_maps, tensors_in
from hookscope.inspection import Inspection, inspect
from hookscope.inspection.recorder import CallNumbers
from hookscope.models import LoadedModel, Preprocess, WeightsMetadata, load_model
from hookscope.tracing import list_layers
from tests.inspection.faults import recorded
from tests.nets import Fails, Function, named


def ready(net: nn.Module, **about: Any) -> LoadedModel:
    """The net with a preprocessing that only scales colours to 0..1."""
    loaded = LoadedModel.of(net.eval(), "own", "as given", WeightsMetadata())
    given = {name: getattr(loaded.preprocess, name) for name in ("channels", "dtype", "frames")}
    plain = Preprocess(loaded.family, **given)
    return replace(loaded, preprocess=plain, **about)


def noise(seed: int = 0, size: tuple[int, int] = (24, 20)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8))


def head(channels: int, classes: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def in_place() -> nn.Module:
    """Every convolution and every BatchNorm is overwritten by the layer behind it."""
    relu = nn.ReLU(inplace=True)
    layers = [
        nn.Conv2d(3, 6, 3, stride=2),
        relu,
        nn.Conv2d(6, 6, 3, groups=6),
        nn.BatchNorm2d(6),
        nn.ReLU6(inplace=True),
    ]
    return nn.Sequential(*layers, nn.Conv2d(6, 4, 1), nn.ReLU(inplace=True), head(4))


def residual() -> nn.Module:
    """Blocks that add to their input; before it does, the second overwrites that input in place."""
    blocks = [
        Function(lambda net, x: x + net.conv(net.first(x)), first=first, conv=nn.Conv2d(4, 4, 3, padding=1))
        for first in (nn.Identity(), nn.ReLU(inplace=True))
    ]
    return named(stem=nn.Conv2d(3, 4, 3, stride=2), blocks=nn.Sequential(*blocks), head=head(4))


def branches() -> nn.Module:
    """The second convolution is not behind the first one."""
    both = Function(lambda net, x: net.a(x) + net.b(x.flip(3)), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(3, 4, 3))
    return nn.Sequential(both, nn.ReLU(inplace=True), head(4))


def vit() -> nn.Module:
    net = VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)
    nn.init.normal_(net.heads.head.weight)
    return net


def nothing() -> nn.Module:
    """Its last convolution takes no part in the answer."""
    both = Function(lambda net, x: (net.b(x), net.a(x))[1], a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(3, 4, 3))
    return nn.Sequential(both, head(4))


NETS = [in_place, residual, branches]


@pytest.fixture(params=NETS, ids=lambda build: build.__name__)
def seen(request: pytest.FixtureRequest) -> tuple[LoadedModel, Inspection, Image.Image]:
    net, image = ready(request.param()), noise()
    return net, inspect(net, image), image


FAMILIES = (
    "alexnet googlenet swin_t maxvit_t quantized_mobilenet_v2 lraspp_mobilenet_v3_large "
    "fasterrcnn_mobilenet_v3_large_320_fpn mc3_18 raft_small"
)


class TestMaps:
    def test_levels_are_within_half_a_step_of_what_the_layer_returned(self, seen):
        net, found, image = seen
        with capture(net.model) as activations:
            net.model(net.prepare(image)[None])
        assert [layer.key for layer in found.layers] == list(activations)
        for layer in found.layers:
            tiles, values = layer.images[0].tiles, activations[layer.call.key][0].detach().double().numpy()
            low, high = tiles.low[:, None, None], tiles.high[:, None, None]
            back = low + (high - low) * tiles.levels / 192
            assert np.all(np.abs(back - values) <= 0.5001 * (high - low) / 192)
            np.testing.assert_allclose(layer.images[0].mean, values.mean((1, 2)), rtol=1e-6)
            np.testing.assert_array_equal(layer.images[0].zeros, (values == 0).mean((1, 2)))

    def test_each_image_has_its_own_maps_in_the_order_of_the_images(self):
        net, images = ready(in_place()), [noise(0), noise(1, (30, 40))]
        both = inspect(net, images)
        for number, image in enumerate(images):
            alone = inspect(net, image)
            for layer, other in zip(both.layers, alone.layers, strict=True):
                np.testing.assert_array_equal(layer.images[number].tiles.levels, other.images[0].tiles.levels)
                np.testing.assert_array_equal(layer.images[number].answer, other.images[0].answer)

    def test_blocks_of_a_transformer_are_drawn_as_maps(self):
        layers = inspect(ready(vit()), noise(size=(32, 32))).layers
        assert {layer.call.name for layer in layers if layer.call.type == "EncoderBlock"} == {
            "encoder.layers.encoder_layer_0",
            "encoder.layers.encoder_layer_1",
        }
        assert [(layer.key, layer.images[0].tiles.levels.shape) for layer in layers[:3]] == [
            ("conv_proj", (16, 4, 4)),
            ("encoder.layers.encoder_layer_0", (16, 4, 4)),
            ("encoder.layers.encoder_layer_0 class token", (16, 1, 1)),
        ]

    def test_without_convolutions_and_blocks_every_layer_is_drawn(self):
        net = ready(nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 5 * 6, 4)))
        assert [layer.call.name for layer in inspect(net, noise()).layers] == ["0", "1", "2"]

    @pytest.mark.parametrize(
        ("layers", "types", "keys"),
        [
            (-1, None, ["5"]),
            ("0:2", None, ["0", "2"]),
            (["name:1", "name:4"], None, ["1", "4"]),
            ("0", ("BatchNorm2d",), ["3"]),
        ],
    )
    def test_chosen_calls_are_drawn(self, layers, types, keys):
        found = inspect(ready(in_place()), noise(), layers, types=types)
        assert [layer.key for layer in found.layers] == keys

    def test_a_layer_that_runs_twice_has_two_calls(self):
        shared = Function(lambda net, x: net.conv(net.conv(x)), conv=nn.Conv2d(3, 3, 3))
        found = inspect(ready(nn.Sequential(shared, head(3))), noise())
        assert [layer.key for layer in found.layers] == ["0.conv", "0.conv#1"]
        assert [call.call.key for call in found.calls][:2] == ["0.conv", "0.conv#1"]

    def test_filters_of_colours_and_of_single_inputs_are_kept(self):
        net = in_place()
        first, second, third = inspect(ready(net), noise()).layers
        np.testing.assert_array_equal(first.filters, net[0].weight.detach().permute(0, 2, 3, 1))
        np.testing.assert_array_equal(second.filters, net[2].weight.detach()[:, 0])
        assert third.filters is None

    def test_channels_of_classes_have_their_names(self):
        net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        [layer] = inspect(ready(net), noise(), categories=["cat", "dog"]).layers
        assert layer.names == ("cat", "dog")


class TestAnswer:
    def test_gradient_times_activation_and_cam_are_those_of_captum(self, seen):
        net, found, image = seen
        inputs, [best, *_] = net.prepare(image)[None], found.images[0].predictions
        for layer in found.layers:
            module, maps = net.model.get_submodule(layer.call.name), layer.images[0]
            product = LayerGradientXActivation(net.model, module).attribute(inputs, target=best.index)
            np.testing.assert_allclose(maps.answer, product[0].detach().sum((1, 2)), rtol=1e-4, atol=1e-7)
            cam = LayerGradCam(net.model, module).attribute(inputs, target=best.index, relu_attributions=True)
            np.testing.assert_allclose(maps.cam, cam[0, 0].detach(), rtol=1e-4, atol=1e-7)

    @pytest.mark.parametrize("build", [*NETS, vit, nothing], ids=lambda build: build.__name__)
    def test_the_cam_of_an_image_is_the_default_of_cam(self, build):
        net, image = ready(build()), noise(size=(32, 32))
        [ours] = inspect(net, image).images
        [expected] = class_activation_maps(net.model, net.prepare(image)[None])
        assert ours.cam is not None
        assert (ours.cam.call.key, ours.cam.unreached) == (expected.call.key, expected.unreached)
        np.testing.assert_allclose(ours.cam.values, expected.values, rtol=1e-4, atol=1e-7)

    def test_target_chooses_the_class(self):
        net, image = ready(in_place()), noise()
        found = inspect(net, image, target=3)
        [layer, *_] = found.layers
        product = LayerGradientXActivation(net.model, net.model[0]).attribute(net.prepare(image)[None], target=3)
        np.testing.assert_allclose(layer.images[0].answer, product[0].detach().sum((1, 2)), rtol=1e-4, atol=1e-7)
        assert found.images[0].cam is not None
        assert found.images[0].cam.prediction.index == 3

    def test_an_unknown_class_is_an_error(self):
        with pytest.raises(TargetError, match="no class 9"):
            inspect(ready(in_place()), noise(), target=9)

    def test_a_layer_that_the_score_does_not_depend_on_has_no_answer(self):
        used, unused = inspect(ready(nothing()), noise()).layers[::-1]
        assert (used.call.name, unused.call.name) == ("0.a", "0.b")
        assert used.images[0].answer is not None
        assert unused.images[0].answer is None

    @pytest.mark.parametrize(
        ("net", "why"),
        [
            (nn.Sequential(nn.Conv2d(3, 4, 3)), "to explain a class, try target=1"),
            (Function(lambda net, x: {"boxes": net.conv(x)}, conv=nn.Conv2d(3, 4, 3)), "no score for each class"),
            (nn.Sequential(nn.Conv2d(3, 4, 3), Function(lambda x: x / 0), head(4)), "is not finite"),
            (nn.Sequential(nn.Conv2d(3, 4, 3), Function(lambda x: x.detach()), head(4)), "that the score depends on"),
        ],
        ids=["maps", "boxes", "nan", "detached"],
    )
    def test_without_a_cam_the_reason_is_said(self, net, why):
        found = inspect(ready(net), noise())
        assert found.images[0].cam is None
        assert why in found.images[0].without_cam
        assert found.layers[0].images[0].answer is None

    def test_a_model_that_fails_with_gradients_is_inspected_without(self):
        def refuse(x: Tensor) -> Tensor:
            if x.requires_grad:
                raise RuntimeError("no gradients here")
            return x

        found = inspect(ready(nn.Sequential(nn.Conv2d(3, 4, 3), Function(refuse), head(4))), noise())
        assert "no gradients here" in found.images[0].without_cam
        assert len(found.images[0].predictions) == 5
        assert sum(found.calls[0].histogram) == 4 * 18 * 22  # once, although two passes ran


class TestNumbers:
    def test_numbers_of_every_call_are_those_of_numpy(self, seen):
        net, found, image = seen
        with capture(net.model, "*") as activations:
            net.model(net.prepare(image)[None])
        assert [call.call.order for call in found.calls] == list(range(len(found.calls)))
        for call in found.calls:
            values = activations[call.call.key].detach().double().numpy()
            assert (call.low, call.high, call.shape) == (values.min(), values.max(), values.shape)
            assert call.mean == pytest.approx(values.mean())
            assert call.zeros == (values == 0).mean()
            assert call.histogram == pytest.approx(np.histogram(values, 32)[0], abs=2)  # a value may lie on an edge

    def test_numbers_of_several_images_are_those_of_all_values(self):
        net, images = ready(in_place()), [noise(0), noise(1, (30, 40)), noise(2)]
        found, values = inspect(net, images), []
        for image in images:
            with capture(net.model, "0") as activations, torch.no_grad():
                net.model(net.prepare(image)[None])
            values.append(activations["0"].double().numpy().ravel())
        joined, first = np.concatenate(values), found.calls[0]
        assert (first.low, first.high, sum(first.histogram)) == (joined.min(), joined.max(), joined.size)
        assert first.mean == pytest.approx(joined.mean())
        moved = np.abs(np.array(first.histogram) - np.histogram(joined, 32)[0]).sum()
        assert moved < 0.05 * joined.size

    @pytest.mark.parametrize("count", [999, 70_000, 70_001, 200_000])
    @pytest.mark.parametrize("unit", [1e-36, 1.0, 1e36])
    def test_values_are_counted_as_numpy_does(self, count, unit):
        values, numbers = torch.randn(count) * unit, CallNumbers(Call("layer", "ReLU", 0, 0))
        numbers.update(values)
        expected, _ = np.histogram(values.double().numpy(), 32)
        assert sum(numbers.histogram) == count
        assert np.abs(expected - np.array(numbers.histogram)).sum() <= 8  # some lie on an edge

    def test_constant_values_lie_in_the_middle_and_those_that_hardly_differ_are_counted(self):
        call = inspect(ready(nn.Sequential(nn.Conv2d(3, 4, 1), Function(lambda x: x * 0), head(4))), noise()).calls[1]
        assert (call.low, call.high) == (0, 0)
        assert call.histogram == tuple(np.histogram(np.zeros(4 * 20 * 24), 32)[0])
        near = torch.tensor([1.0, 1 + 2**-52], dtype=torch.float64)  # numpy.histogram refuses such a range
        first, second = (CallNumbers(Call("0", "Conv2d", 0, 0, 0)) for _ in range(2))
        first.update(near[:1])
        second.update(near)
        first.merge(second)
        assert sum(first.histogram) == 3

    @pytest.mark.parametrize("build", [*NETS, vit], ids=lambda build: build.__name__)
    def test_macs_and_parameters_are_those_of_list_layers(self, build):
        net, image = ready(build()), noise(size=(32, 32))
        rows = list_layers(net.model, inputs=(net.prepare(image)[None],), types=("all",))
        expected = {(row.name, row.call): (row.params, row.macs, row.order) for row in rows if row.call is not None}
        calls = inspect(net, image).calls
        ours = {(call.call.name, call.call.call): (call.params, call.macs, call.call.order) for call in calls}
        assert {key: ours[key] for key in expected} == expected
        assert sum(macs for _, macs, _ in ours.values()) == sum(macs for _, macs, _ in expected.values())

    def test_nan_and_inf_are_counted(self):
        def spoil(x: Tensor) -> Tensor:
            x = x.clone()
            x[0, 0, 0, :3] = torch.tensor([np.nan, np.inf, -np.inf])
            return x

        found = inspect(ready(nn.Sequential(nn.Conv2d(3, 4, 1), Function(spoil), nn.Conv2d(4, 4, 1), head(4))), noise())
        assert found.calls[1].nonfinite == 3
        assert sum(found.calls[1].histogram) == 4 * 20 * 24 - 3
        assert found.layers[1].images[0].tiles.nonfinite.tolist() == [3] * 4
        assert "non-finite" in {finding.finding for finding in found.findings}


class TestEvidence:
    def test_the_change_of_a_block_is_relative_to_its_input_before_it_was_overwritten(self):
        net, image = ready(residual()), noise()
        evidence = recorded(net, [image])
        x = net.model.requires_grad_(False).stem(net.prepare(image)[None])
        for number, block in enumerate(net.model.blocks):
            before = x.clone()
            x = block(x)
            expected = float((x - before).norm() / before.norm())
            assert evidence.changes[f"blocks.{number}"] == pytest.approx([expected], rel=1e-5)

    def test_statistics_are_those_of_all_images(self):
        evidence = recorded(ready(in_place()), [noise(0), noise(1)])
        assert evidence.totals.images == 2
        assert [layer.key for layer in evidence.statistics][:3] == ["0", "1", "2"]
        assert [tuple(scores.shape) for scores in evidence.scores] == [(1, 5), (1, 5)]


class TestState:
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    @pytest.mark.parametrize("fails", [False, True])
    def test_the_model_is_as_before(self, mode, fails):
        net = nn.Sequential(in_place(), nn.Dropout(), Fails(at=1 if fails else 10))
        net.train()
        net[0][3].eval()
        net[0][0].weight.requires_grad_(False)
        net[0][5].weight.grad = torch.ones_like(net[0][5].weight)
        before = ModelSnapshot(net)
        with mode():
            if fails:
                with pytest.raises(InputError):
                    inspect(net, noise())
            else:
                inspect(net, noise())
        assert before.changes() == []

    def test_the_image_is_not_written_to(self):
        net = ready(nn.Sequential(Function(lambda x: x.mul_(0)), nn.Conv2d(3, 4, 3), head(4)))
        assert np.asarray(inspect(net, noise()).images[0].seen).any()


class TestFamilies:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_precisions(self, dtype):
        net, image = ready(in_place().to(dtype)), noise()
        found = inspect(net, image)
        with capture(net.model) as activations, torch.no_grad():
            net.model(net.prepare(image)[None])
        maps = found.layers[1].images[0]
        assert maps.answer is not None
        assert float(as_float(activations["2"]).max()) == pytest.approx(float(maps.tiles.high.max()), rel=0.02)

    def test_nets_of_grey_pictures_of_clips_and_with_dictionaries_of_scores(self):
        found = inspect(nn.Sequential(nn.Conv2d(1, 4, 5), head(4)), noise())
        assert found.layers[0].filters is not None
        assert found.layers[0].filters.shape == (4, 5, 5)
        assert found.images[0].seen.mode == "RGB"
        net = nn.Sequential(nn.Conv3d(3, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool3d(1), nn.Flatten())
        [layer] = inspect(ready(net), noise()).layers
        assert layer.axes == "N C T H W"
        net = Function(lambda net, x: {"logits": net.head(net.conv(x))}, conv=nn.Conv2d(3, 4, 3), head=head(4))
        found = inspect(ready(net), noise())
        assert len(found.images[0].predictions) == 5
        assert found.layers[0].images[0].answer is not None

    @pytest.mark.slow
    @pytest.mark.parametrize("name", FAMILIES.split())
    def test_families_of_torchvision(self, name):
        net, image = load_model(name, weights="none"), Image.open("samples/cat.jpg").convert("RGB")
        before, prepared = ModelSnapshot(net.model), net.prepare(image)
        found = inspect(net, image)
        assert before.changes() == []
        modules = dict(net.model.named_modules())
        with capture(net.model, "*") as activations:
            net.model(*net.inputs(prepared))
        for call in found.calls:
            tensors = [as_float(tensor) for tensor in tensors_in(activations[call.call.key]).values()]
            assert sum(call.histogram) == sum(tensor.numel() for tensor in tensors)
        for layer in found.layers:
            if not layer.part and layer.axes == "N C H W":
                [maps, *_] = feature_maps(activations[layer.call.key], modules[layer.call.name])
                low, high = maps.values.amin((1, 2)), maps.values.amax((1, 2))
                if maps.values[0].numel() > 1:
                    np.testing.assert_allclose(layer.images[0].tiles.low, low, rtol=1e-4, atol=1e-5)
                    np.testing.assert_allclose(layer.images[0].tiles.high, high, rtol=1e-4, atol=1e-5)


class TestProvenance:
    def test_files_have_their_sha256(self, tmp_path):
        noise().save(tmp_path / "a.png")
        net = load_model("shapes")
        about = inspect(net, str(tmp_path / "a.png")).provenance
        with open(tmp_path / "a.png", "rb") as image, open(net.checkpoint, "rb") as weights:
            expected = [hashlib.file_digest(file, "sha256").hexdigest() for file in (image, weights)]
        assert about["images"] == [{"image": "a.png", "sha256": expected[0]}]
        assert about["checkpoint"] == {"file": "shapes.safetensors", "sha256": expected[1]}
        assert about["seed"] is None

    def test_random_weights_have_their_seed(self):
        about = inspect(load_model("squeezenet1_1", weights="none", seed=3), noise()).provenance
        assert (about["weights"], about["seed"], about["checkpoint"]) == ("random (seed 3)", 3, None)

    def test_a_file_of_the_user_is_named(self, tmp_path):
        net = load_model("shapes", weights="none")
        torch.save(net.model.state_dict(), tmp_path / "mine.pth")
        about = inspect(load_model("shapes", weights=tmp_path / "mine.pth"), noise()).provenance
        assert about["checkpoint"]["file"] == "mine.pth"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_maps_that_were_made_without_gradients(mode):
    def forward(net, x):
        with mode():
            values = net.conv(x)
        return net.head(values + 0)

    found = inspect(Function(forward, conv=nn.Conv2d(3, 4, 3), head=head(4)), noise())
    assert found.images[0].without_cam == "no layer has a map that the score depends on"


class TestErrors:
    def test_images_files_and_layers_that_do_not_exist_are_refused(self):
        with pytest.raises(UsageError, match="there is no image"):
            inspect(in_place(), [])
        with pytest.raises(ImageError, match="no image"):
            inspect(in_place(), "nothing.png")
        with pytest.raises(LayerError, match="no layer 'conv9'"):
            inspect(in_place(), noise(), "conv9")


def test_a_note_says_what_cannot_be_judged_without_batchnorm() -> None:
    for norm, said in ((nn.Identity(), 1), (nn.BatchNorm2d(3), 0)):
        net = ready(nn.Sequential(nn.Conv2d(3, 3, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten()))
        assert sum(note.startswith("no BatchNorm: ") for note in inspect(net, noise()).notes) == said
