"""What every test needs: a cache folder of its own, no network but this machine's."""

import os
import tempfile

import pytest

_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config):
    # before any test and doctest, so that nobody's real cache is read or written
    config.stash[_FOLDER] = tempfile.TemporaryDirectory()
    os.environ["XDG_CACHE_HOME"] = config.stash[_FOLDER].name
    # no test, nor a process it starts, reaches beyond this machine; whatever asks is refused at once
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ[name] = "http://127.0.0.1:9"
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
    os.environ["TORCH_HOME"] = os.path.join(config.stash[_FOLDER].name, "torch")


def pytest_unconfigure(config):
    config.stash[_FOLDER].cleanup()
