"""Maps of attention, judged by weights that a net of the same parameters computes without a fused kernel."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import Tensor, nn
from torchvision.models.maxvit import MaxVit
from torchvision.models.swin_transformer import SwinTransformer, SwinTransformerBlock, SwinTransformerBlockV2

from hookscope.attention import AttentionMap, attention_maps, draw_attention, figure
from hookscope.attention.weights import follow_attention
from hookscope.errors import LayerError, NoMapError, UsageError
from hookscope.hooks.calls import Call
from hookscope.hooks.model_state import ModelSnapshot
from tests.attention.nets import Vit, Windows, by_letters, fused, picture, plain, swin, transposed, vit, vit_of_torch
from tests.helpers import hooks_on, seeded
from tests.nets import Function


def reference(net: Vit, x: Tensor) -> list[Tensor]:
    """The weights ``(1, heads, L, L)`` of each block, from the input that a hook sees."""
    found = []

    def keep(layer: Any, args: tuple[Tensor, ...]) -> None:
        if isinstance(layer, nn.MultiheadAttention):
            found.append(layer(*args, need_weights=True, average_attn_weights=False)[1])
        else:
            q, k, _ = layer.split(args[0])
            found.append(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1))

    layers = [getattr(block.attention, "inner", block.attention) for block in net.blocks]
    with torch.no_grad():
        seen: list[Any] = []
        handles = [layer.register_forward_pre_hook(lambda layer, args: seen.append((layer, args))) for layer in layers]
        net(x)
        for handle in handles:
            handle.remove()
        for layer, args in seen:
            keep(layer, args)
    return found


ATTEND = {"fused": fused, "plain": plain, "einsum": by_letters, "transposed": transposed}
NETS = {name: lambda attend=attend, **options: vit(attend, **options) for name, attend in ATTEND.items()}
NETS |= {"torch": lambda **options: vit_of_torch(False, **options)}
NETS |= {"torch with weights": lambda **options: vit_of_torch(True, **options)}


@pytest.mark.parametrize("kind", NETS)
def test_weights_are_those_of_an_unfused_pass_and_the_class_token_looks_at_patches(kind: str) -> None:
    net, x = NETS[kind](), picture()
    expected, maps = reference(net, x), attention_maps(net, x, weights=True)
    place = ".inner" if "torch" in kind else ""
    assert [each.call.name for each in maps] == [f"blocks.{at}.attention{place}" for at in range(2)]
    for weights, found in zip(expected, maps, strict=True):
        assert found.weights is not None and (found.weights - weights).abs().max() < 1e-6
        assert found.values == pytest.approx(weights[0, :, 0, 1:].reshape(2, 4, 6).numpy(), abs=1e-6)
        assert found.non_patch_weight == pytest.approx(weights[0, :, 0, 0].numpy(), abs=1e-6)
        assert (found.query, found.windows, found.seen, found.at) == ("class token", 1, (16, 24), None)


@pytest.mark.parametrize("kind", NETS)
def test_without_a_class_token_the_mean_of_all_positions_looks(kind: str) -> None:
    net, x = NETS[kind](class_token=False), picture()
    for weights, found in zip(reference(net, x), attention_maps(net, x), strict=True):
        assert found.values == pytest.approx(weights[0].mean(1).reshape(2, 4, 6).numpy(), abs=1e-6)
        assert found.query == "mean of 24 queries" and not found.non_patch_weight.any()
    with pytest.raises(NoMapError, match=r"blocks.1.attention\S* has no class token"):
        attention_maps(net, x, query="class")


def test_a_position_or_a_token_can_be_the_query() -> None:
    net, x = vit(), picture()
    weights = reference(net, x)[0][0].numpy()
    # the cell in row 2 of 4 and column 5 of 6 is token 1 + 2 * 6 + 5
    for query, number, at in (((0.6, 0.99), 18, (0.625, 5.5 / 6)), (18, 18, (0.625, 5.5 / 6)), (0, 0, None)):
        found = attention_maps(net, x, 0, query=query)[0]
        assert found.values.reshape(2, -1) == pytest.approx(weights[:, number, 1:], abs=1e-6)
        assert found.at == (None if at is None else pytest.approx(at))
    mean = attention_maps(net, x, 0, query="mean")[0]
    assert mean.values.reshape(2, -1) == pytest.approx(weights[:, 1:, 1:].mean(1), abs=1e-6)
    for bad in ((2, 0.5), "token", -1, 0.5, (1, 2, 3), True):
        with pytest.raises(UsageError, match="cannot be read; give class, mean"):
            attention_maps(net, x, query=bad)  # type: ignore[arg-type]
    with pytest.raises(NoMapError, match="has no single query 25; it has 25: 0 to 24"):
        attention_maps(net, x, query=25)


@pytest.mark.parametrize("mask", ["bool", "float", "causal", "grouped", "scale"])
def test_masks_scale_and_grouped_keys_of_the_fused_kernel_count(mask: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 6, 8, generator=generator) for _ in range(3))
    allowed = torch.rand(6, 6, generator=generator) > 0.4
    allowed[2] = False  # a query that may see nothing
    options: dict[str, dict[str, Any]] = {
        "bool": {"attn_mask": allowed},
        "float": {"attn_mask": torch.zeros(6, 6).masked_fill(~allowed, -torch.inf)},
        "causal": {"is_causal": True},
        "grouped": {"enable_gqa": True},
        "scale": {"scale": 0.1},
    }
    k, v = (k[:, :2], v[:, :2]) if mask == "grouped" else (k, v)
    net = Function(lambda x: F.scaled_dot_product_attention(q, k, x, **options[mask]))
    output, [(_, weights)] = follow_attention(net, (v,), 0, lambda attention: attention.weights)
    values = v.repeat_interleave(2, 1) if mask == "grouped" else v
    assert torch.allclose(weights @ values, output, atol=1e-6) and not weights.isnan().any()


def test_tokens_without_a_position_have_no_map_and_are_left_out_unless_they_are_named() -> None:
    """As in DETR: three learned queries look at each other, then at the picture."""
    queries = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        own = fused(queries, queries, queries)
        tokens = net.conv(x).flatten(2).mT
        return fused(own, tokens, tokens)

    net = Function(forward, conv=nn.Conv2d(3, 4, 4, 4))
    [found] = attention_maps(net, picture())
    assert (found.call.index, found.call.key, found.query) == (1, "#1", "mean of 3 queries")
    assert attention_maps(net, picture(), query=2)[0].values.shape == (1, 4, 6)
    with pytest.raises(NoMapError, match=r"the keys of \(model\) have no positions in the image"):
        attention_maps(net, picture(), "0:")
    with pytest.raises(NoMapError, match="the queries of #1 have no positions; choose the mean, or the number"):
        attention_maps(net, picture(), query=(0.5, 0.5))


def windows_by_hand(net: Windows, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights ``(heads, H * W, H * W)`` between positions of the map, and those spent on padding ``(heads, H * W)``."""
    height, width = x.shape[1:3]
    h, w = height + -height % 4, width + -width % 4
    padded = torch.zeros(h, w, 8)
    padded[:height, :width] = x[0]
    full, spent = torch.zeros(2, height * width, height * width), torch.zeros(2, height * width)
    for top in range(0, h, 4):
        for left in range(0, w, 4):
            places = [((top + y + net.shift) % h, (left + a + net.shift) % w) for y in range(4) for a in range(4)]
            q, k, _ = net.attention.split(torch.stack([padded[place] for place in places])[None])
            weights = torch.softmax(q @ k.mT / 2, -1)[0]
            for i, (y, a) in enumerate(places):
                for j, (z, b) in enumerate(places):
                    if y < height and a < width:
                        if z < height and b < width:
                            full[:, y * width + a, z * width + b] = weights[:, i, j]
                        else:
                            spent[:, y * width + a] += weights[:, i, j]
    return full, spent


@pytest.mark.parametrize("layer", ["first", "second"])
def test_windows_stand_in_their_place_whatever_their_shift_and_padding(layer: str) -> None:
    net, x = swin(), picture(12, 20)
    inputs: list[Tensor] = []
    handle = net.get_submodule(layer).register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        net(x)
        handle.remove()
        full, spent = windows_by_hand(net.get_submodule(layer), inputs[0])  # type: ignore[arg-type]
    height, width = inputs[0].shape[1:3]
    [mean] = attention_maps(net, x, layer)
    assert mean.values == pytest.approx(full.mean(1).reshape(2, height, width).numpy(), abs=1e-6)
    assert mean.non_patch_weight == pytest.approx(spent.mean(1).numpy(), abs=1e-6) and spent.any()
    row, column = 1, width - 1
    [one] = attention_maps(net, x, layer, query=((row + 0.4) / height, (column + 0.6) / width))
    assert one.values == pytest.approx(full[:, row * width + column].reshape(2, height, width).numpy(), abs=1e-6)
    assert one.at == pytest.approx(((row + 0.5) / height, (column + 0.5) / width))


def test_a_selection_counts_calls_of_attention_and_names_blocks_around_them() -> None:
    net, x = vit(), picture()
    for layers, expected in (("blocks.1", [1]), (-1, [1]), ("0:", [0, 1]), ("blocks.*", [0, 1]), ("all", [0, 1])):
        assert [found.call.index for found in attention_maps(net, x, layers)] == expected
    exists = r"the model has 2 calls of attention: 0 \(blocks.0.attention\) to 1 \(blocks.1.attention\)"
    for layers in ("head", 7):
        with pytest.raises(LayerError, match=f"no attention in {layers}; {exists}"):
            attention_maps(net, x, layers)
    with pytest.raises(LayerError, match="no layer 'block'"):
        attention_maps(net, x, "block")


def test_a_model_without_attention_and_an_input_without_an_image_are_refused() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2), nn.Softmax(-1))
    with pytest.raises(NoMapError, match="Sequential has no attention"):
        attention_maps(net, picture())
    with pytest.raises(UsageError, match="the input holds no tensor"):
        attention_maps(vit(), 3)
    with pytest.raises(UsageError, match="expected one image, got 2; call it once for each image"):
        attention_maps(vit(), torch.cat([picture()] * 2))


def test_the_model_stays_as_it_is_and_gives_what_it_gave() -> None:
    net, x = vit().train(), picture()
    state = ModelSnapshot(net)
    with torch.inference_mode():
        first = attention_maps(net, x)
    assert np.array_equal(first[0].values, attention_maps(net.eval(), x)[0].values)
    net.train()
    assert state.changes() == [] and hooks_on(net) == 0


def test_a_head_that_looks_at_all_alike_looks_at_all_positions() -> None:
    net = vit()
    for block in net.blocks:
        nn.init.zeros_(block.attention.qkv.weight)
    [found, _] = attention_maps(net, picture())
    assert found.effective_positions == pytest.approx([24, 24], rel=1e-5)
    assert found.values == pytest.approx(1 / 25, rel=1e-5)
    assert repr(found) == (
        "AttentionMap(layer=blocks.0.attention, heads=2, query=class token, map=4x6, windows=1, non_patch_weight=0.04)"
    )


SWIN = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
ZOO: dict[str, Callable[[], nn.Module]] = {
    "swin": lambda: SwinTransformer(block=SwinTransformerBlock, num_classes=3, **SWIN),
    "swin_v2": lambda: SwinTransformer(
        block=SwinTransformerBlockV2,
        downsample_layer=torchvision.models.swin_transformer.PatchMergingV2,
        num_classes=3,
        **SWIN,
    ),
    "maxvit": lambda: MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, 0.0, num_classes=3),
}
SIZES = {"maxvit": (32, 32)}


@pytest.mark.parametrize("name", ZOO)
def test_a_position_looks_at_the_positions_on_which_its_output_depends(name: str) -> None:
    """The gradient knows nothing of windows, shifts and padding: 7x12 positions in windows of 4x4."""
    net = seeded(ZOO[name])
    x = picture(*SIZES.get(name, (14, 24)))
    kinds = ("ShiftedWindowAttention", "ShiftedWindowAttentionV2", "PartitionAttentionLayer")
    kept: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda layer, args, output, key=key: kept.update({key: (args[0], output)}))
        for key, module in net.named_modules()
        if type(module).__name__ in kinds
    ]
    net(x.requires_grad_())
    for handle in handles:
        handle.remove()
    for key, (given, output) in kept.items():
        last = name != "maxvit"
        height, width = output.shape[1:3] if last else output.shape[2:]
        for row, column in ((0, 0), (height // 2, width - 1), (height - 1, width // 2)):
            [found] = attention_maps(net, x, key, ((row + 0.5) / height, (column + 0.5) / width))
            at = output[0, row, column] if last else output[0, :, row, column]
            [gradient] = torch.autograd.grad(at.square().sum(), given, retain_graph=True)
            depends = gradient[0].abs().sum(-1 if last else 0) > 0
            looks = torch.from_numpy(found.values).sum(0) > 1e-20  # a mask of -100 leaves 1e-44
            assert torch.equal(looks, depends), (key, row, column)
            assert found.windows > 1 or height * width <= 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_b_32", "swin_t", "swin_v2_t", "maxvit_t", "mvit_v2_s", "swin3d_t"])
def test_every_head_of_torchvisions_models_shares_out_all_it_has(name: str) -> None:
    net = seeded(lambda: torchvision.models.get_model(name, weights=None))
    x = torch.rand(1, 3, 16, 224, 224) if name in ("mvit_v2_s", "swin3d_t") else torch.rand(1, 3, 224, 224)
    maps = attention_maps(net, x)
    assert len(maps) == {"vit_b_32": 12, "maxvit_t": 22, "mvit_v2_s": 16}.get(name, 12)
    for found in maps:
        assert found.stills.sum((1, 2)) + found.non_patch_weight == pytest.approx(1, abs=1e-4)
        assert found.values.ndim == (4 if x.dim() == 5 else 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "maxvit_tiny_tf_224"])
def test_weights_of_timm_are_those_of_its_own_unfused_pass(name: str) -> None:
    timm = pytest.importorskip("timm")
    net, x, own = seeded(lambda: timm.create_model(name)), torch.rand(1, 3, 224, 224), dict[str, Tensor]()
    maps = attention_maps(net, x, weights=True)
    for key, module in net.named_modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
            module.attn_drop.register_forward_hook(lambda layer, args, out, key=key: own.update({key: out.detach()}))
    net(x)
    assert len(maps) == len(own)
    for found in maps:
        assert found.weights is not None
        assert (found.weights - own[found.call.name].reshape(found.weights.shape)).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Dinov2", "Swin", "Swinv2", "CLIPVision"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_weights_of_transformers_are_its_output_attentions(kind: str, kernel: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"image_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"patch_size": 8}
    if "Swin" in kind:
        sizes = {"image_size": 72, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 7}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    if "Swin" not in kind:
        config._attn_implementation = kernel
    net, x = seeded(lambda: getattr(transformers, f"{kind}Model")(config)), torch.rand(1, 3, sizes["image_size"], 72)
    x = x[..., : sizes["image_size"]]
    maps = attention_maps(net, x, weights=True)
    config._attn_implementation = "eager"
    with torch.no_grad():
        expected = net(x, output_attentions=True).attentions
    assert len(maps) == len(expected)
    for found, weights in zip(maps, expected, strict=True):
        assert found.weights is not None and (found.weights - weights).abs().max() < 1e-6


def attention(heads: int = 2, layer: str = "block.attn", **more: Any) -> AttentionMap:
    values = np.zeros((heads, 2, 2), np.float32)
    values[:, 0, 0] = 0.9
    facts: dict[str, Any] = {"query": "class token", "at": None, "windows": 1, "seen": (64, 64)}
    return AttentionMap(Call(layer, "Attention", 0, 3), values, np.full(heads, 0.1, np.float32), **facts | more)


PHOTOGRAPH = Image.new("RGB", (120, 100), (90, 120, 150))


def drawn(monkeypatch: pytest.MonkeyPatch, maps: list[AttentionMap], **options: Any) -> Any:
    pages: list[Any] = []
    whole = figure.draw_heat_page
    monkeypatch.setattr(figure, "draw_heat_page", lambda *args: (pages.append(args), whole(*args))[1])
    page = draw_attention(maps, PHOTOGRAPH, **options)
    return page, *pages[0][1:3]


def test_a_row_for_each_layer_has_a_map_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = attention(20, "b", windows=9)
    page, heading, rows = drawn(monkeypatch, [attention(), windows])
    assert heading.words[0] == "attention of 2 calls: class token" and heading.scale == "share of the map's highest"
    assert [len(row.panels) for row in rows] == [2, 10, 10]
    assert rows[0].words == ["3  block.attn", "Attention, 2 heads of 2×2, class token, 10 % on no patch"]
    assert "in 9 windows" in rows[1].words[1] and rows[2].words == ()
    assert rows[2].panels[9].words == ["head 19", "up to 0.9", "1 positions"]
    assert page.width < 12 * 150
    facts = json.loads(page.info["hookscope"])["attention"]
    assert [(each["layer"], each["windows"], each["high"][0]) for each in facts] == [
        ("block.attn", 1, pytest.approx(0.9)),
        ("b", 9, pytest.approx(0.9)),
    ]


def test_the_mean_of_the_heads_and_one_scale_are_drawn_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    weak = attention(3, "b")
    weak.values[:, 0, 0] = [0.1, 0.2, 0.6]
    _, heading, rows = drawn(monkeypatch, [attention(), weak], head_mean=True, one_scale=True)
    assert [panel.words[0] for panel in rows[1].panels] == ["mean of heads", "head 0", "head 1", "head 2"]
    mean = rows[1].panels[0]
    assert mean.words[1:] == ["up to 0.3"] and mean.heat.values[0, 0] == pytest.approx((0.1 + 0.2 + 0.6) / 3)
    assert [panel.heat.top for row in rows for panel in row.panels] == [pytest.approx(0.9)] * 7
    assert heading.scale == "share of the highest weight of all maps, 0.9" and "one scale" in heading.words[-1]


def test_the_query_is_marked_and_the_map_lies_over_what_the_network_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    _, heading, rows = drawn(monkeypatch, [attention(at=(0.25, 0.75), query="position")], cell=200, columns=1)
    heat = rows[0].panels[0].heat
    assert heat.box == (0, 0, 240, 200) and heat.peak == (180, 50) and heat.top == pytest.approx(0.9)
    assert len(rows) == 2 and heading.words[0] == "attention of 1 call: position"
    page = np.asarray(draw_attention([attention()], PHOTOGRAPH, cell=200, cmap="gray"))
    left = (page.shape[1] - 2 * 14 - 12) // 2 + 14
    panel = page[:, 14:left].astype(int).sum(2)
    assert panel.shape[1] == 240


def test_no_map_and_a_colour_map_that_does_not_exist_are_refused_and_nan_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="no map of attention to draw"):
        draw_attention([], PHOTOGRAPH)
    with pytest.raises(UsageError, match="colour map"):
        draw_attention([attention()], PHOTOGRAPH, cmap="nothing")
    broken = attention()
    broken.values[0] = np.nan
    _, _, rows = drawn(monkeypatch, [broken])
    assert [panel.alarm for panel in rows[0].panels] == ["NaN or Inf", ""]


def test_a_clip_is_drawn_as_the_sum_over_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.full((1, 4, 2, 2), 1 / 16, np.float32)
    clip = AttentionMap(Call("a", "A", 0, 0), values, np.zeros(1, np.float32), "mean", None, 1, (64, 64))
    _, _, rows = drawn(monkeypatch, [clip])
    assert "sum of 4 frames" in rows[0].words[1] and rows[0].panels[0].heat.top == 0.25
    assert clip.effective_positions == pytest.approx(16)
