"""Where sheets are written: what ``-o`` means, names that sort in layer order and say what they show."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from hookscope.errors import UsageError, WriteError
from hookscope.files import check_folder, check_writable
from hookscope.layers import Call

__all__ = ["Destination", "call_names", "model_word"]

_LONGEST_NAME = 180


@dataclass(frozen=True, slots=True)
class Destination:
    """What ``-o`` asks for: a ``file``, a ``folder``, ``stdout``, or by ``default`` a name of ours."""

    kind: str
    path: str = ""

    @classmethod
    def parse(cls, output: str | None, images: Sequence[str]) -> Destination:
        """Decide what ``output`` means, and refuse what cannot work before anything is computed.

        A folder exists, ends in a slash or has no suffix; a file ends in ``.png`` or is a device.

        Raises:
            UsageError: for a suffix other than ``.png``, several images into one file, an output that is an input.
            WriteError: for a place that cannot be written.
        """
        if output is None:
            return cls("default")
        if output == "-":
            if len(images) > 1:
                raise UsageError("-o - takes one picture", f"there are {len(images)} images", "give one, or a folder")
            return cls("stdout")
        if os.path.isdir(output) or output.endswith(("/", os.sep)) or _would_be_folder(output):
            check_folder(output)
            return cls("folder", output)
        device = os.path.exists(output) and not os.path.isfile(output)
        if os.path.splitext(output)[1].lower() != ".png" and not device:
            raise UsageError(f"cannot write {output}", "sheets are PNG files", "name it .png, or give a folder")
        if len(images) > 1 and os.path.splitext(output)[1]:
            raise UsageError(f"-o {output} takes one picture", f"there are {len(images)} images", "give a folder")
        check_writable(output)
        _refuse_input(output, images)
        return cls("file", output)

    def path_for(self, name: str, image: str, model: str, alone: bool) -> str:
        """The path of the sheet ``name``; ``alone`` when it is the only one.

        Raises:
            UsageError: when several sheets were to go to one file or to standard output.
        """
        if self.kind in ("file", "stdout") and not alone:
            where = "-o -" if self.kind == "stdout" else f"-o {self.path}"
            raise UsageError(f"{where} takes one picture", "the selection has several", "choose one layer or a folder")
        if self.kind == "default":
            return name if alone else os.path.join(f"{image_word(image)}-{model_word(model)}", name)
        return os.path.join(self.path, name) if self.kind == "folder" else self.path


def _would_be_folder(output: str) -> bool:
    return not os.path.exists(output) and not os.path.splitext(output)[1]


def _refuse_input(output: str, images: Sequence[str]) -> None:
    for image in images:
        if os.path.exists(output) and os.path.exists(image) and os.path.samefile(output, image):
            raise WriteError(f"-o {output} is the image itself", do="write somewhere else")


def file_word(text: str) -> str:
    """``text`` as part of a file name: letters, digits and a few signs as they are, all else as ``%XX``."""
    return quote(text, safe=" .-_#+=@,()", errors="surrogatepass").lstrip(".") or "_"


def model_word(model: str) -> str:
    """The model argument as part of a file name.

    Example:
        >>> model_word("resnet34"), model_word("nets/small.py:make")
        ('resnet34', 'small.py-make')
    """
    return re.sub(r"[^\w.+-]+", "-", re.split(r"[/\\\\]", model)[-1]).strip("-.") or "model"


def image_word(image: str) -> str:
    """The name of an image without folder and suffix, as part of a file name."""
    if image == "-":
        return "stdin"
    return file_word(os.path.splitext(os.path.basename(image))[0])[:80]


def call_names(calls: Sequence[Call], image: str, model: str) -> list[str]:
    """File names of the sheets of ``calls``, in order: they say image, model, index and layer and sort like the calls.

    A call outside the counted types has the index of the call before it and a letter.

    Example:
        >>> call_names([Call("conv1", "Conv2d", 0, 0), Call("bn1", "BatchNorm2d", 0, None)], "a/cat.jpg", "resnet18")
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
        stem = f"{image_word(image)}-{model_word(model)}-{place}-{file_word(call.key or call.type)}"
        names.append(f"{stem[:_LONGEST_NAME]}.png")
    return _distinct(names)


def _letters(number: int) -> str:
    """1 to ``a``, 26 to ``z``, 27 to ``za``: longer sorts later."""
    full, rest = divmod(number - 1, 26)
    return "z" * full + "abcdefghijklmnopqrstuvwxyz"[rest]


def _distinct(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    for at, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[at] = f"{name[:-4]}~{seen[name]}.png"
    return names
