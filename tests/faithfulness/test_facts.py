"""Files of maps and of boxes: what is read from each kind, and what is refused in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hookscope.errors import HookscopeError
from hookscope.faithfulness import over_input, read_boxes, read_maps
from tests.helpers import refused

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
    with refused(HookscopeError, says, begins=False):
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
        ("[]", "has no boxes; write"),
        ('{"cat.jpg": []}', "'cat.jpg' in"),
        ('{"cat.jpg": [1, 2, 3]}', "has no box; write"),
        ('{"cat.jpg": {"left": 1}}', "has no box; write"),
        ('{"cat.jpg": [[1, 2, 3, 4], "x"]}', "has no box; write"),
    ],
)
def test_a_file_without_boxes_is_one_line(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "boxes.json").write_text(content)
    with refused(HookscopeError, says, begins=False):
        read_boxes(str(tmp_path / "boxes.json"))
