"""Hookscope beside its yardsticks: processor time and peak memory of whole processes, in turn, medians.

    python tests/benchmarks/compare.py            # some ten minutes; the blog recipe alone takes two
    python tests/benchmarks/compare.py --runs 3 layer listing

Nothing here fails a build: the machine is noisy, the reader judges. Run it on a quiet one; torch's threads wait by
spinning, so other work shows as processor time of theirs.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CAT = str(HERE.parents[1] / "samples" / "cat.jpg")
HOOKSCOPE = [sys.executable, "-m", "hookscope"]


def yardstick(name, model="resnet34", source=CAT):
    return [sys.executable, str(HERE / "yardsticks.py"), name, model, source]


def make(folder, name):
    os.mkdir(os.path.join(folder, name))
    return os.path.join(folder, name)


def photographs(folder, count=64, size=(500, 375)):
    """So many JPEGs of the usual size in ``folder``: parts of the samples, seeded."""
    import random

    from PIL import Image

    chance = random.Random(0)
    samples = [Image.open(path).convert("RGB") for path in sorted(Path(CAT).parent.glob("*.jpg"))]
    for at in range(count):
        picture = samples[at % len(samples)]
        side = min(picture.width / size[0], picture.height / size[1]) * chance.uniform(0.5, 1)
        wide, high = size[0] * side, size[1] * side
        x, y = chance.uniform(0, picture.width - wide), chance.uniform(0, picture.height - high)
        picture.resize(size, box=(x, y, x + wide, y + high)).save(f"{folder}/{at:02}.jpg", quality=90)
    return str(folder)


def cost(command):
    """Processor seconds and peak MiB of one process."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program has its bytecode
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = status
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def compare(title, ours, theirs, runs):
    cost(ours), cost(theirs)
    pairs = [(cost(ours), cost(theirs)) for _ in range(runs)]
    (a, a_peak), (b, b_peak) = (
        [statistics.median(side) for side in zip(*sides, strict=True)] for sides in zip(*pairs, strict=True)
    )
    ratio = statistics.median(left[0] / right[0] for left, right in pairs)
    print(f"{title:44} {a:6.2f} s {a_peak:6.0f} MiB   {b:6.2f} s {b_peak:6.0f} MiB   {ratio:.3f} x", flush=True)


def told(name, *about):
    """What a yardstick that measures itself says."""
    answer = subprocess.run(
        yardstick(name, *about),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
    )
    return answer.stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["layer", "all", "listing", "stats", "capture", "memory", "drawing", "cam", "ablate", "watch"]
    parser.add_argument("which", nargs="*", default=usual)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    print(f"{'':44} {'hookscope':>17}   {'yardstick':>17}   ratio of processor time, median of {args.runs} pairs")
    with tempfile.TemporaryDirectory() as folder:
        visualize = [*HOOKSCOPE, "visualize", "--weights", "none", "-o", folder]
        jobs = {
            "layer": [
                ("visualize resnet34 --layer 30 / floor", [*visualize, "resnet34", CAT, "--layer", "30"], "floor")
            ],
            "all": [("visualize resnet34 / floor", [*visualize, "resnet34", CAT], "floor")],
            "listing": [
                ("list-layers resnet34, repeated / torchinfo", [*HOOKSCOPE, "list-layers", "resnet34"], "torchinfo"),
                ("--help / torchinfo", [*HOOKSCOPE, "--help"], "torchinfo"),
            ],
        }
        for which in args.which:
            for title, ours, theirs in jobs.get(which, []):
                compare(title, ours, yardstick(theirs), args.runs)
        if "stats" in args.which:
            few, many = photographs(make(folder, "few")), photographs(make(folder, "many"), 256)
            stats = [*HOOKSCOPE, "stats", "--weights", "none", "resnet34"]
            compare("stats resnet34, 64 images / plain loop", [*stats, few], yardstick("loop", source=few), args.runs)
            compare("stats resnet34, 256 images / 64 images", [*stats, many], [*stats, few], 1)
        if "memory" in args.which:
            ours = [*visualize, "resnet152", CAT]
            compare(
                "visualize resnet152 / floor of resnet152", ours, yardstick("floor", "resnet152"), min(args.runs, 3)
            )
    if "capture" in args.which:
        print("capture of 36 convolutions, in process:", told("capture"))
    if "drawing" in args.which:
        ours, theirs = told("drawing"), told("blog")
        ratio = float(theirs.split()[-1]) / float(ours.split()[-1])
        print(f"36 sheets: hookscope, all channels: {ours} s; blog, 64 channels: {theirs} s; {ratio:.0f} x")
    if "cam" in args.which:
        for about in (("resnet18", "layer4"), ("densenet121", "features.denseblock4")):
            print(f"Grad-CAM of {' '.join(about)}, in process: {told('cam', *about)}")
    if "ablate" in args.which:
        for about in (("resnet18", "layer4.1.conv2"), ("resnet34", "layer2.0.conv1")):
            print(f"every channel of {' '.join(about)} ablated, in process: {told('ablate', *about)}")
    if "watch" in args.which:
        print("training step of resnet18 under Monitor, in process:", told("watch", "resnet18", "plain"))
        print("the same with stop_on='non-finite':", told("watch", "resnet18", "stop"))


if __name__ == "__main__":
    main()
