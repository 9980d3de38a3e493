"""What hookscope is measured against, each a process of its own: ``python yardsticks.py floor resnet34 cat.jpg``."""

import importlib.util
import statistics
import sys
import time


def seconds(call):
    """The processor time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def compare(ours, theirs, runs, names):
    """Print the medians of two calls that run in turn, and the median ratio of ours to theirs."""
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(runs)]
    ratio = statistics.median(a / b for a, b in pairs)
    medians = [1000 * statistics.median(times) for times in zip(*pairs, strict=True)]
    rows = [f"{name} {median:.1f} ms" for name, median in zip(names, medians, strict=True)]
    sys.stdout.write(f"{', '.join(rows)}, ratio {ratio:.3f}\n")


def floor(model, image):
    """Import, build, open and resize the picture, one forward pass: what no program of this kind can do without."""
    import torch
    import torchvision
    from PIL import Image
    from torchvision.transforms import functional as F

    net = torchvision.models.get_model(model, weights=None).eval()
    picture = F.to_tensor(Image.open(image).convert("RGB").resize((224, 224)))[None]
    with torch.no_grad():
        net(picture)
    return net, picture


def torchinfo(model, image):
    """The usual way to list a model's layers."""
    import torchvision
    from torchinfo import summary

    sys.stdout.write(str(summary(torchvision.models.get_model(model, weights=None), (1, 3, 224, 224))))


def blog(model, image, most=None):
    """The usual recipe: keep every convolution's output, then a 20 x 20 inch figure of 8 x 8 subplots a layer."""
    import tempfile

    import matplotlib

    matplotlib.use("Agg")
    import torch
    from matplotlib import pyplot

    net, picture = floor(model, image)
    outputs = []
    for layer in net.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        net(picture)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for at, output in enumerate(outputs[: int(most) if most else None]):
            pyplot.figure(figsize=(20, 20))
            for channel in range(min(64, output.shape[1])):
                pyplot.subplot(8, 8, channel + 1)
                pyplot.imshow(output[0, channel], cmap="gray")
                pyplot.axis("off")
            pyplot.savefig(f"{folder}/{at}.png")
            pyplot.close()
    sys.stdout.write(f"drawing {time.process_time() - start:.3f}\n")


def drawing(model, image):
    """hookscope's drawing of every convolution, all channels: reduce, draw, encode, write."""
    import os
    import tempfile

    import hookscope
    from hookscope.drawing.files import write_png
    from hookscope.drawing.sheet import Origin, draw_call
    from hookscope.drawing.tiles import reduce_output
    from hookscope.hooks.calls import Call

    net = hookscope.load_model(model, weights="none")
    picture = net.preprocess(hookscope.open_image(image))
    with hookscope.capture(net.model) as activations:
        net.model(picture[None])
    hookscope.draw_sheet(activations[0][0])  # imports matplotlib's colour maps, as the recipe has pyplot imported
    origin = Origin(model, net.weights, image, "", "")
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for at, (name, output) in enumerate(activations.items()):
            sheet = draw_call(reduce_output(output), Call(name, "Conv2d", 0, at), origin)
            write_png(sheet.image, os.path.join(folder, f"{at}.png"), sheet.provenance)
    sys.stdout.write(f"drawing {time.process_time() - start:.3f}\n")


def loop(model, folder):
    """Every picture of a folder through the model, as anybody writes it: a DataLoader, batches of 16, no workers."""
    from pathlib import Path

    import torch
    import torchvision
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    class Pictures(Dataset):
        def __init__(self):
            self.paths = sorted(Path(folder).glob("*.jpg"))
            self.transforms = torchvision.models.get_model_weights(model).DEFAULT.transforms()

        def __len__(self):
            return len(self.paths)

        def __getitem__(self, at):
            return self.transforms(Image.open(self.paths[at]).convert("RGB"))

    net = torchvision.models.get_model(model, weights=None).eval()
    with torch.no_grad():
        for batch in DataLoader(Pictures(), batch_size=16):
            net(batch)


def capture(model, image):
    """A forward pass under `hookscope.capture` and a plain one."""
    import torch

    import hookscope

    net, picture = floor(model, image)

    def captured():
        with hookscope.capture(net) as activations:
            net(picture)
        assert len(activations) > 0

    with torch.no_grad():
        compare(captured, lambda: net(picture), 40, ("captured", "plain"))


def cam(model, layer):
    """Grad-CAM of one layer by `hookscope.class_activation_maps`, by grad-cam, and by torch-cam where installed."""
    import warnings

    import torch
    import torchvision

    import hookscope

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    net = torchvision.models.get_model(model, weights=None).eval()
    picture = torch.randn(1, 3, 224, 224)

    def ours():
        hookscope.class_activation_maps(net, picture, layer, 3)

    def theirs():
        with GradCAM(net, [net.get_submodule(layer)]) as maps:
            maps(picture, [ClassifierOutputTarget(3)])

    ours(), theirs()
    compare(ours, theirs, 15, ("hookscope", "grad-cam"))
    if importlib.util.find_spec("torchcam"):
        from torchcam.methods import GradCAM as TorchCam

        def torch_cam():
            with TorchCam(net, layer) as maps:
                maps(3, net(picture))

        torch_cam()
        compare(ours, torch_cam, 40, ("hookscope", "torch-cam"))


def ablate(model, layer):
    """Each channel of one layer set to 0 by `hookscope.ablate_each`, and by a plain hook on batches of 16 copies."""
    import torch
    import torchvision

    import hookscope

    net = torchvision.models.get_model(model, weights=None).eval()
    picture, module = torch.randn(1, 3, 224, 224), net.get_submodule(layer)
    channels = module.out_channels

    def plain():
        scores = []
        for begin in range(0, channels, 16):

            def silence(module, args, output, begin=begin):
                for at in range(len(output)):
                    output[at, begin + at] = 0

            handle = module.register_forward_hook(silence)
            scores.append(net(picture.expand(min(16, channels - begin), -1, -1, -1))[:, 3])
            handle.remove()
        return torch.cat(scores)

    def ours():
        ranking = hookscope.ablate_each(net, (picture,), layer, 3)
        return torch.tensor([row.score_after for row in sorted(ranking.channels, key=lambda row: row.channel)])

    with torch.no_grad():
        assert torch.allclose(plain().double(), ours().double(), atol=1e-4)
        compare(ours, plain, 1, ("hookscope", "a plain hook"))


def watch(model, way):
    """A training step unwatched, watched and not sampled, and sampled, in turn; batch 32 of 64 x 64.

    The way ``stop`` looks at every step for values that are not finite.
    """
    import tempfile

    import torch
    import torchvision

    import hookscope

    torch.set_num_threads(2)
    torch.manual_seed(0)
    net = torchvision.models.get_model(model, weights=None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    judge = torch.nn.CrossEntropyLoss()
    x, y = torch.randn(32, 3, 64, 64), torch.randint(0, 1000, (32,))

    def step():
        optimizer.zero_grad()
        judge(net(x), y).backward()
        optimizer.step()

    times = {"unwatched": [], "sampled": [], "not sampled": []}
    step()
    stop = "non-finite" if way == "stop" else None
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(15):
            with hookscope.Monitor(every=50, log=f"{folder}/run.ndjson", stop_on=stop):
                times["sampled"].append(seconds(step))
                times["not sampled"] += [seconds(step) for _ in range(3)]
            times["unwatched"] += [seconds(step) for _ in range(3)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [f"{name} {1000 * value:.1f} ms ({value / medians['unwatched']:.3f} x)" for name, value in medians.items()]
    sys.stdout.write(", ".join(rows) + "\n")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
