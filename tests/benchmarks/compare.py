"""Hookscope beside its yardsticks: processor time and peak memory of whole processes, in turn, medians.

    python tests/benchmarks/compare.py            # some ten minutes; the blog recipe alone takes two
    python tests/benchmarks/compare.py --runs 3 layer listing
    python tests/benchmarks/compare.py --against ../before    # beside the hookscope of another checkout

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
ROOT = HERE.parents[1]
CAT = str(ROOT / "samples" / "cat.jpg")
HOOKSCOPE = [sys.executable, "-P", "-m", "hookscope"]  # -P: not the hookscope of the current folder


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


def cost(command, checkout=ROOT):
    """Processor seconds and peak MiB of one process that imports the hookscope of ``checkout``."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program has its bytecode
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = status
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def compare(title, ours, theirs, runs, checkout=None):
    """Print a row; with ``checkout`` the same command there takes the place of ``theirs``."""
    theirs = (theirs,) if checkout is None else (ours, checkout)
    cost(ours), cost(*theirs)
    pairs = [(cost(ours), cost(*theirs)) for _ in range(runs)]
    (a, a_peak), (b, b_peak) = (
        [statistics.median(side) for side in zip(*sides, strict=True)] for sides in zip(*pairs, strict=True)
    )
    ratio = statistics.median(left[0] / right[0] for left, right in pairs)
    print(f"{title:44} {a:6.2f} s {a_peak:6.0f} MiB   {b:6.2f} s {b_peak:6.0f} MiB   {ratio:.3f} x", flush=True)


def in_process(title, name, *about, checkout=None):
    """Print the figures of a yardstick that measures itself, here and in ``checkout``."""
    for root in (ROOT, checkout) if checkout else (ROOT,):
        environment = {**os.environ, "PYTHONPATH": str(root)}
        command = [sys.executable, str(root / "tests" / "benchmarks" / "yardsticks.py"), name, *about]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        print(f"{title:44} {'before: ' if root != ROOT else ''}{answer.stdout.strip()}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["layer", "all", "listing", "inspect", "stats", "memory", "capture", "drawing", "cam", "ablate", "watch"]
    parser.add_argument("which", nargs="*", default=usual, help="also: plan")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--against", type=Path, help="another checkout, whose hookscope takes the yardsticks' place")
    args = parser.parse_args()
    other = args.against and args.against.resolve()
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
                compare(title, ours, yardstick(theirs), args.runs, other)
        if "plan" in args.which:
            alone = ["sh", "-c", f'XDG_CACHE_HOME=$(mktemp -d -p "{folder}") exec "$@"', "-", *HOOKSCOPE]  # no cache
            for model in ("resnet50", "vit_b_16", "efficientnet_b0"):
                listing = [*alone, "list-layers", model]
                for options in ([], ["--train", "--optimizer", "adamw"]):
                    plan = [*alone, "plan", model, "--batch-size", "32", *options]
                    title = " ".join(["plan", *options[:1], model, "/ list-layers"])
                    compare(title, plan, listing, min(args.runs, 5), other)
        if "inspect" in args.which:
            inspect = [*HOOKSCOPE, "inspect", "--weights", "none", "-o", os.path.join(folder, "page.html")]
            for model in ("resnet34", "efficientnet_b0", "resnet152"):
                sheets = [*visualize, model, CAT, "--channels", "all"]
                runs = args.runs if model == "resnet34" else min(args.runs, 3)
                compare(f"inspect {model} / its sheets", [*inspect, model, CAT], sheets, runs, other)
        if "stats" in args.which:
            few, many = photographs(make(folder, "few")), photographs(make(folder, "many"), 256)
            stats = [*HOOKSCOPE, "stats", "--weights", "none", "resnet34"]
            loop = yardstick("loop", source=few)
            compare("stats resnet34, 64 images / plain loop", [*stats, few], loop, args.runs, other)
            compare("stats resnet34, 256 images / 64 images", [*stats, many], [*stats, few], 1, other)
        if "memory" in args.which:
            ours, floor = [*visualize, "resnet152", CAT], yardstick("floor", "resnet152")
            compare("visualize resnet152 / floor of resnet152", ours, floor, min(args.runs, 3), other)
    rows = {
        "capture": [("capture of 36 convolutions", "capture", "resnet34", CAT)],
        "drawing": [
            ("36 sheets, all channels", "drawing", "resnet34", CAT),
            ("36 figures of the blog, 64 channels", "blog", "resnet34", CAT),
        ],
        "cam": [
            ("Grad-CAM of resnet18 layer4", "cam", "resnet18", "layer4"),
            ("Grad-CAM of mobilenet_v2 features.17", "cam", "mobilenet_v2", "features.17"),
            ("Grad-CAM of densenet121 features.denseblock4", "cam", "densenet121", "features.denseblock4"),
        ],
        "ablate": [
            ("all channels of resnet18 layer4.1.conv2", "ablate", "resnet18", "layer4.1.conv2"),
            ("all channels of resnet34 layer2.0.conv1", "ablate", "resnet34", "layer2.0.conv1"),
        ],
        "watch": [
            ("training step under Monitor", "watch", "resnet18", "plain"),
            ("the same with stop_on='non-finite'", "watch", "resnet18", "stop"),
        ],
    }
    for which in args.which:
        for title, name, *about in rows.get(which, []):
            in_process(title, name, *about, checkout=other if name != "blog" else None)


if __name__ == "__main__":
    main()
