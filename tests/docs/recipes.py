"""The recipes of a page, followed: their code is added to files of a copy of the package, and examples run in it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.pages import ROOT, Example, commands


def follow(examples: list[Example]) -> dict[str, str]:
    """What each command line marked ``recipe run`` prints when all recipes are followed."""
    lines = [line for example in examples if example.mark == "recipe run" for line in commands(example)]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "hookscope", Path(folder) / "hookscope", ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / "samples").symlink_to(ROOT / "samples")
        for example in examples:
            if example.mark.startswith("recipe: "):
                with (Path(folder) / example.mark.removeprefix("recipe: ")).open("a") as file:
                    file.write(f"\n\n{example.code}" if file.tell() else example.code)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT), str(ROOT / "samples")])}
        program = [sys.executable, "-P", "-m", "tests.docs.recipes"]
        done = subprocess.run(
            program, input=json.dumps(lines), env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
        )
    return dict(zip(lines, json.loads(done.stdout), strict=True))


def main() -> None:
    """Run the command lines of standard input with the package on the path, and print what each prints."""
    from tests.docs.running import newcomer, run_line

    lines = json.load(sys.stdin)
    with newcomer():
        printed = [run_line(line, terminal=True) for line in lines]
    json.dump(printed, sys.stdout)


if __name__ == "__main__":
    main()
