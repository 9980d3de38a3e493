"""Where pages are written: the meaning of ``-o``, and file names that sort in layer order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from urllib.parse import quote

from hookscope.errors import UsageError, WriteError
from hookscope.hooks import Call
from hookscope.system import check_folder, check_writable

# In bytes: file systems take 255. The parts are cut so that the index stays, by which names sort and differ.
_LONGEST_NAME, _LONGEST_IMAGE, _LONGEST_MODEL = 180, 80, 60


@dataclass(frozen=True, slots=True)
class OutputPath:
    """What ``-o`` asks for: a ``file``, a ``folder``, ``stdout``, or ``default``, a name that hookscope makes."""

    kind: str
    path: str = ""

    @classmethod
    def parse(cls, output: str | None, images: Sequence[str]) -> OutputPath:
        """Parse ``output``, and refuse what cannot work before anything is computed.

        A folder exists, ends in a slash or has no suffix; a file ends in ``.png`` or is a device.

        Raises:
            UsageError: another suffix than ``.png``, or several images into one file.
            WriteError: the place cannot be written.
        """
        if output is None:
            return cls("default")
        if not output:
            raise UsageError("-o has no value", do="name a file or a folder, or write - for standard output")
        if output == "-":
            output_path = cls("stdout")
            output_path.check_count(len(images) - 1)
            return output_path
        if os.path.isdir(output) or output.endswith(("/", os.sep)) or _would_be_folder(output):
            check_folder(output)
            return cls("folder", output)
        device = os.path.exists(output) and not os.path.isfile(output)
        if os.path.splitext(output)[1].lower() != ".png" and not device:
            raise UsageError(f"cannot write {output}", "sheets are PNG files", "name it .png, or give a folder")
        output_path = cls("file", output)
        output_path.check_count(len(images) - 1)
        check_writable(output)
        refuse_input(output, images)
        return output_path

    def check_count(self, passes: int) -> None:
        """Refuse more than one forward pass into one file: two images are one pass for optical flow alone.

        Raises:
            UsageError: there are more.
        """
        if self.kind in ("file", "stdout") and passes > 1:
            what = "-o -" if self.kind == "stdout" else f"-o {self.path}"
            raise UsageError(f"{what} takes one picture", "there are several images", "give one image, or a folder")

    def path_for(self, name: str, word: str, model: str, alone: bool) -> str:
        """The path of the sheet ``name`` of the image called ``word``; ``alone`` when it is the only one.

        Raises:
            UsageError: when several sheets were to go to one file or to standard output.
        """
        if self.kind in ("file", "stdout") and not alone:
            where = "-o -" if self.kind == "stdout" else f"-o {self.path}"
            raise UsageError(f"{where} takes one picture", "the selection has several", "choose one layer or a folder")
        if self.kind == "default":
            return name if alone else os.path.join(f"{word}-{model_word(model)}", name)
        return os.path.join(self.path, name) if self.kind == "folder" else self.path


def _would_be_folder(output: str) -> bool:
    return not os.path.exists(output) and not os.path.splitext(output)[1]


def refuse_input(output: str, images: Iterable[str]) -> None:
    """Refuse to write over one of the ``images``, such as a sheet of an earlier run that ``*.png`` named.

    Raises:
        WriteError: ``output`` is an image of the run.
    """
    if not os.path.isfile(output):
        return
    for image in images:
        if os.path.isfile(image) and os.path.samefile(output, image):
            raise WriteError(f"cannot write {output}: it is the image {image} itself", do="choose another name")


def file_word(text: str) -> str:
    """``text`` as part of a file name: letters, digits and a few signs as they are, all else as ``%XX``.

    Example:
        >>> file_word("blocks/0:café")
        'blocks%2F0%3Acafé'
    """
    return "".join(map(_file_letter, text)).lstrip(".") or "_"


def _file_letter(letter: str) -> str:
    if letter.isalnum() or letter in " .-_#+=@,()" or (letter > "\x7f" and letter.isprintable()):
        return letter
    return quote(letter, safe="", errors="surrogatepass")


def _cut(text: str, limit: int) -> str:
    """The beginning of ``text``, at most ``limit`` bytes long."""
    return text.encode()[:limit].decode(errors="ignore")


def model_word(model: str) -> str:
    """The model argument as part of a file name.

    Example:
        >>> model_word("resnet34"), model_word("nets/small.py:make")
        ('resnet34', 'small.py-make')
    """
    word = re.sub(r"[^\w.+-]+", "-", re.split(r"[/\\\\]", model)[-1]).strip("-.")
    return _cut(word, _LONGEST_MODEL) or "model"


def image_words(images: Sequence[str]) -> list[str]:
    """The names of images without folder and suffix, as parts of file names; no two are the same.

    Example:
        >>> image_words(["a/cat.jpg", "b/cat.jpg", "-"])
        ['cat', 'cat~2', 'stdin']
    """
    stems = [os.path.splitext(os.path.basename(image))[0] for image in images]
    words = ["stdin" if image == "-" else file_word(stem) for image, stem in zip(images, stems, strict=True)]
    return _distinct([_cut(word, _LONGEST_IMAGE) for word in words])


def call_names(calls: Sequence[Call], word: str, model: str) -> list[str]:
    """File names of the sheets of ``calls``: image, model, index and layer; they sort in the order of the calls.

    A call outside the counted types has the index of the call before it and a letter.

    Args:
        calls: In order of execution.
        word: The name of the image from `image_words`.
        model: The model argument.

    Example:
        >>> call_names([Call("conv1", "Conv2d", 0, 0), Call("bn1", "BatchNorm2d", 0, None)], "cat", "resnet18")
        ['cat-resnet18-000-conv1.png', 'cat-resnet18-000a-bn1.png']
    """
    width = max([3, *(len(str(call.index)) for call in calls if call.index is not None)])
    names, last, letters = [], -1, 0
    for call in calls:
        if call.index is not None:
            last, letters = call.index, 0
            place = f"{last:0{width}d}"
        else:
            letters += 1
            # before the first index: a sign that sorts before any digit
            place = (f"{last:0{width}d}" if last >= 0 else "0" * (width - 1) + "-") + _letters(letters)
        names.append(_cut(f"{word}-{model_word(model)}-{place}-{file_word(call.key or call.type)}", _LONGEST_NAME))
    return [f"{name}.png" for name in names]


def _letters(number: int) -> str:
    """1 to ``a``, 26 to ``z``, 27 to ``za``: longer sorts later."""
    full, rest = divmod(number - 1, 26)
    return "z" * full + "abcdefghijklmnopqrstuvwxyz"[rest]


def _distinct(words: list[str]) -> list[str]:
    """``words`` with ``~2`` behind the second of the same words; upper case and lower case count as the same."""
    distinct: dict[str, str] = {}
    for word in words:
        tries = (word if number == 1 else f"{word}~{number}" for number in count(1))
        free = next(name for name in tries if name.casefold() not in distinct)
        distinct[free.casefold()] = free
    return list(distinct.values())
