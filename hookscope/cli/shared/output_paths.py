"""Where pages and plots are written: the meaning of ``-o``, and file names that sort in the order of the calls."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from hookscope import drawing, models
from hookscope.cli.shared.written import wrote
from hookscope.errors import UsageError, WriteError
from hookscope.hooks import Call
from hookscope.system import cache, check_folder, check_writable, write_atomically

# In bytes: file systems take 255. The parts are cut so that the index, by which names sort and differ, is whole.
_LONGEST_NAME, _LONGEST_IMAGE, _LONGEST_MODEL = 180, 80, 60
_MOST_WORDS = 3  # in the name of a page
_CONTENT = {".png": "sheets are PNG files", ".html": "the page is an HTML file"}


@dataclass(frozen=True, slots=True)
class OutputPath:
    """The value of ``-o``: a ``file``, a ``folder``, ``stdout``, or ``default``, a name that hookscope makes."""

    kind: str
    path: str = ""

    @classmethod
    def parse(cls, output: str | None, images: Sequence[str], suffix: str = ".png", *more: str) -> OutputPath:
        """Parse ``output``, and refuse what cannot work before anything is computed.

        A folder exists, ends in a slash or has no suffix; a file ends in ``suffix`` or one of ``more``, or is a device.
        A picture takes one image, an HTML page takes all.
        """
        if output is None:
            return cls("default")
        if not output:
            raise UsageError("-o has no value", do="name a file or a folder, or write - for standard output")
        if output != "-" and _is_folder(output):
            check_folder(output)
            return cls("folder", output)
        output_path = cls("stdout" if output == "-" else "file", output)
        if output != "-" and os.path.splitext(output)[1].lower() not in (suffix, *more) and not is_device(output):
            exists = _CONTENT[suffix] + (f", of clips also {' or '.join(more)}" if more else "")
            raise UsageError(f"cannot write {output}", exists, f"name it {suffix}, or give a folder")
        if suffix == ".png":
            output_path.check_count(len(images) - 1)
        if output != "-":
            check_writable(output)
            refuse_input(output, images)
        return output_path

    @property
    def takes_one(self) -> bool:
        return self.kind in ("file", "stdout")

    def check_count(self, passes: int) -> None:
        """Refuse several forward passes for one file; only for optical flow two images are one pass."""
        if self.takes_one and passes > 1:
            exists = "there are several images"
            raise UsageError(f"-o {self.path} takes one picture", exists, "give one image, or a folder")

    def path_for(self, name: str, word: str, model: str, alone: bool, calls: Sequence[Call] = ()) -> str:
        """The path of the page ``name`` of the image called ``word``.

        ``alone`` if the run makes no other page, else ``calls`` may say of which calls the pages are.
        """
        if self.takes_one and not alone:
            exists, do = "the selection has several", "choose one layer or a folder"
            if len({call.name for call in calls}) == 1:  # a layer that runs again
                exists = f"{calls[0].name} runs {len(calls)} times"
                do = f"choose one call, such as --layer {calls[0].name}#{calls[-1].call}, or a folder"
            raise UsageError(f"-o {self.path} takes one picture", exists, do)
        if self.kind == "default":
            return name if alone else os.path.join(f"{word}-{model_word(model)}", name)
        return os.path.join(self.path, name) if self.kind == "folder" else self.path


def _is_folder(output: str) -> bool:
    is_new = not os.path.exists(output) and not os.path.splitext(output)[1]
    return is_new or os.path.isdir(output) or output.endswith(("/", os.sep))


def is_device(path: str) -> bool:
    """Whether ``path`` exists and is neither a file nor a folder, such as ``/dev/null``."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def is_same_file(path: str, other: str) -> bool:
    """Whether both paths name one file, which need not exist yet."""
    if os.path.exists(path) and os.path.exists(other):
        return not is_device(path) and os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def refuse_input(output: str, inputs: Iterable[str], kind: str = "image") -> None:
    """Refuse to write over an input of the run, such as a sheet of an earlier run that ``*.png`` matches."""
    for path in inputs:
        if os.path.isfile(path) and is_same_file(output, path):
            error = WriteError if kind == "image" else UsageError
            raise error(f"cannot write {output}: it is the {kind} {path} itself", do="choose another name")


def check_plot(path: str) -> None:
    if cache.other_homes() and (base := cache.user_folder()):  # before matplotlib is imported
        os.environ.setdefault("MPLCONFIGDIR", os.path.join(base, "matplotlib"))
    drawing.plot_suffix(path)


def suffix_check(*suffixes: str) -> Callable[[str], None]:
    """What refuses a file name that does not end in one of ``suffixes``."""

    def check(path: str) -> None:
        if os.path.splitext(path)[1].lower() not in suffixes and not is_device(path):
            raise UsageError(f"cannot write {path}", _CONTENT[suffixes[0]], f"name it {suffixes[0]}")

    return check


def is_file_name(path: str) -> bool:
    """Whether ``-o`` names a file: neither a folder nor standard output."""
    return path not in ("", "-") and not _is_folder(path)


def page_name(words: Sequence[str], model: str) -> str:
    """The file name of the page of all images, which ``words`` name: ``cat-dog-resnet34.html``."""
    named = "-".join(words)
    if len(words) > _MOST_WORDS or len(named.encode()) > _LONGEST_NAME - _LONGEST_MODEL:
        named = f"{len(words)}-images"
    return f"{named}-{model_word(model)}.html"


def write_html(path: str, page: str) -> None:
    write_atomically(path, page.encode(errors="backslashreplace"))
    wrote(path)


def write_picture(path: str, image: Any) -> None:
    """Write a PNG with the provenance that the image carries, or a list of frames as an animation."""
    if isinstance(image, list):
        drawing.write_animation(image, path)
    else:
        drawing.write_png(image, path)
    wrote(path)


def write_plot(path: str, figure: Any, provenance: Mapping[str, Any] | None = None) -> None:
    write_atomically(path, drawing.figure_bytes(figure, drawing.plot_suffix(path), provenance))
    wrote(path)


def file_word(text: str, limit: int = _LONGEST_NAME) -> str:
    """``text`` as part of a file name: letters, digits and a few signs stay, other characters become ``%XX``."""
    return _cut("".join(map(_file_letter, text)).lstrip(".") or "_", limit)


def _file_letter(letter: str) -> str:
    if letter.isalnum() or letter in " .-_~#+=@,()" or (letter > "\x7f" and letter.isprintable()):
        return letter
    return "".join(f"%{byte:02X}" for byte in letter.encode(errors="surrogatepass"))


def _cut(text: str, limit: int) -> str:
    """``text``, at most ``limit`` bytes long: of a longer one the beginning, and a checksum of all of it."""
    whole = text.encode()
    if len(whole) <= limit:
        return text
    return f"{whole[: limit - 9].decode(errors='ignore')}~{zlib.crc32(whole):08x}"


def model_word(model: str) -> str:
    """The model argument as part of a file name: ``nets/small.py:make(3)`` becomes ``small.py-make-3``."""
    word = re.sub(r"[^\w.+-]+", "-", models.short_name(model)).strip("-.")
    return _cut(word, _LONGEST_MODEL) or "model"


def image_words(images: Sequence[str]) -> list[str]:
    """The names of images without folder and suffix, as parts of file names; no two are the same."""
    stems = [os.path.splitext(os.path.basename(image))[0] for image in images]
    named = zip(images, stems, strict=True)
    return _distinct(["stdin" if image == "-" else file_word(stem, _LONGEST_IMAGE) for image, stem in named])


def call_names(calls: Sequence[Call], word: str, model: str) -> list[str]:
    """File names of the sheets of ``calls``, which are in order of execution, as their names are when sorted.

    A name has the ``word`` of the image, the model, the index and the layer: ``cat-resnet18-000-conv1.png``. A call
    outside the counted types has the index of the call before it and a letter: ``cat-resnet18-000a-bn1.png``.
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
