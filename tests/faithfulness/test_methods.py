"""Maps of random weights, and files of maps and of boxes: what is read, and what is refused in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from torch import Tensor, nn

from hookscope import class_activation_maps, sanity_check
from hookscope.errors import HookscopeError, ModelError
from hookscope.faithfulness import over_input, read_boxes, read_maps
from hookscope.faithfulness.methods import random_weights, rank_correlation
from tests.helpers import refused, same_values, seeded
from tests.nets import Function, named


@pytest.mark.parametrize("levels", [3, 1000])
def test_the_rank_correlation_is_scipys(levels: int) -> None:
    random = np.random.default_rng(levels)
    first, second = random.integers(0, levels, (2, 6, 7)).astype(np.float32)
    expected = spearmanr(first.ravel(), second.ravel()).statistic
    assert rank_correlation(first, second) == pytest.approx(expected, abs=1e-12)
    assert rank_correlation(first, np.ones_like(first)) == 0


def test_layers_become_random_from_the_last_to_run_and_come_back() -> None:
    net = named(last=nn.Conv2d(3, 4, 3), first=nn.Conv2d(3, 3, 3), norm=nn.BatchNorm2d(4), unused=nn.Linear(2, 2))
    model = seeded(
        lambda: Function(lambda own, x: own.part.norm(own.part.last(own.part.first(x))).mean((2, 3)), part=net)
    )
    state, changed = {name: tensor.clone() for name, tensor in model.state_dict().items()}, list[set[str]]()

    def explain() -> Tensor:
        changed.append({name for name, values in model.named_parameters() if not torch.equal(values, state[name])})
        with torch.no_grad():
            return model(torch.ones(1, 3, 9, 9))

    found = sanity_check(model, explain, steps=9)
    assert [(row.layer, row.layers) for row in found] == [("part.norm", 1), ("part.last", 2), ("part.first", 3)]
    assert changed[0] == set() and "part.last.weight" not in changed[1]
    assert {"part.last.weight", "part.first.weight"} <= changed[3] and "part.unused.weight" not in changed[3]
    assert same_values(model, state)


def test_the_weights_come_back_after_an_error() -> None:
    net = seeded(lambda: nn.Linear(5, 5))
    state, random = {name: tensor.clone() for name, tensor in net.state_dict().items()}, torch.get_rng_state()

    def fails() -> None:
        with random_weights(net):
            assert not torch.equal(net.weight, state["weight"])
            assert sorted(net.bias.tolist()) == sorted(state["bias"].tolist())
            raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match="as planned"):
        fails()
    assert same_values(net, state) and net.weight.grad is None and torch.equal(torch.get_rng_state(), random)


def test_random_weights_keep_the_size_of_the_values() -> None:
    net = seeded(lambda: nn.Linear(300, 300))
    size = float(net.weight.detach().square().mean().sqrt())
    with random_weights(net):
        assert float(net.weight.detach().square().mean().sqrt()) == pytest.approx(size, rel=0.02)


def test_a_map_of_the_input_alone_does_not_change() -> None:
    net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    x = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    [edges] = sanity_check(net, lambda: (net(x), x[0].diff(dim=-1).abs().sum(0))[1])
    [gradcam] = sanity_check(net, lambda: class_activation_maps(net, x, "0", 2))
    assert edges.correlation == 1 and abs(gradcam.correlation) < 0.9


def test_a_model_without_weights_is_refused() -> None:
    net = nn.ReLU()
    with pytest.raises(ModelError, match="ReLU has no weights to randomise"):
        sanity_check(net, lambda: net(torch.ones(2, 2)))


MAP = np.arange(12, dtype=np.uint8).reshape(3, 4)
WRITERS: dict[str, Callable[[Path], Any]] = {
    "mine.npy": lambda path: np.save(path, MAP),
    "mine.npz": lambda path: np.savez(path, values=MAP),
    "mine.png": lambda path: Image.fromarray(MAP).save(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_with_one_map_names_it(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    [(key, values)] = read_maps(str(tmp_path / name), "cat").items()
    assert key == "mine" and np.array_equal(values, MAP)


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_has_a_file_for_each_image(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "maps"
    folder.mkdir()
    WRITERS[name](folder / f"cat{Path(name).suffix}")
    [(key, values)] = read_maps(f"{folder}/", "cat").items()
    assert key == "maps" and np.array_equal(values, MAP)
    with pytest.raises(HookscopeError, match=r"has no map of dog; name it dog\.npy, \.npz or \.png"):
        read_maps(str(folder), "dog")


def test_several_maps_have_their_own_names_and_those_of_other_images_are_left_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", first=MAP, second=MAP + 1)
    assert read_maps(str(tmp_path / "own.npz"), "cat").keys() == {"first", "second"}
    np.savez(tmp_path / "raw.npz", **{"cat/a.b/3": MAP, "cat/c/3": MAP, "dog/a.b/5": MAP, "cats/a.b/3": MAP})
    assert read_maps(str(tmp_path / "raw.npz"), "cat").keys() == {"a.b/3", "c/3"}
    assert read_maps(str(tmp_path / "raw.npz"), "dog").keys() == {"raw"}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.npy", None, "cannot be read: No such file"),
        ("text.npy", b"text", "cannot be read: it is not a .npy file"),
        ("text.npz", b"PK\3\4", "cannot be read: it is not a .npz file"),
        ("text.png", b"\x89PNG\r\n\x1a\n", "cannot be read: it is not a .png file"),
        ("empty.npz", {}, "empty.npz holds no map; save one"),
        ("objects.npz", {"a": np.array([{}], object)}, "cannot be read"),
        ("other.npz", {"dog/a/1": MAP}, "has no map of cat; it has maps of dog; give the same images"),
    ],
)
def test_what_holds_no_map_is_one_line(tmp_path: Path, name: str, content: Any, says: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **content)
    with refused(HookscopeError, says, part="holds"):
        read_maps(str(path), "cat")


def test_a_map_of_the_photograph_is_cut_to_what_the_network_saw() -> None:
    whole = np.repeat([[0.0, 0, 1, 1, 2, 2]], 4, 0)
    assert np.allclose(over_input(whole, (6, 4), (2, 0, 6, 4), (4, 4)), [[1, 1, 2, 2]] * 4)
    assert over_input(whole, (6, 4), (0, 0, 6, 4), (4, 6)) is whole
    assert over_input(MAP, (6, 4), (2, 0, 6, 4), (4, 4)) is MAP


@pytest.mark.parametrize(
    "given", ["[1, 2, 3, 4]", "[[1, 2, 3, 4]]", '{"box": [1, 2, 3, 4]}', '{"boxes": [[1, 2, 3, 4]]}']
)
def test_a_box_is_written_in_any_of_these_ways(tmp_path: Path, given: str) -> None:
    (tmp_path / "boxes.json").write_text(f'{{"cat.jpg": {given}}}')
    assert read_boxes(str(tmp_path / "boxes.json")) == {"cat.jpg": [[1, 2, 3, 4]]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "has no boxes; write"),
        ('{"cat.jpg": []}', "'cat.jpg' in"),
        ('{"cat.jpg": [1, 2, 3]}', "has no box; write"),
        ('{"cat.jpg": {"left": 1}}', "has no box; write"),
        ('{"cat.jpg": [[1, 2, 3, 4], "x"]}', "has no box; write"),
    ],
)
def test_a_file_without_boxes_is_one_line(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "boxes.json").write_text(content)
    with refused(HookscopeError, says, part="holds"):
        read_boxes(str(tmp_path / "boxes.json"))
