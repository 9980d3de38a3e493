"""A folder of transformers as MODEL."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from hookscope.errors import ModelError, UsageError
from hookscope.models.load import load_model
from hookscope.models.sources import find_source
from tests.helpers import same_values

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


@pytest.mark.skipif(HAS_TRANSFORMERS, reason="transformers is installed")
def test_without_transformers_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"needs the package transformers; pip install transformers$"):
        load_model(str(tmp_path))


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model '"):
        find_source(str(tmp_path))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = {0: "cat", 1: "dog"}
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=2, id2label=names)
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path)
    judge = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert same_values(loaded.model, judge.state_dict())
    assert (loaded.categories, loaded.weights) == (("cat", "dog"), f"{tmp_path.name}/model.safetensors")
    picture = loaded.preprocess(Image.new("RGB", (300, 200), "red"))[None]
    assert torch.equal(loaded.model(picture).logits, judge.eval()(picture).logits)
    assert load_model(str(tmp_path), weights="none", seed=4).weights == "random (seed 4)"
    with pytest.raises(UsageError, match="has no torchvision weights 'default'"):
        load_model(str(tmp_path), weights="default")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": "nope"}', "code"])
def test_a_folder_that_is_no_classifier_is_refused_and_runs_no_code(tmp_path: Path, content: str) -> None:
    pytest.importorskip("transformers")
    if content == "code":
        code = {"AutoConfig": "own.Config", "AutoModelForImageClassification": "own.Model"}
        content = json.dumps({"model_type": "own", "auto_map": code})
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"^cannot build the model of ") as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "sprung").exists()
