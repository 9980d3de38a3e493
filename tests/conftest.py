"""What every test needs: a cache folder of its own, no network but this machine's; and a stand-in for `shapes`."""

import gc
import itertools
import json
import os
import signal
import tempfile

import pytest

_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config):
    # one thread: small nets gain nothing from two, and `pytest -n` runs a process on each core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a script ignores it
    # before any test and doctest, so that nobody's real cache and settings are read or written
    for name in [name for name in os.environ if name.startswith("HOOKSCOPE_")]:
        del os.environ[name]
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):  # `pytest -n` sets COLUMNS for its processes
        os.environ.pop(name, None)
    config.stash[_FOLDER] = tempfile.TemporaryDirectory()
    os.environ["XDG_CACHE_HOME"] = config.stash[_FOLDER].name
    # no test, nor a process it starts, reaches beyond this machine; whatever asks is refused at once
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ[name] = "http://127.0.0.1:9"
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
    os.environ["TORCH_HOME"] = os.path.join(config.stash[_FOLDER].name, "torch")


def pytest_collection_finish():
    """Leave what was imported out of the collections to come: they would take a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config):
    config.stash[_FOLDER].cleanup()


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers for a test, whatever ran before; those of others are as before."""
    import torch

    before = torch.get_rng_state()
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps the stack of each call for devices to come
    yield
    torch.set_rng_state(before)


@pytest.fixture(autouse=True)
def same_noise_each_time(monkeypatch):
    """Pictures of noise that depend on nothing but the test: Pillow draws them from a sequence of the whole process."""
    import numpy as np
    from PIL import Image

    drawn = itertools.count()

    def noise(size, sigma):
        values = np.random.default_rng(next(drawn)).normal(128, sigma, size[::-1])
        return Image.fromarray(values.clip(0, 255).astype(np.uint8))

    monkeypatch.setattr(Image, "effect_noise", noise)


SHAPES = {
    "model": "squeezenet1_1",
    "categories": [f"shape {number}" for number in range(10)],
    "resize_size": 144,
    "crop_size": 128,
    "mean": [0.25, 0.5, 0.75],
    "std": [0.5, 0.25, 0.125],
    "accuracy": 0.9375,
    "held_out": 160,
}


@pytest.fixture
def shapes_file(tmp_path_factory, monkeypatch):
    """Random weights of another seed than any test has, where the program looks for those of ``shapes``."""
    import torch
    from safetensors.torch import save_file
    from torchvision.models import squeezenet1_1

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        state = squeezenet1_1(num_classes=10).state_dict()
    folder = tmp_path_factory.mktemp("package")
    path = folder / "shapes.safetensors"
    save_file({key: value.half() for key, value in state.items()}, path, {"hookscope": json.dumps(SHAPES)})
    monkeypatch.setattr("hookscope.models.names.package_folder", lambda: str(folder))
    return path


@pytest.fixture
def words(monkeypatch):
    """Every line of text of the pages that are drawn."""
    from hookscope.drawing import difference, files
    from hookscope.drawing.text import text_pixels

    lines = []

    def record(text, *rest, **more):
        lines.append(text)
        return text_pixels(text, *rest, **more)

    for module in (files, difference):
        monkeypatch.setattr(module, "text_pixels", record)
    return lines


@pytest.fixture(scope="module")
def shapes():
    """The model that hookscope brings along."""
    from hookscope.models import load_model

    return load_model("shapes")
