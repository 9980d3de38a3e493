"""Planned memory, judged by real passes: what autograd keeps, what the allocator says, what optimizers hold."""

import functools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from hookscope.errors import HookscopeError
from hookscope.models import find_source
from hookscope.planning.run import plan
from hookscope.planning.subject import optimizer_names
from tests.nets import Function, named

SMALL = [
    "alexnet",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "resnet18",
    "resnet34",
    "shufflenet_v2_x0_5",
    "squeezenet1_0",
    "squeezenet1_1",
    "shufflenet_v2_x1_0",
]
FIXED_SIDE = ("vit", "swin", "inception")


def in_memory(name: str) -> tuple[nn.Module, int]:
    """The model with zeros for weights, and a side of its pictures that is small where it may be."""
    skeleton = find_source(name).skeleton()
    assert skeleton is not None
    net = skeleton.model.to_empty(device="cpu").train()
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):  # some buffers are indices
            tensor.zero_()
    return net, skeleton.size[0] if any(word in name for word in FIXED_SIDE) else 64


def size_of(tensors: Any) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def kept_by_autograd(net: nn.Module, batch: Tensor, autocast: Any = None) -> int:
    """Bytes that a real forward pass saves, without parameters, buffers and the batch."""
    own = {tensor.untyped_storage()._cdata for tensor in [*net.parameters(), *net.buffers(), batch]}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())  # a graph that keeps its own outputs would never be freed
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast or nullcontext():
        output = net(batch)
    assert output is not None
    return size_of(tensor for tensor in kept if tensor.untyped_storage()._cdata not in own)


def largest_allocation(net: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer | None, folder: Path) -> int:
    """The peak of a real step by the allocator of torch, as its profiler reports it."""

    def run() -> Any:
        output = net(batch)
        if optimizer is not None:
            loss = output.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with torch.set_grad_enabled(optimizer is not None):
        run()
        state = [value for held in (optimizer.state.values() if optimizer else ()) for value in held.values()]
        before = size_of([*net.parameters(), *net.buffers(), batch, *state])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run()
    profiled.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    said = sorted(
        (e["ts"], e["args"]["Total Allocated"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"
    )
    return before + max(total for _, total, _ in said) - (said[0][1] - said[0][2])


def attention(dropout: float = 0.0) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        parts = net.inner(x.flatten(2).transpose(1, 2)).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts.unbind(0), dropout_p=dropout)

    return Function(forward, inner=nn.Linear(3, 48))


@pytest.mark.parametrize("name", SMALL)
def test_saved_bytes_are_those_of_autograd(name: str) -> None:
    net, side = in_memory(name)
    planned = plan(net, 2, (side, side), train=True)
    assert planned.memory.saved == kept_by_autograd(net, torch.zeros(2, 3, side, side))
    assert planned.memory.saved == sum(call.saved for call in planned.calls)
    assert planned.memory.parameters == 4 * sum(call.params for call in planned.calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*torchvision.models.list_models(torchvision.models)} - {*SMALL}))
def test_saved_bytes_of_every_classification_model(name: str) -> None:
    test_saved_bytes_are_those_of_autograd(name)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_takes_the_kernel_of_the_cpu(dropout: float) -> None:
    net, batch = attention(dropout), torch.rand(2, 3, 8, 8)
    assert plan(net, 2, (8, 8), train=True).memory.saved == kept_by_autograd(net, batch)


def test_a_gpu_keeps_one_byte_of_dropout_for_each_value() -> None:
    net = named(conv=nn.Conv2d(3, 4, 1), drop=nn.Dropout())
    on_cpu, on_gpu = (plan(net, 1, (8, 8), train=True, device=device).calls[1].saved for device in ("cpu", "cuda"))
    assert (on_cpu, on_gpu) == (4 * 256, 256)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "autocast"])
def test_saved_bytes_in_another_data_type(dtype: str) -> None:
    net = named(conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), act=nn.GELU(), flat=nn.Flatten(), fc=nn.Linear(392, 9))
    planned = plan(net, 2, (9, 9), train=True, dtype=dtype)
    kind = torch.float32 if dtype == "autocast" else getattr(torch, dtype)
    autocast = torch.autocast("cpu", torch.bfloat16) if dtype == "autocast" else None
    kept = kept_by_autograd(net.to(kind).train(), torch.rand(2, 3, 9, 9, dtype=kind), autocast)
    assert planned.memory.saved == pytest.approx(kept, rel=0.002)
    assert planned.dtype == ("autocast:bfloat16" if dtype == "autocast" else dtype)


def three_blocks() -> nn.Module:
    def block(width: int, wider: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(True))

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return named(layer1=block(3, 16), layer2=nn.Sequential(block(16, 16), block(16, 32)), head=head)


@pytest.mark.parametrize("blocks", [(), ("layer1", "layer2")])
@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
def test_the_peak_is_that_of_the_allocator(optimizer: str | None, blocks: tuple[str, ...], tmp_path: Path) -> None:
    judge_the_peak(three_blocks(), optimizer, blocks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("resnet18", "layer2"),
        ("mobilenet_v2", "features.2"),
        ("vit_b_32", "encoder.layers.encoder_layer_0"),
        ("efficientnet_b0", "features.1"),
        ("densenet121", "features.denseblock1"),
    ],
)
@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_peak_of_real_models(
    name: str, block: str, optimizer: str | None, checkpointed: bool, tmp_path: Path
) -> None:
    judge_the_peak(in_memory(name)[0], optimizer, (block,) * checkpointed, tmp_path, side=224)


def judge_the_peak(
    net: nn.Module, optimizer: str | None, blocks: tuple[str, ...], folder: Path, side: int = 32
) -> None:
    net.train(optimizer is not None)
    training = optimizer is not None
    planned = plan(net, 8, (side, side), train=training, optimizer=optimizer or "sgd", checkpoint=blocks)
    for name in blocks:
        block = net.get_submodule(name)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    batch = torch.zeros(8, 3, side, side)
    if training:
        assert planned.memory.saved == kept_by_autograd(net, batch)
    made = optimizer_names()[optimizer](net.parameters(), lr=1e-3) if optimizer else None
    real = largest_allocation(net, batch, made, folder)
    # kernels have a workspace of their own, which weighs more where no activations are kept
    assert 0.85 * real < planned.memory.peak < 1.02 * real


WITHOUT_PLAN = {"lbfgs": "closure", "sparseadam": "dense", "muon": "2D"}


@pytest.mark.parametrize("name", sorted(optimizer_names()))
def test_the_state_of_an_optimizer_is_that_of_a_real_one(name: str) -> None:
    net = named(conv=nn.Conv2d(3, 8, 3), flat=nn.Flatten(), fc=nn.Linear(392, 9))
    if name in WITHOUT_PLAN:
        with pytest.raises(HookscopeError, match=WITHOUT_PLAN[name]):
            plan(net, 2, (9, 9), train=True, optimizer=name)
        return
    planned = plan(net, 2, (9, 9), train=True, optimizer=name)
    real = optimizer_names()[name](net.parameters(), lr=1e-3)
    net(torch.rand(2, 3, 9, 9)).sum().backward()
    real.step()
    state = [value for held in real.state.values() for value in held.values() if isinstance(value, Tensor)]
    assert planned.memory.optimizer == size_of(state)


def test_an_optimizer_of_ones_own() -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    planned = plan(nn.Sequential(nn.Conv2d(3, 8, 3)), 2, (9, 9), train=True, optimizer=sgd)
    assert planned.memory.optimizer == planned.memory.parameters == 4 * 224


def test_the_largest_batch_is_planned_at_itself_and_at_the_next() -> None:
    net, limit = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(392, 10)), 10**6
    largest = plan(net, input_size=(9, 9), train=True, optimizer="adam", memory=limit).largest_batch
    assert largest is not None
    peaks = [plan(net, b, (9, 9), train=True, optimizer="adam").memory.peak for b in (largest, largest + 1)]
    assert peaks[0] <= limit < peaks[1]
    assert plan(net, input_size=(9, 9), memory=10_000).largest_batch == 0


def test_a_model_that_needs_values_is_followed_in_a_real_pass() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.conv(x)[x.mean((1, 2, 3)) >= 0]

    net = Function(forward, conv=nn.Conv2d(3, 4, 3)).eval()
    planned = plan(net, 2, (9, 9), train=True, memory=10**6)
    assert planned.real and any("values" in note for note in planned.notes)
    # the mask of the pictures, which indexing keeps
    assert planned.memory.saved == kept_by_autograd(net, torch.rand(2, 3, 9, 9))
    assert net.conv.weight.grad is None and not net.training
