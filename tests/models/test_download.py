"""Weights over the network: a server of this machine serves, cuts short, lies and stalls; and models of 8 bits."""

import hashlib
import io
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import SqueezeNet1_1_Weights, squeezenet1_1

from hookscope.errors import ModelError, UsageError, WeightsError
from hookscope.models import torchvision_builders
from hookscope.models.load import load_model
from hookscope.models.loaded import LoadedModel
from hookscope.models.torchvision_builders import calibration_pictures, fetch
from tests.helpers import Trap, refused, same_values

ENTRY = SqueezeNet1_1_Weights.IMAGENET1K_V1
PATIENCE = torchvision_builders.PATIENCE_SECONDS


class Server(ThreadingHTTPServer):
    """Answers every request as ``mode`` says."""

    content = b""
    mode = "whole"
    asked = 0
    let_go = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        server.asked += 1
        if server.mode == "404":
            self.send_error(404)
            return
        if server.mode == "silent":
            server.let_go.wait(20)
            return
        self.send_response(200)
        if server.mode == "chunked cut":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"ffff\r\nabc")
            return
        if server.mode != "unknown length":
            self.send_header("Content-Length", str(len(server.content)))
        self.end_headers()
        if server.mode == "stalls":
            self.wfile.write(server.content[:1000])
            self.wfile.flush()
            server.let_go.wait(20)
            return
        self.wfile.write(server.content[: len(server.content) // 2] if server.mode == "cut" else server.content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.let_go = True, threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.let_go.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torchvision_builders, "PATIENCE_SECONDS", 0.3)
    return tmp_path / "torch" / "hub" / "checkpoints"


@pytest.fixture(scope="module")
def checkpoint() -> bytes:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        file = io.BytesIO()
        torch.save(squeezenet1_1(weights=None).state_dict(), file)
    return file.getvalue()


def address(server: Server, content: bytes, name: str = "squeezenet1_1") -> str:
    server.content = content
    return f"http://127.0.0.1:{server.server_port}/{name}-{hashlib.sha256(content).hexdigest()[:8]}.pth"


@pytest.fixture
def url(server: Server, checkpoint: bytes, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the weights that torchvision's entry now names."""
    monkeypatch.setitem(vars(ENTRY.value), "url", address(server, checkpoint))  # a frozen dataclass
    return ENTRY.value.url


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*")) if cache.exists() else []


def test_a_download_lands_in_torchs_cache_and_is_used_again(server: Server, url: str, cache: Path) -> None:
    steps: list[tuple[int, int | None]] = []
    path = fetch(url, lambda done, total: steps.append((done, total)))
    assert path == cache / url.rsplit("/", 1)[-1]
    assert path.read_bytes() == server.content
    assert steps[-1] == (len(server.content), len(server.content))
    assert path.stat().st_mode & 0o777 == 0o644
    assert (fetch(url), server.asked) == (path, 1)
    assert left_over(cache) == [path.name]
    path.unlink()
    server.mode = "unknown length"
    fetch(url, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (len(server.content), None)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("cut", "is incomplete or damaged; try again"),
        ("chunked cut", "the answer broke off after"),
        ("404", "Not Found"),
        ("silent", "no answer within 0.3 seconds"),
        ("stalls", "timed out"),
        ("another hash", "incomplete or damaged"),
    ],
)
def test_a_failed_download_is_one_line_in_time_and_leaves_nothing(
    server: Server, url: str, cache: Path, mode: str, words: str
) -> None:
    server.mode = mode
    if mode == "another hash":
        server.content = server.content[:-1] + b"?"
    start = time.monotonic()
    with refused(WeightsError, words, part="holds"):
        fetch(url)
    assert time.monotonic() - start < 5
    assert left_over(cache) == []


def test_a_damaged_cached_file_is_fetched_anew(server: Server, url: str, cache: Path) -> None:
    cache.mkdir(parents=True)
    path = cache / url.rsplit("/", 1)[-1]
    path.write_bytes(server.content[:1000])
    assert fetch(url).read_bytes() == server.content
    path.write_bytes(b"x")
    server.mode = "404"
    with pytest.raises(WeightsError, match="is damaged") as caught:
        fetch(url)
    assert "Not Found" in str(caught.value)
    assert path.read_bytes() == b"x"


def test_a_host_that_is_unknown_hangs_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(WeightsError, match="Connection refused"):
        fetch(f"http://127.0.0.1:{port}/a-123456.pth")

    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    url = "http://weights.invalid/a-123456.pth"
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(WeightsError, match=rf"cannot download {url}: there is no network, or no such host"):
        fetch(url)
    hold = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: hold.wait(20) and [])
    start = time.monotonic()
    with pytest.raises(WeightsError, match=r"no answer within 0\.3 seconds; use weights='none'"):
        fetch(url)
    hold.set()
    assert time.monotonic() - start < 5 and 2 * PATIENCE < 15  # for a user


@pytest.mark.parametrize("place", ["torch", "torch/hub/checkpoints"])
def test_a_cache_that_cannot_be_written(url: str, tmp_path: Path, place: str) -> None:
    in_the_way = tmp_path / place
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.write_text("a file where a folder should be")
    with pytest.raises(WeightsError, match=r"cannot download .* to .*checkpoints: (Not a directory|File exists)"):
        fetch(url)


def test_auto_and_default_and_names_give_the_served_weights(server: Server, url: str) -> None:
    served = torch.load(io.BytesIO(server.content), weights_only=True)
    for asked in ("auto", "default", "IMAGENET1K_V1", "SqueezeNet1_1_Weights.IMAGENET1K_V1"):
        net = load_model("squeezenet1_1", weights=asked)
        assert (net.weights, net.notes) == ("IMAGENET1K_V1", ())
        assert same_values(net.model, served)
    assert server.asked == 1
    assert net.categories is not None and net.categories[281] == "tabby"


@pytest.mark.parametrize("mode", ["404", "stalls"])
def test_auto_goes_on_with_random_weights_and_says_so(server: Server, url: str, mode: str) -> None:
    server.mode = mode
    net = load_model("squeezenet1_1", seed=3)
    assert net.weights == "random (seed 3)"
    (note,) = net.notes
    assert note.startswith("weights of squeezenet1_1 are random (seed 3): ")
    assert "\n" not in note
    assert net.preprocess.describe() == "resize 256, crop 224, ImageNet mean and std"
    assert same_values(net.model, load_model("squeezenet1_1", weights="none", seed=3).model.state_dict())


def test_default_and_names_are_strict(server: Server, url: str) -> None:
    for name in ("NOPE", "ResNet18_Weights.IMAGENET1K_V1", "IMAGENET1K_V2"):
        with pytest.raises(WeightsError, match=f"no weights '{name}' for squeezenet1_1; it has IMAGENET1K_V1"):
            load_model("squeezenet1_1", weights=name)
    assert server.asked == 0
    server.mode = "404"
    for name in ("default", "IMAGENET1K_V1"):
        with pytest.raises(WeightsError, match="no weights IMAGENET1K_V1 for squeezenet1_1: cannot download"):
            load_model("squeezenet1_1", weights=name)


@pytest.mark.parametrize("force", ["", "1"])
def test_a_planted_pickle_in_the_cache_is_not_executed(
    server: Server, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: str
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", force)
    trap = tmp_path / "sprung"
    content = pickle.dumps({"a": Trap(trap)})
    served = address(server, content)  # its own hash is in its name: only the loading can refuse it
    monkeypatch.setitem(vars(ENTRY.value), "url", served)
    cache.mkdir(parents=True)
    (cache / served.rsplit("/", 1)[-1]).write_bytes(content)
    with pytest.raises(WeightsError, match="run code"):
        load_model("squeezenet1_1", weights="default")
    assert load_model("squeezenet1_1").weights == "random (seed 0)"
    assert server.asked == 0
    assert not trap.exists()
    pickle.loads(content)  # the trap does spring
    assert trap.exists()


NAME = "shufflenet_v2_x0_5"


@pytest.fixture(scope="module")
def float_net() -> LoadedModel:
    return load_model(NAME, weights="none", seed=3)


@pytest.fixture(scope="module")
def quantized() -> LoadedModel:
    return load_model(f"quantized:{NAME}", weights="none", seed=3)


def folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> Tensor:
    """The weights of a convolution with the BatchNorm behind it in them, by hand."""
    assert norm.running_var is not None
    return conv.weight * (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None, None]


def test_its_weights_are_those_of_the_float_model_with_the_same_seed(
    float_net: LoadedModel, quantized: LoadedModel
) -> None:
    own = dict(quantized.model.named_modules())
    pairs = [(name, layer) for name, layer in own.items() if type(layer).__name__ in ("Conv2d", "ConvReLU2d")]
    assert len(pairs) == 56
    for name, layer in pairs:
        block, _, number = name.rpartition(".")
        conv = float_net.model.get_submodule(name)
        norm = float_net.model.get_submodule(f"{block}.{int(number) + 1}")
        weight = layer.weight()  # type: ignore[operator]
        step = weight.q_per_channel_scales()[:, None, None, None]
        apart = (weight.dequantize() - folded(conv, norm)).abs() / step  # type: ignore[arg-type]
        assert float(apart.detach().max()) <= 0.501, name


def test_its_answers_are_near_those_of_the_float_model(float_net: LoadedModel, quantized: LoadedModel) -> None:
    pictures = calibration_pictures(float_net)[:2]
    with torch.no_grad():
        a, b = float_net.model(pictures), quantized.model(pictures)
    assert 0 < float((a - b).norm() / a.norm()) < 0.05


def test_it_says_that_it_was_quantized_here(quantized: LoadedModel) -> None:
    said = f"quantized:{NAME} is quantized here from float weights, with ranges of 8 synthetic images"
    assert (quantized.name, quantized.weights) == (f"quantized:{NAME}", "random (seed 3)")
    assert quantized.notes == (said,)


def test_a_float_checkpoint_is_quantized(float_net: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "own.pth"
    net = torchvision_builders.Architecture.of(NAME).build(num_classes=3)
    torch.save(net.state_dict(), path)
    loaded = load_model(f"quantized:{NAME}", weights=path)
    with torch.no_grad():
        assert loaded.model(calibration_pictures(loaded)[:1]).shape == (1, 3)
    assert loaded.weights == "own.pth"


def test_without_trained_weights_auto_takes_random_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise WeightsError("no network")

    monkeypatch.setattr(torchvision_builders, "fetch", refuse)
    assert load_model(f"quantized:{NAME}").weights == "random (seed 0)"
    with pytest.raises(WeightsError, match="no weights IMAGENET1K_FBGEMM_V1 for quantized_shufflenet_v2_x0_5"):
        load_model(f"quantized:{NAME}", weights="default")


@pytest.mark.parametrize(("name", "nearest"), [("resnet17", "quantized:resnet18"), ("", "quantized:")])
def test_a_model_that_torchvision_cannot_quantize_is_an_error(name: str, nearest: str) -> None:
    with pytest.raises(ModelError, match=f"no model 'quantized:{name}'; nearest: .*{nearest}"):
        load_model(f"quantized:{name}")


def test_it_runs_on_the_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="cannot run on 'cuda'; it runs on the CPU only; give device='cpu'"):
        load_model(f"quantized:{NAME}", weights="none", device="cuda")
    assert load_model(f"quantized:{NAME}", weights="none", input_size=(32, 32)).device == "cpu"
