"""``python -m tests.docs [PAGE]...``: run the examples, and write what they print and draw, and what is generated."""

import os
import sys
import tempfile
import time
from pathlib import Path

from tests.docs.pages import PAGES
from tests.docs.renew import renew, same_picture, shown_pictures


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in sys.argv[1:] or PAGES:
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as scratch:
                text = renew(name, Path(scratch))
                changes = [] if text == PAGES[name].read_text() else ["text"]
                if changes:
                    PAGES[name].write_text(text)
                for stored in shown_pictures(name):
                    drawn = Path(scratch) / stored.name
                    if drawn.exists() and not (stored.exists() and same_picture(stored, drawn)):
                        stored.parent.mkdir(parents=True, exist_ok=True)
                        stored.write_bytes(drawn.read_bytes())
                        changes.append(stored.name)
            print(f"{time.perf_counter() - start:6.1f} s  {name}  {' '.join(changes)}")  # noqa: T201


if __name__ == "__main__":
    main()
