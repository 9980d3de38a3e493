"""Causes that a comparison names: weights that follow from each other, operations, resizes, colours, rounding."""

import copy
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from hookscope import compare, load_model
from hookscope.comparison.inputs import InputChange, resizes_apart
from hookscope.comparison.rows import rounded_as
from hookscope.comparison.weights import relation, stored_as
from hookscope.hooks import was_updated
from tests.exports import deployed, to_onnx
from tests.helpers import seeded

ORDER = torch.tensor([2, 0, 3, 1, 4])
WEIGHT = torch.randn(5, 5, 3, 3, generator=torch.Generator().manual_seed(0))
AXES = ("output channels", "input channels", "rows of the kernels", "columns of the kernels")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (10 * WEIGHT, "A's times 10"),
        (-WEIGHT, "A's with the sign flipped"),
        (WEIGHT[ORDER], "A's with output channels permuted"),
        (WEIGHT[:, ORDER], "A's with input channels permuted"),
        (WEIGHT[..., [2, 1, 0]], "A's with columns of the kernels permuted (2, 1, 0)"),
        (WEIGHT.transpose(0, 1), "A's with output channels and input channels exchanged"),
        (torch.zeros_like(WEIGHT), "0 everywhere"),
        ((10 * WEIGHT).half(), "A's times 10"),
        (WEIGHT.roll(1) * 1.01, ""),
        (WEIGHT + 0.01 * WEIGHT.flip(0), ""),  # fine-tuned: no relation is claimed
        (WEIGHT.half(), ""),  # rounded alone
    ],
)
def test_how_a_weight_follows_from_another(changed: Tensor, words: str) -> None:
    assert relation(WEIGHT, changed, AXES) == words


class Patches(nn.Module):
    """Parameters of no layer, and operations between layers."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.embed, self.fc, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.Linear(8, 5)
        self.pos, self.scale, self.wrong = nn.Parameter(torch.randn(1, 4, 8)), nn.Parameter(torch.rand(8)), wrong

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2)
        x = (x.reshape(len(x), 4, 8) if self.wrong == "transpose" else x.transpose(1, 2)) + self.pos
        y = self.scale * self.fc(x)
        x = y if self.wrong == "skip" else x + y
        x = x * 0.5 if self.wrong == "scale" else x
        answer: Tensor = self.head(x.amax(1) if self.wrong == "mean" else x.mean(1))
        return answer


def other(name: str, change: Any) -> nn.Module:
    net = copy.deepcopy(seeded(Patches))
    getattr(net, name).data = change(getattr(net, name).data)
    return net


def wrong(what: str) -> nn.Module:
    net: Any = copy.deepcopy(seeded(Patches))
    net.wrong = what
    return net  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("b", "kind", "words"),
    [
        (other("pos", lambda pos: -pos), "parameters", "pos differs by 2: B's pos is A's with the sign flipped."),
        (other("pos", torch.zeros_like), "parameters", "pos differs by 1: B's pos is 0 everywhere."),
        (other("scale", lambda scale: 3 * scale), "parameters", "scale differs by 2: B's scale is A's times 3."),
        (wrong("skip"), "unpaired", "A has ::add#1, and B does not."),
        (wrong("scale"), "unpaired", "B has ::mul#1, and A does not."),
        (wrong("transpose"), "unpaired", "A has ::transpose"),
        (wrong("mean"), "layer", "A and B differ first at ::mean (::amax in B)"),
    ],
)
def test_what_is_no_layer_is_named(b: nn.Module, kind: str, words: str) -> None:
    batch = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    found = compare(seeded(Patches), b, batch)
    assert (found.answer.kind, found.answer.sentence[: len(words)]) == (kind, words)
    assert found.answer.first in [row.key for row in found.calls]  # so that tables can show it


def test_weights_of_another_layer_are_recognised() -> None:
    a = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    b = copy.deepcopy(a)
    b[0].load_state_dict(a[2].state_dict())
    sentence = compare(a, b, torch.randn(4, 4)).answer.sentence
    assert sentence.endswith("B's weight is 2.weight of A and B's bias is 2.bias of A.")


def reset(norm: nn.BatchNorm2d) -> None:
    norm.reset_parameters()


def permute(norm: nn.BatchNorm2d) -> None:
    norm.load_state_dict({name: value[ORDER] if value.dim() else value for name, value in norm.state_dict().items()})


def widen(norm: nn.BatchNorm2d) -> None:
    norm.eps = 0.5


def poison(norm: nn.BatchNorm2d) -> None:
    norm.weight.data[0] = math.nan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (reset, "B's weight, bias, running_mean and running_var are at the initial values."),
        (nn.BatchNorm2d.reset_running_stats, "running_mean and running_var are at the initial values; its parameters"),
        (permute, "B's weight, bias, running_mean and running_var are A's with channels permuted."),
        (widen, "with the same parameters; its eps is 1e-05 in A and 0.5 in B."),
        (nn.BatchNorm2d.train, "it uses the statistics of the batch in B, and running statistics in A."),
        (poison, "1 is the first layer with NaN or Inf in B: 196 values, finite in A; its weights hold them too."),
    ],
)
def test_what_happened_to_a_batchnorm_is_said_whole(change: Callable[[nn.BatchNorm2d], None], words: str) -> None:
    a = seeded(lambda: nn.Sequential(nn.Conv2d(3, 5, 2), nn.BatchNorm2d(5), nn.ReLU()).eval())
    for value in a[1].state_dict().values():
        if value.dim():
            value.uniform_(0.5, 2)
    b = copy.deepcopy(a)
    change(b[1])
    found = compare(a, b, torch.randn(4, 3, 8, 8))
    assert words in found.answer.sentence and found.answer.advice
    assert all(pair.relative_l2 is pair.difference.cosine is None for pair in found.calls if pair.difference.nonfinite)


def test_only_another_batchnorm_is_said_to_use_running_statistics() -> None:
    a = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU()).eval())
    a[1].train()
    b = nn.Sequential(a[0], nn.GroupNorm(2, 4), nn.ReLU())
    sentence = compare(a, b, torch.randn(4, 3, 8, 8)).answer.sentence
    assert "running statistics" not in sentence and "GroupNorm" in sentence


def test_dropout_that_is_left_on_is_chance_whatever_it_stands_in() -> None:
    a = seeded(lambda: nn.Sequential(nn.Conv2d(3, 5, 2), nn.Dropout(), nn.ReLU()).eval())
    b, state = copy.deepcopy(a), torch.get_rng_state()
    b[1].train()
    for one, two, side in ((a, b, "B"), (b, a, "A"), (a[::2], b, "B")):
        found = compare(one, two, torch.ones(5, 3, 8, 8))
        assert found.answer.kind == "chance" and ", so the differences are chance. " in found.answer.sentence
        assert found.answer.sentence.startswith(f"{side} draws random numbers: two passes differ by relative L2 ")
    assert ". B has 1 (Dropout), and A does not. " in found.answer.sentence  # of the last two, as operations show it
    assert found.answer.sentence.endswith(". This is said of the first 4 images.")
    assert torch.equal(torch.get_rng_state(), state)
    found = compare(b, b, torch.ones(4, 3, 8, 8))
    assert found.answer.kind == "same" and found.notes[-1].startswith("B draws random numbers: two passes differ by ")


def photograph(side: int = 160) -> Image.Image:
    values = torch.rand(3, 40, 40, generator=torch.Generator().manual_seed(2))
    values = nn.functional.interpolate(values[None], size=side, mode="bicubic")[0].clamp(0, 1)
    noise = torch.randn(3, side, side, generator=torch.Generator().manual_seed(3))
    return Image.fromarray(((values + 0.05 * noise).clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy())


def as_tensor(picture: Image.Image) -> Tensor:
    return torch.tensor(list(picture.tobytes())).reshape(*picture.size[::-1], 3).permute(2, 0, 1) / 255


def plain(image: Image.Image) -> Tensor:
    return nn.functional.interpolate(as_tensor(image)[None], size=(16, 16), mode="bilinear")[0]


def smooth(image: Image.Image) -> Tensor:
    return as_tensor(image.resize((16, 16), Image.Resampling.BILINEAR)) - 0.5


def test_a_resize_without_antialias_is_recognised() -> None:
    nets = [load_model("shapes", preprocess=function) for function in (smooth, plain)]
    words = resizes_apart(photograph(), *nets)
    ways = "stretch 16x16 bilinear in A, stretch 16x16 bilinear without antialias in B"
    assert words == f"The images are resized differently: {ways}"
    assert resizes_apart(photograph(), nets[0], nets[0]) == ""


def test_colours_that_were_saved_as_jpeg_in_another_order_are_recognised() -> None:
    stream, found = io.BytesIO(), InputChange(other_images=True)
    rgb = photograph()
    Image.merge("RGB", rgb.split()[::-1]).save(stream, "JPEG", quality=95, subsampling=0)
    found.add(as_tensor(rgb)[None], as_tensor(Image.open(stream).convert("RGB"))[None])
    assert found.words.endswith("(RGB in one, BGR in the other)")


def test_a_division_by_256_is_recognised() -> None:
    found = InputChange()
    found.add(as_tensor(photograph())[None], as_tensor(photograph())[None] * 255 / 256)
    assert found.words == "B divides the colours by 256 where A divides them by 255"


def test_a_model_that_normalises_itself_is_no_fault() -> None:
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)))
    inside = nn.Sequential(nn.BatchNorm2d(3, eps=0), *net)
    inside[0].running_mean.fill_(0.5), inside[0].running_var.fill_(0.0625)
    batch = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    found = compare(
        load_model_of(net, lambda image: (as_tensor(image) - 0.5) / 0.25),
        load_model_of(inside.eval(), as_tensor),
        [Image.fromarray((item * 255).byte().permute(1, 2, 0).numpy()) for item in batch],
    )
    assert found.answer.kind == "noise" and found.answer.sentence.startswith("The outputs of A and B are the same")
    assert found.answer.sentence.endswith("B's input is 0.25 times A's plus 0.5, and B normalises it itself.")


def load_model_of(net: nn.Module, preprocess: Any) -> Any:
    from dataclasses import replace

    from hookscope.models import as_loaded
    from hookscope.models.transforms import OwnTransforms

    loaded = as_loaded(net.eval())
    return replace(loaded, preprocess=replace(loaded.preprocess, transforms=OwnTransforms(preprocess, "own")))


def test_steps_of_8_bits_are_found_in_the_values() -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(5))
    rounded = torch.fake_quantize_per_tensor_affine(value, 0.02, 100, 0, 255)
    again = rounded_as(value, rounded)
    assert again is not None
    torch.testing.assert_close(again, rounded, atol=1e-5, rtol=0)
    assert rounded_as(value, value) is None and rounded_as(value, torch.zeros(1000)) is None


def test_weights_that_were_saved_in_half_precision_are_recognised() -> None:
    net = nn.Linear(30, 30)
    kinds = (net, copy.deepcopy(net).half().float(), copy.deepcopy(net).bfloat16().float())
    assert [stored_as(each) for each in kinds] == ["", "float16", "bfloat16"]


def test_a_file_with_nodes_that_nothing_uses_runs(tmp_path: Path) -> None:
    import onnx

    model = onnx.load(to_onnx(deployed(), tmp_path / "net.onnx"))
    add = next(node for node in model.graph.node if node.op_type == "Add")
    for node in model.graph.node:
        node.input[:] = [add.input[1] if name == add.output[0] else name for name in node.input]
    model.graph.node.remove(add)
    onnx.save(model, tmp_path / "lost.onnx")
    batch = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(6))
    found = compare(deployed(), load_model(str(tmp_path / "lost.onnx")), batch)
    assert found.answer.sentence.startswith("A has ::add, and B does not.")


def test_lost_statistics_differ_as_far_as_their_values_do() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    net[1].running_mean.fill_(3.0), net[1].num_batches_tracked.fill_(1000)
    lost = copy.deepcopy(net)
    lost[1].running_mean.zero_()
    [row] = [pair for pair in compare(net, lost, torch.rand(1, 3, 5, 5)).calls if pair.a.name == "1"]
    assert row.buffers == pytest.approx(6 / 40**0.5)  # 2 * 3 over the norm of four 3 and four 1; the count is left out
    assert was_updated(net[1]) and not was_updated(lost[1])
