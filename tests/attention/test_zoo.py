"""Attention of torchvision, timm and transformers, judged by gradients and by their own unfused passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.maxvit import MaxVit
from torchvision.models.swin_transformer import SwinTransformer, SwinTransformerBlock, SwinTransformerBlockV2

from hookscope.attention.run import attention_maps
from tests.attention.nets import picture
from tests.helpers import seeded

SWIN = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": [4, 4]}
NETS: dict[str, Callable[[], nn.Module]] = {
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


@pytest.mark.parametrize("name", NETS)
def test_a_position_looks_at_the_positions_on_which_its_output_depends(name: str) -> None:
    """The gradient knows nothing of windows, shifts and padding: 7x12 positions in windows of 4x4."""
    net = seeded(NETS[name])
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
