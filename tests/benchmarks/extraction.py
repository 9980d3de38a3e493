"""`extract` beside a plain DataLoader loop, and thingsvision: processor time of each on the same photographs, in turn.

    python tests/benchmarks/extraction.py resnet50 avgpool            # 208 photographs, batches of 16, some minutes
    python tests/benchmarks/extraction.py shapes features.10 --workers 2 --runs 5
    python tests/benchmarks/extraction.py resnet50 avgpool --thingsvision /path/to/its/bin/python
    python tests/benchmarks/extraction.py memory                      # peak memory of 1,000 and of 100,000 small images

Each run is a process of its own, whose time counts from when the model is built: reading, preparing, the forward pass,
and its workers. The first batch of each is not counted apart: everybody pays for it.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def steps(name):
    """The usual transforms: those of the weights of ``shapes``, and of torchvision's resnet50."""
    from torchvision import transforms as t

    size, crop = (128, 128) if name == "shapes" else (232, 224)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return t.Compose([t.Resize(size), t.CenterCrop(crop), t.ToTensor(), t.Normalize(mean, std)])


def model_of(name):
    """A model without hookscope, because thingsvision's environment may not have it; ``shapes`` is a squeezenet."""
    import torch
    import torchvision

    torch.manual_seed(0)
    if name == "shapes":
        return torchvision.models.get_model("squeezenet1_1", weights=None, num_classes=10).eval()
    return torchvision.models.get_model(name, weights=None).eval()


class Files:
    """The data set that everybody writes: opens, converts, transforms."""

    def __init__(self, paths, transform):
        self.paths, self.transform = paths, transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, at):
        from PIL import Image

        return self.transform(Image.open(self.paths[at]).convert("RGB"))


def plain(model, layer, paths, workers, batch_size):
    import torch
    from torch.utils.data import DataLoader

    data, kept, rows = Files(paths, steps(model)), [], []
    net = model_of(model)

    def run():
        handle = net.get_submodule(layer).register_forward_hook(
            lambda module, args, output: kept.append(output.clone())
        )
        with torch.no_grad():
            for batch in DataLoader(data, batch_size=batch_size, num_workers=workers):
                net(batch)
                rows.append(kept.pop().flatten(1).numpy())
        handle.remove()
        return sum(map(len, rows))

    return run


def hookscope(model, layer, paths, workers, batch_size):
    from dataclasses import replace

    from hookscope import RunSettings, extract, load_model
    from hookscope.models import as_loaded

    net = load_model(model, weights="none" if model != "shapes" else "auto")
    net = replace(as_loaded(model_of(model)), preprocess=net.preprocess)

    def run():
        batches = extract(net, paths, layer, pool="flatten", run=RunSettings(batch_size, workers))
        return sum(len(batch.features[layer].numpy()) for batch in batches)

    return run


def thingsvision(model, layer, paths, workers, batch_size):
    from thingsvision import get_extractor_from_model
    from torch.utils.data import DataLoader

    extractor = get_extractor_from_model(model=model_of(model), device="cpu", backend="pt")
    data = Files(paths, steps(model))

    def run():
        batches = DataLoader(data, batch_size=batch_size, num_workers=workers)
        return len(extractor.extract_features(batches=batches, module_name=layer, flatten_acts=True))

    return run


def small_images(model, layer, paths, workers, batch_size):
    from torch import nn

    from hookscope import RunSettings, extract
    from tests.nets import named

    net = named(conv=nn.Conv2d(3, 16, 3, 4), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=nn.Linear(16, 10))

    def run():
        return sum(batch.count for batch in extract(net, paths, layer, run=RunSettings(batch_size, workers)))

    return run


def measure(role, *args):
    """In a process of its own: rows, processor seconds of the run and of its workers, peak MiB, elapsed seconds."""
    run = globals()[role](*args)
    before, began = sum(os.times()[:4]), time.monotonic()
    rows = run()
    spent, elapsed = sum(os.times()[:4]) - before, time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([rows, spent, peak, elapsed]))


def in_process(python, role, model, layer, folder, workers, batch_size):
    command = [python, __file__, model, layer, "--role", role, "--images", folder, "--workers", str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("PYTHONPATH", None)
    if python == sys.executable:
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [*command, "--batch-size", str(batch_size)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    if done.returncode:
        sys.exit(f"{role} failed: {' '.join(command)}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("layer", nargs="?", default="avgpool")
    parser.add_argument("--images")
    parser.add_argument("--count", type=int, default=208)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--role")
    parser.add_argument("--thingsvision", metavar="PYTHON")
    chosen = parser.parse_args()
    if chosen.role:
        paths = sorted(entry.path for entry in os.scandir(chosen.images))
        return measure(chosen.role, chosen.model, chosen.layer, paths, chosen.workers, chosen.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        if chosen.model == "memory":
            return memory(folder, chosen.workers)
        sys.path.insert(0, str(HERE))
        from compare import photographs

        folder = chosen.images or photographs(folder, chosen.count)
        asked = (chosen.model, chosen.layer, folder, chosen.workers, chosen.batch_size)
        roles = [(sys.executable, "plain"), (sys.executable, "hookscope")]
        if chosen.thingsvision:
            roles += [(chosen.thingsvision, "plain"), (chosen.thingsvision, "thingsvision")]
        spent = {role: [] for role in roles}
        for _ in range(chosen.runs):
            for role in roles:
                spent[role].append(in_process(*role, *asked))
        for at, (python, role) in enumerate(roles):
            rows, peak = spent[python, role][0][0], max(run[2] for run in spent[python, role])
            seconds = statistics.median(run[1] for run in spent[python, role])
            pairs = zip(spent[python, role], spent[roles[at // 2 * 2]], strict=True)
            ratio = statistics.median(ours[1] / plain[1] for ours, plain in pairs)
            print(f"{role:12} {rows} rows  {seconds:8.2f} s  {ratio:.3f} x plain  {peak:5.0f} MiB  {python}")
    return None


def memory(folder, workers):
    """Peak memory for more and more images of 16 x 16 pixels."""
    from PIL import Image

    for count in (1000, 100_000):
        for at in range(len(os.listdir(folder)), count):
            Image.new("RGB", (16, 16), (at % 256, at // 256 % 256, at % 7)).save(f"{folder}/{at:06}.bmp")
        rows, spent, peak, _ = in_process(sys.executable, "small_images", "memory", "fc", folder, workers, 16)
        print(f"{rows:7,} images  {spent:7.1f} s  {peak:6.0f} MiB")


if __name__ == "__main__":
    main()
