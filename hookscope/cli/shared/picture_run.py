"""One run from images to pages, the file of ``--raw``, and what commands share that explain an answer by maps."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

from hookscope import drawing, explain, hooks, images, models, scores, system
from hookscope.cli import process
from hookscope.cli.fields import kept_rows, option
from hookscope.cli.output.formats import Report, Section, note
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import OutputPath, file_word, is_device, model_word, refuse_input, write_picture
from hookscope.cli.shared.subject import ImageFiles, OfImages, caption_of, with_one_stdin
from hookscope.cli.shared.written import wrote_arrays
from hookscope.columns import Column, Columns, Row
from hookscope.errors import UsageError
from hookscope.system import replacement, write_atomically, write_errors

_SUFFIXES = (".npy", ".npz", ".safetensors")


class ArrayFile(contextlib.ExitStack):
    """A ``.npy`` file for one array, a ``.npz`` or ``.safetensors`` file for any number; no file without a path.

    The file is complete at the end of a ``with`` block, and does not exist if the block raises. Arrays for ``.npz`` go
    to the disk at once, others stay in memory until then.
    """

    def __init__(self, path: str | None) -> None:
        super().__init__()
        self.path = path
        self.arrays: dict[str, Any] = {}
        self._keys: set[str] = set()
        self._archive: zipfile.ZipFile | None = None

    def expect(self, count: int) -> None:
        """Refuse more than one array for a ``.npy`` file, before the first is drawn."""
        if self.path is not None and _suffix(self.path) not in _SUFFIXES[1:] and count > 1:
            asked = f"--raw {self.path} takes one array"
            raise UsageError(asked, "there are several", "name it .npz or .safetensors")

    def keep(self, key: str, values: Any) -> None:
        """Keep an array under ``key``, a path such as ``IMAGE/CLASS``."""
        if self.path is None or key in self._keys:
            return
        self._keys.add(key)
        if _suffix(self.path) == ".npz":
            with write_errors(self.path):
                self._append(key, values)
        else:
            self.arrays[key] = values

    def _append(self, key: str, values: Any) -> None:
        import numpy as np

        if self._archive is None:
            assert self.path is not None
            self._archive = self.enter_context(zipfile.ZipFile(self.enter_context(replacement(self.path)), "w"))
        with self._archive.open(f"{key}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.asanyarray(values), allow_pickle=False)

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            with contextlib.suppress(OSError):  # the disk that was full before; the first error says which file
                super().__exit__(*error)
            return
        if self.path is None or not self._keys:
            return
        with write_errors(self.path):
            super().__exit__(*error)
        if self.arrays:
            write_atomically(self.path, _content(self.path, self.arrays))
        wrote_arrays(self.path)


def check_arrays(path: str) -> None:
    if _suffix(path) not in _SUFFIXES and not is_device(path):
        raise UsageError(f"cannot write {path}", "--raw writes arrays", "name it .npy (one), .npz or .safetensors")


def _content(path: str, arrays: dict[str, Any]) -> bytes:
    import numpy as np

    if _suffix(path) == ".safetensors":
        from safetensors.numpy import save

        return save({key: np.ascontiguousarray(values) for key, values in arrays.items()})
    stream = io.BytesIO()
    [values] = arrays.values()
    np.save(stream, values)
    return stream.getvalue()


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


class PictureCommand(OfImages):
    """A command that writes a picture or page for each image to the place of ``-o``."""

    suffixes: ClassVar[tuple[str, ...]] = (".png",)
    printed: ClassVar[Columns]
    """The columns of a row."""
    totals: ClassVar[Sequence[str]] = ()
    """Lines under a table."""

    output: str | None = None
    raw: str | None = None

    @cached_property
    def place(self) -> OutputPath:
        """Where the pictures go; not to a terminal."""
        place = OutputPath.parse(self.output, self.images, *self.suffixes)
        if place.kind == "stdout" and process.standard_output().isatty():
            what = "page" if self.suffixes == (".html",) else "picture"
            raise UsageError(f"-o - would write a {what} to the terminal", do="send it to a file or a pipe")
        return place

    @cached_property
    def arrays(self) -> ArrayFile:
        file = ArrayFile(self.raw)
        file.expect(2 if len(self.images) > 1 else 1)
        return file

    def check(self) -> None:
        _ = self.place, self.arrays
        super().check()

    def draw(self, read: Sequence[images.InputImage]) -> Iterator[Any]:
        raise NotImplementedError

    def shown(self, rows: Iterable[Row]) -> Iterable[Row]:
        """The rows of a table."""
        return rows

    def run(self) -> int:
        """Draw the images of each forward pass, and print the rows as they come.

        No rows are printed if a page goes to standard output. All pages are drawn, even when the reader of the rows
        leaves.
        """
        with self.arrays:
            self.place.check_count(len(self.files.groups(self.net)))
            drawn = self.files.rows(self.net, self.draw)
            if self.place.kind != "stdout":
                rows = Section(drawn, self.printed, totals=self.totals, shown=self.shown(drawn))
                self.print(Report([rows], caption=caption_of(self.net)))
            deque(drawn, maxlen=0)
        return self.files.status

    @property
    def is_single(self) -> bool:
        return len(self.files.groups(self.net)) == 1

    def path(self, name: str, image: str, is_only: bool, calls: Sequence[hooks.Call] = ()) -> str:
        """The path of the page ``name`` of ``image``; ``is_only`` if the run makes no other page, else ``calls``."""
        path = self.place.path_for(name, self.files.words[image], self.net.name, is_only, calls)
        refuse_input(path, self.images)
        return path

    def write(self, page: Any, path: str) -> None:
        """Write a page with its provenance to ``path``, or to standard output with ``-o -``."""
        if self.place.kind == "stdout":
            write_bytes(drawing.encode_png(page))
            return
        if folder := os.path.dirname(path):
            system.make_folder(folder)
        write_picture(path, page)


def write_bytes(data: bytes) -> None:
    stream = process.standard_output().buffer
    stream.write(data)
    stream.flush()


_LONGEST_WHAT = 80  # bytes of a file name

ANSWER = Columns(
    Column("class", need=12, hide="unknown"),
    Column("label", hide="unknown"),
    Column("score", need=9),
    Column("probability", hide="random"),
)
"""The columns of the class that a map explains."""
PEAK = Columns(Column("max", need=6), Column("peak_x", need=13), Column("peak_y", need=13))
"""The columns of the highest value of a map."""


def peak(still: Any, source: explain.OverlaySource) -> Row:
    """The cells of `PEAK`."""
    x, y = (None if side is None else round(side, 1) for side in source.peak_in(still) or (None, None))
    return {"max": float(still.max()), "peak_x": x, "peak_y": y}


FRAME = Columns(Column("target", hide="zero"), Column("box", need=1, hide="zero"))
"""The columns of what else a map may explain than a class."""


def _read_cam_methods() -> Iterator[tuple[str, str]]:
    for methods in (explain.CAM_METHODS, explain.ATTENTION_METHODS):
        yield from ((name, method.summary) for name, method in methods.items())


cam_methods = kept_rows("cam", "explain", _read_cam_methods)
"""The methods of class activation maps and what they do, by name."""


def _reference(path: str) -> ImageFiles:
    """The image of ``--similar-to``, which must be one; how many frames the model takes is not known yet."""
    files = ImageFiles([path])
    files.read_first()
    return files


class ExplainCommand(PictureCommand):
    """What commands share that explain an answer by maps."""

    suffixes = (".png", *drawing.ANIMATIONS)
    tells_classes = True

    target: scores.Target | scores.Boxes | str | None = shared.target_option(
        "What to explain. A class",
        parse=scores.parse_target,
        more=" box:K explains the K-th best detection, from 0; box:K:class explains its class only, not its"
        " position. A function of the output: file.py:function or package.module:function.  [default: top:1]",
        default=None,
    )
    against: scores.Target | None = option(
        "Subtract the score of this class: explain why --target and not this class.",
        metavar="CLASS",
        parse=scores.Target,
        shell_complete=shared.complete_classes,
    )
    region: scores.Region | None = shared.in_file(
        "Pixels of a segmentation to explain: a mask of the image's size, non-zero inside, or the pixel X,Y."
        "  [default: where the class has the highest score]",
        metavar="FILE|X,Y",
        parse=scores.Region.parse,
    )
    similar_to: ImageFiles | None = shared.in_file(
        "Explain the similarity to IMAGE: the cosine similarity of the two outputs, instead of the score of a class.",
        metavar="IMAGE",
        parse=_reference,
    )
    categories: tuple[str, ...] | None = shared.categories_option()
    output: str | None = shared.output_option("picture")
    raw: str | None = shared.out_file(
        "Keep the numbers of the maps too: .npy, or several in one .npz or .safetensors.", writes=check_arrays
    )
    cmap: str | None = shared.colour_map_option("Any matplotlib colour map.", default="inferno")

    @property
    def choice(self) -> scores.TargetChoice:
        files = self.similar_to
        similar_to = None if files is None else partial(files.read, files.paths[0])
        return scores.TargetChoice(self.target, self.region, self.against, similar_to)

    def check(self) -> None:
        if self.similar_to is not None:
            with_one_stdin([*self.images, *self.similar_to.paths])
        super().check()
        self.place.check_count(len(self.images))
        if self.choice.count > 1:
            self.arrays.expect(self.choice.count)
            if self.place.takes_one:
                raise UsageError(f"--target {self.target} makes several pictures", do="give -o a folder, or one target")

    @property
    def is_animation(self) -> bool:
        return self.place.kind == "file" and self.place.path.lower().endswith(tuple(drawing.ANIMATIONS))

    @cached_property
    def names(self) -> tuple[str, ...] | None:
        return shared.categories_of(self.net, self.categories)

    @cached_property
    def target_of(self) -> Callable[..., Any]:
        """What is explained of an image."""
        if self.is_animation and self.net.preprocess.frames < 2:
            exists = f"{self.net.name} takes an image: there are no frames for an animation"
            raise UsageError(f"cannot write {self.place.path}", exists, "name it .png")
        return scores.target_for(self.choice, self.net, self.names)

    def draw(self, read: Sequence[images.InputImage]) -> Iterator[Any]:
        [image] = read
        source, word = explain.OverlaySource.of(image, self.net), self.files.words[image.name]
        target = partial(self.target_of, image)
        return self.explained(Explanation(self, image, self.net.prepare(image), source, word, target))

    def explained(self, explanation: Explanation) -> Iterator[Any]:
        """Write the pictures of one image, and yield a row for each."""
        raise NotImplementedError


@dataclass(frozen=True)
class Explanation:
    """One image of a run, as a file and as a tensor; ``word`` is its name as part of file names.

    ``target(classes)`` returns what is explained; without ``classes`` they come from ``--target``.
    """

    run: ExplainCommand
    image: images.InputImage
    tensor: Any
    source: explain.OverlaySource
    word: str
    target: Callable[..., Any]

    @property
    def net(self) -> models.LoadedModel:
        return self.run.net

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.net.inputs(self.tensor)

    def note(self, text: str) -> None:
        note(f"Note: {self.source.origin.image}: {text}")

    def note_unseen(self, answer: scores.Score) -> None:
        """Print a note on a class that the model does not see."""
        if answer.low_probability:
            self.note(f"{answer.name}: {explain.why_unseen(answer)}")

    def clip(self, maps: Any, scale_of: Sequence[Any], cmap: str | None) -> Any:
        """The strip or the animation of maps of a clip; None where neither is asked for and the maps have one frame."""
        items = [maps] if isinstance(maps, explain.Saliency) else maps
        if self.run.is_animation:
            return explain.animate_clip(maps, self.image, self.net, scale_of=scale_of, cmap=cmap)
        if self.net.preprocess.frames > 1 and any(len(item.values) > 1 and item.values.ndim > 2 for item in items):
            return explain.draw_clip(maps, self.image, self.net, scale_of=scale_of, cmap=cmap)
        return None

    def write(self, page: Any, what: str, answer: scores.Score, alone: bool) -> str:
        """Write the picture of one score and return its path; ``alone`` if the image has no other picture.

        ``what`` names the method and the chosen layers: runs that differ in them write different files.
        """
        name = f"{self.word}-{model_word(self.net.name)}-{file_word(what, _LONGEST_WHAT)}-{answer.key}.png"
        path = self.run.path(name, self.source.origin.image, alone and len(self.run.files.paths) == 1)
        self.run.write(page, path)
        return path

    def row(self, columns: Columns, result: Any, path: str, **more: Any) -> Row:
        """The row of one map, with the position of its highest value in pixels of the image."""
        frame = self.source.frame_of(result.prediction, result.seen)
        more["class"] = result.prediction.index
        return columns.row(
            result.prediction,
            result,
            image=self.source.origin.image,
            target=result.prediction.target or None,
            box=frame and [round(side, 1) for side in frame],
            shape=result.values.shape,
            weights=self.net.weights,
            file=path,
            **peak(result.still, self.source),
            **more,
        )
