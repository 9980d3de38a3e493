"""`python -m tests.golden`: show where the cases differ from their golden files; `--write`: write them anew."""

import argparse
import fnmatch
import os
import tempfile
import time

from tests.golden import golden_files
from tests.golden.commands import CASES
from tests.golden.comparison import differences
from tests.golden.recording import record


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="*", help="of GROUP/CASE, as in 'cam/*'")
    parser.add_argument("--write", action="store_true", help="write the golden files of the cases that differ")
    parser.add_argument("--times", action="store_true", help="show how long each case takes")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for group in CASES:
            _go_through(group, words)


def _go_through(group: str, words: argparse.Namespace) -> None:
    golden = {kind: golden_files.read(kind, group) for kind in golden_files.KINDS}
    for case in CASES[group]:
        if not fnmatch.fnmatchcase(f"{group}/{case}", words.pattern):
            continue
        start = time.perf_counter()
        now = record(CASES[group][case])
        if words.times:
            print(f"{time.perf_counter() - start:6.2f} s  {group}/{case}")  # noqa: T201
        for kind in golden_files.KINDS:
            moved = list(differences(golden[kind].get(case), now[kind]))
            if moved:
                print("\n    ".join([f"{group}/{case}:", *(f"{kind}{line}"[:200] for line in moved[:8])]))  # noqa: T201
                golden[kind][case] = now[kind]
    if words.write:
        for kind in golden_files.KINDS:
            ordered = {case: golden[kind][case] for case in CASES[group] if case in golden[kind]}
            golden_files.write(kind, group, ordered)


if __name__ == "__main__":
    main()
