"""What every test needs: a cache folder of its own, no network but this machine's."""

import os
import tempfile

import pytest

_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config):
    # before any test and doctest, so that nobody's real cache is read or written
    config.stash[_FOLDER] = tempfile.TemporaryDirectory()
    os.environ["XDG_CACHE_HOME"] = config.stash[_FOLDER].name
    os.environ["TORCH_HOME"] = os.path.join(config.stash[_FOLDER].name, "torch")


def pytest_unconfigure(config):
    config.stash[_FOLDER].cleanup()
