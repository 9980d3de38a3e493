"""A folder of transformers as MODEL."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hookscope.errors import ModelError, UsageError
from hookscope.models.load import load_model
from hookscope.models.sources import find_source
from hookscope.scores.score_targets import detections
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
    assert load_model(str(tmp_path), weights="default").weights == loaded.weights
    with pytest.raises(UsageError, match="has no torchvision weights 'V1'"):
        load_model(str(tmp_path), weights="V1")


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


def small(transformers: Any, name: str) -> Any:
    """A small random model with its image processor's class."""
    named = {"id2label": dict(enumerate(("person", "car", "dog")))}
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    sides = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 6}
    sides |= {
        f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in (("ffn_dim", 16), ("attention_heads", 2))
    }
    config = {
        "Detr": lambda cls: cls(backbone_config=backbone, **sides, **named),
        "ConditionalDetr": lambda cls: cls(backbone_config=backbone, **sides, **named),
        "Yolos": lambda cls: cls(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=[64, 96],
            num_detection_tokens=6, **named,
        ),
        "RTDetr": lambda cls: cls(num_queries=6, decoder_layers=1, **named),
        "Segformer": lambda cls: cls(depths=[1] * 4, hidden_sizes=[8, 16, 32, 64], decoder_hidden_size=8, **named),
    }[name](getattr(transformers, f"{name}Config"))  # fmt: skip
    task = "SemanticSegmentation" if name == "Segformer" else "ObjectDetection"
    torch.manual_seed(0)
    return getattr(transformers, f"{name}For{task}")(config).eval(), getattr(transformers, f"{name}ImageProcessor")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Detr", "ConditionalDetr", "Yolos", "RTDetr", "Segformer"])
def test_detectors_and_segmentation_models_of_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    judge, processor_class = small(transformers, name)
    sizes = {"Yolos": {"shortest_edge": 64, "longest_edge": 96}, "Segformer": {"height": 64, "width": 64}}
    processor = processor_class(**({"size": sizes[name]} if name in sizes else {}))
    judge.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert loaded.family == ("segmentation" if name == "Segformer" else "batched_detection")
    assert (loaded.categories, loaded.weights) == (("person", "car", "dog"), f"{tmp_path.name}/model.safetensors")
    picture = Image.linear_gradient("L").resize((120, 80)).convert("RGB")
    prepared = loaded.preprocess(picture)[None]
    wanted = processor(picture, return_tensors="pt")["pixel_values"]
    assert prepared.shape == wanted.shape and (prepared - wanted).abs().max() < 0.05
    with torch.no_grad():
        own, theirs = loaded.model(prepared), judge(prepared)
    assert torch.equal(own.logits, theirs.logits)
    assert load_model(str(tmp_path), weights="none", seed=4, device="cpu").weights == "random (seed 4)"
    if name != "Segformer":
        least = 0.05
        [found] = detections(own)
        [listed] = processor.post_process_object_detection(theirs, threshold=least, target_sizes=[(1, 1)])
        order = listed["scores"].argsort(descending=True, stable=True)
        count = min(len(order), 5)
        assert count and torch.allclose(found.scores[:count], listed["scores"][order][:count])
