"""Fonts of the system for the characters that DejaVu Sans, the font of all pictures, does not have."""

from __future__ import annotations

import contextlib
import os
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import matplotlib
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from hookscope.system import cache as stored

_DEJAVU = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
_EAST_ASIAN = "Chinese, Japanese or Korean"
_SYMBOLS = "emoji or symbol"
_ADVICE = {_EAST_ASIAN: "Noto Sans CJK", _SYMBOLS: "Noto Emoji"}


class FontWarning(UserWarning):
    """No installed font has some characters of a picture."""


@dataclass(frozen=True)
class Face:
    """A font file and its characters; one that is not ``scalable``, such as of colour emoji, has a single size."""

    path: str
    family: str
    style: str
    scalable: bool
    characters: frozenset[int]

    @property
    def order(self) -> tuple[bool, bool, bool, str]:
        """Outlines first, then fonts without serifs that are neither bold nor italic."""
        other = any(word in self.family for word in ("Serif", "Mono", "Ming", "Unifont"))
        return not self.scalable, other, self.style not in ("Regular", "Book", "Roman", "Normal"), self.path


def font_parts(text: str, outlines: bool = False) -> list[tuple[str, Face | None]]:
    """``text`` cut where the font changes, with the font of each part; None is DejaVu Sans.

    Characters that no font has stay with DejaVu Sans, which draws boxes: a `FontWarning` says so, once for each
    script. With ``outlines`` only scalable fonts count, the ones that matplotlib draws.
    """
    faces = _faces(text, outlines)
    if not faces:
        return [(text, None)]
    parts: list[tuple[str, Face | None]] = []
    for character in text:
        face = parts[-1][1] if parts and _joins(character) else faces.get(character)
        if parts and parts[-1][1] == face:
            parts[-1] = (parts[-1][0] + character, face)
        else:
            parts.append((character, face))
    return parts


def font_families(text: str) -> list[str]:
    """The families with which matplotlib draws ``text``: DejaVu Sans, then those for the characters that it lacks."""
    faces = {face.path: face for _, face in font_parts(text, outlines=True) if face is not None}
    known = {entry.fname for entry in font_manager.fontManager.ttflist} if faces else set()
    for path in faces.keys() - known:
        font_manager.fontManager.addfont(path)
    return ["DejaVu Sans", *dict.fromkeys(face.family for face in faces.values())]


def boxes(text: str) -> int:
    """How many characters of ``text`` matplotlib draws as boxes."""
    if text.isascii():
        return 0
    faces = _faces(text, True)
    return sum(ord(letter) not in _dejavu() and letter not in faces and not _joins(letter) for letter in text)


@lru_cache(maxsize=4096)
def _faces(text: str, outlines: bool) -> dict[str, Face]:
    """The font of each character of ``text`` that DejaVu Sans lacks, the same for a script where one has it whole."""
    chosen: dict[str, Face] = {}
    scripts: dict[str, set[str]] = {}
    for character in "" if text.isascii() else text:
        if ord(character) not in _dejavu() and not _joins(character):
            scripts.setdefault(_script(character), set()).add(character)
    for script, wanted in scripts.items():
        face = _best(_remembered(), wanted, outlines)
        if face is None or not _codes(wanted) <= face.characters:
            face = _best(_installed(), wanted, outlines)
        while face is not None:
            chosen |= {character: face for character in wanted if ord(character) in face.characters}
            wanted -= chosen.keys()
            _remember(face)
            face = _best(_installed(), wanted, outlines) if wanted else None
        if wanted:
            warnings.warn(
                f"no installed font has some {script} characters: pictures show boxes instead; "
                f"install a font that has them, such as {_ADVICE.get(script, f'Noto Sans {script}')}",
                FontWarning,
                stacklevel=2,
            )
    return chosen


def _best(faces: list[Face], wanted: set[str], outlines: bool) -> Face | None:
    """The first of the ``faces`` that has the most of the characters; None if none has any."""
    codes = _codes(wanted)
    usable = [face for face in faces if face.scalable or not outlines]
    best = max(usable, key=lambda face: len(codes & face.characters), default=None)
    return best if best and codes & best.characters else None


def _codes(characters: set[str]) -> set[int]:
    return {ord(character) for character in characters}


def _joins(character: str) -> bool:
    """Whether ``character`` changes the one before it, such as an accent or the skin colour of an emoji."""
    return unicodedata.category(character) in ("Mn", "Me", "Cf") or "\U0001f3fb" <= character <= "\U0001f3ff"


def _script(character: str) -> str:
    if unicodedata.category(character) in ("So", "Sk"):
        return _SYMBOLS
    if unicodedata.east_asian_width(character) in "WF":
        return _EAST_ASIAN
    return unicodedata.name(character, "unknown").split()[0].capitalize()


@cache
def _dejavu() -> frozenset[int]:
    return frozenset(FT2Font(_DEJAVU).get_charmap())


@cache
def _installed() -> list[Face]:
    """All fonts of the system and those that somebody added to matplotlib, the preferred ones first."""
    paths = {*font_manager.findSystemFonts(), *(entry.fname for entry in font_manager.fontManager.ttflist)}
    return sorted(_read(paths), key=lambda face: face.order)


def _read(paths: Iterable[str]) -> Iterator[Face]:
    for path in paths:
        with contextlib.suppress(
            OSError, RuntimeError, ValueError, TypeError
        ):  # no font, or one that FreeType cannot read
            font = FT2Font(path)
            if "LastResort" not in font.family_name.replace(" ", ""):  # it has a box for every character
                characters = frozenset(font.get_charmap())
                yield Face(path, font.family_name, font.style_name, bool(font.scalable), characters)


@cache
def _remembered() -> list[Face]:
    """The fonts that were of use before; to look through all fonts of a system takes up to a second."""
    paths = stored.load("fonts", {})
    return list(_read(paths)) if isinstance(paths, list) else []


def _remember(face: Face) -> None:
    if face not in _remembered():
        _remembered().append(face)
        stored.store("fonts", {}, [face.path for face in _remembered()])
