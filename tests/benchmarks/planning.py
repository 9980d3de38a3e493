"""`plan` beside `list-layers` that is not cached: processor time of whole processes, in turn.

python tests/benchmarks/planning.py resnet50 vit_b_16 efficientnet_b0     # five runs of each, a minute for each model
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile

PROGRAMS = {
    "list-layers": ["list-layers"],
    "plan": ["plan", "--batch-size", "32"],
    "plan --train": ["plan", "--batch-size", "32", "--train", "--optimizer", "adamw"],
}
RUNS = 5


def seconds(model, arguments):
    """The processor time of one process, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "hookscope", arguments[0], model, *arguments[1:]]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            command, env=os.environ | {"XDG_CACHE_HOME": cache}, stdout=subprocess.DEVNULL, check=True, timeout=120
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    for name in sys.argv[1:]:
        times = [[seconds(name, arguments) for arguments in PROGRAMS.values()] for _ in range(RUNS)]
        for place, program in enumerate(PROGRAMS):
            median = statistics.median(run[place] for run in times)
            ratio = statistics.median(run[place] / run[0] for run in times)
            sys.stdout.write(f"{name}  {program}: {median:.2f} s, {ratio:.2f} x list-layers\n")
