"""What a size, a file name and a list of images on the command line mean."""

from pathlib import Path

import click
import pytest
import torch
from PIL import Image
from torch import nn

from hookscope.cli.shared.options import input_size
from hookscope.cli.shared.output_paths import image_words
from hookscope.errors import ImageError, UsageError
from hookscope.images import find_pictures, spread
from hookscope.models import load_model
from hookscope.models.loaded import check_size


@pytest.mark.parametrize(
    ("text", "size"), [("96", (96, 96)), ("96,64", (96, 64)), ("96x64", (96, 64)), ("8,9,7", (8, 9, 7))]
)
def test_sizes(text: str, size: tuple[int, ...]) -> None:
    assert input_size(text) == size
    with pytest.raises(click.BadParameter):
        input_size(f"{text},")


def test_a_size_with_channels_says_where_they_come_from() -> None:
    with pytest.raises(UsageError, match="its channels are its own; give height x width, such as 96x64"):
        check_size(nn.Conv2d(1, 1, 1), (1, 96, 64))


def test_a_picture_of_the_asked_size_is_not_cut(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\ndef net(): return nn.Conv2d(3, 2, 3)\n")
    image = Image.frombytes("RGB", (96, 64), bytes(range(256)) * 72)
    net = load_model(f"{tmp_path}/net.py", input_size=(64, 96), mean=0, std=1)
    by_hand = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(64, 96, 3).movedim(-1, 0) / 255
    assert torch.equal(net.prepare(image), by_hand)


def test_names_that_begin_alike_stay_apart_in_two_runs() -> None:
    [one], [two] = image_words(["x" * 100 + "1.png"]), image_words(["x" * 100 + "2.png"])
    assert one != two and len(one) == len(two) == 80 and image_words(["short.png"]) == ["short"]


def test_a_limit_takes_images_of_every_folder(tmp_path: Path) -> None:
    for folder in "abc":
        (tmp_path / folder).mkdir()
        for number in range(4):
            Image.new("RGB", (2, 2)).save(tmp_path / folder / f"{number}.png")
    taken = [Path(path).parent.name for path in find_pictures([str(tmp_path)], limit=3)]
    assert taken == ["a", "b", "c"] and spread(["x", "y"], 5) == ["x", "y"]
    with pytest.raises(ImageError, match=r"no file fits the pattern '.*/z\*\.png'"):
        find_pictures([f"{tmp_path}/z*.png"])
