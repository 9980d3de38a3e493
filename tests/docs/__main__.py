"""``python -m tests.docs [PAGE]...``: run the examples, and write what they print and draw, and what is generated."""

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from PIL import Image

from tests.docs.pages import PAGES
from tests.docs.renew import renew, same_picture, shown_pictures


def main() -> None:
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in sys.argv[1:] or PAGES:
            start = time.process_time()
            try:
                changes = _write(name)
            except Exception as error:
                traceback.print_exception(error, limit=-1)
                changes, failed = ["FAILED"], 1
            print(f"{time.process_time() - start:6.1f} s  {name}  {' '.join(changes)}")  # noqa: T201
    sys.exit(failed)


def _write(name: str) -> list[str]:
    """Write a page and its pictures anew, and name what has changed."""
    with tempfile.TemporaryDirectory() as scratch:
        text = renew(name, Path(scratch))
        changes = [] if text == PAGES[name].read_text() else ["text"]
        PAGES[name].write_text(text)
        for stored in shown_pictures(name):
            drawn = Path(scratch) / stored.name
            if drawn.exists() and not (stored.exists() and same_picture(stored, drawn)):
                stored.parent.mkdir(parents=True, exist_ok=True)
                _store(drawn, stored)
                changes.append(stored.name)
    return changes


def _store(drawn: Path, stored: Path) -> None:
    """Copy a picture; a plot, which has few colours, with 256 of them: a third of the bytes."""
    if (picture := Image.open(drawn)).mode == "RGBA":
        picture.convert("RGB").quantize(dither=Image.Dither.NONE).save(stored, optimize=True)
    else:
        stored.write_bytes(drawn.read_bytes())


if __name__ == "__main__":
    main()
