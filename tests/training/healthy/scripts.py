"""Sound training scripts in the styles that people write, each short: they return what they have trained."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.nets import Function
from tests.training.watched import train

CLASSES = 5
SCRIPTS: dict[str, Callable[[], nn.Module]] = {}


def script(train: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    SCRIPTS[train.__name__] = train
    return train


def pictures(count: int, side: int = 16, channels: int = 3) -> TensorDataset:
    """Smooth templates of a few classes, shifted and with noise, of about zero mean and unit size, and their labels."""
    random = torch.Generator().manual_seed(3)
    rough = torch.randn(CLASSES, channels, side // 4, side // 4, generator=random)
    templates = F.interpolate(rough, size=side, mode="bilinear")
    labels = torch.randint(CLASSES, (count,), generator=random)
    shifts = torch.randint(-2, 3, (count,), generator=random).tolist()
    images = torch.stack([templates[c].roll(by, -1) for c, by in zip(labels.tolist(), shifts, strict=True)])
    return TensorDataset(1.2 * images + 0.4 * torch.randn(images.shape, generator=random), labels)


def batches(count: int, size: int, **options: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """``count`` batches of ``size`` pictures, each epoch of eight batches in a new order."""
    loader = DataLoader(pictures(8 * size, **options), size, shuffle=True)
    for at in range(0, count, 8):
        yield from list(loader)[: count - at]


@script
def mnist() -> nn.Module:
    """Two convolutions, functional ReLU, dropout, log_softmax and Adadelta, with a validation pass."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.dropout1(F.max_pool2d(F.relu(net.conv2(F.relu(net.conv1(x)))), 2)).flatten(1)
        return F.log_softmax(net.fc2(net.dropout2(F.relu(net.fc1(x)))), 1)

    dropouts = {"dropout1": nn.Dropout(0.25), "dropout2": nn.Dropout(0.5)}
    layers = {"fc1": nn.Linear(576, 32), "fc2": nn.Linear(32, CLASSES)}
    net = Function(forward, conv1=nn.Conv2d(1, 8, 3), conv2=nn.Conv2d(8, 16, 3), **dropouts, **layers)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for _ in range(3):
        net.train()
        train(net, optimizer, batches(24, 32, channels=1), F.nll_loss)
        net.eval()
        with torch.no_grad():
            for x, y in batches(2, 32, channels=1):
                F.nll_loss(net(x), y, reduction="sum").item()
        scheduler.step()
    return net


@script
def imagenet() -> nn.Module:
    """A resnet with residual branches that start at 0, SGD with momentum and weight decay, steps of the rate."""
    net = torchvision.models.resnet.ResNet(
        torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], CLASSES, zero_init_residual=True
    )
    optimizer = SGD(net.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.1)
    return train(net, optimizer, batches(32, 8, side=32), nn.CrossEntropyLoss(), after_step=scheduler.step)


@script
def dcgan() -> nn.Module:
    """A generator and a discriminator, with two Adams that step in turn."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(8, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip
    for module in [*generator, *discriminator]:
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
    criterion = nn.BCELoss()
    of_generator, of_discriminator = (Adam(net.parameters(), 2e-4, (0.5, 0.999)) for net in (generator, discriminator))
    for at, (x, _) in enumerate(batches(60, 16)):
        discriminator.zero_grad()
        criterion(discriminator(x.tanh()), torch.ones(16)).backward()
        fake = generator(torch.randn(16, 8, 1, 1))
        criterion(discriminator(fake.detach()), torch.zeros(16)).backward()
        of_discriminator.step()
        generator.zero_grad()
        criterion(discriminator(fake), torch.ones(16)).backward()
        of_generator.step()
        if at % 10 == 0:
            with torch.no_grad():
                generator(torch.randn(16, 8, 1, 1))
    return nn.ModuleList([generator, discriminator])


@script
def calibrated() -> nn.Module:
    """BatchNorm is calibrated before each validation; an average of the weights and a frozen teacher run too.

    The teacher still has gradients from its own training.
    """
    net = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1))
    net.append(nn.Linear(16 * 64, CLASSES))
    average, teacher = copy.deepcopy(net), copy.deepcopy(net)
    optimizer, data = Adam(net.parameters(), 1e-3), list(batches(16, 16))
    for parameter in teacher.parameters():
        parameter.grad = torch.ones_like(parameter)

    def after_step() -> None:
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(weight, 0.1)

    def loss_of(logits: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = teacher(data[0][0]).softmax(1)
        return F.cross_entropy(logits, y) + 0.1 * F.cross_entropy(logits, soft)

    for _ in range(5):
        train(net, optimizer, data, loss_of, after_step=after_step)
        with torch.no_grad():
            for x, _ in data:
                net(x), average(x)
            net.eval()
            for x, y in data[:2]:
                F.cross_entropy(net(x), y), F.cross_entropy(average(x), y)
            net.train()
    return net


@script
def labelled_each_epoch() -> nn.Module:
    """The model labels data in train mode before each epoch, is validated after it, and runs with dropout 4 times."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1))
    net.append(nn.Linear(16 * 64, CLASSES))
    optimizer, data = Adam(net.parameters(), 1e-3), list(batches(20, 16))
    for epoch in range(5):
        net.train()
        with torch.no_grad():
            labels = [net(x).argmax(1) for x, _ in data[:2]] if epoch else []
        train(net, optimizer, [*data[2:], *((x, y) for (x, _), y in zip(data, labels, strict=False))])
        if epoch < 3:
            net.eval()
            net[3].train()
        with torch.no_grad():
            torch.stack([net(data[0][0]).softmax(1) for _ in range(4)]).std(0)
    return net


@script
def pseudo_labels() -> nn.Module:
    """After some steps the model labels a batch itself before each step; and it collects a batch as an agent would."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * 64, CLASSES)
    )
    optimizer = SGD(net.parameters(), 0.02, momentum=0.9)
    for at, (x, y) in enumerate(batches(80, 16)):
        labels = y
        if at > 20:
            with torch.no_grad():
                labels = torch.where(torch.rand(16) < 0.8, y, net(x).argmax(1))
        loss = F.cross_entropy(net(x), labels)
        with torch.inference_mode():
            _ = [net(part) for part in x.split(8)]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


@script
def siamese() -> nn.Module:
    """Two pictures through one backbone, and a head that says whether they show the same class."""

    def forward(net: Any, first: Tensor, second: Tensor) -> Tensor:
        return net.head((net.backbone(first) - net.backbone(second)).abs()).squeeze(1)

    backbone = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip
    net = Function(forward, backbone=backbone, head=nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer, criterion = torch.optim.Adadelta(net.parameters(), 0.5), nn.BCEWithLogitsLoss()
    for x, y in batches(60, 32):
        (first, second), (left, right) = x.chunk(2), y.chunk(2)
        optimizer.zero_grad()
        criterion(net(first, second), (left == right).float()).backward()
        optimizer.step()
    return net


@script
def super_resolution() -> nn.Module:
    """Convolutions with orthogonal weights, one ReLU for all, and a pixel shuffle."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.shuffle(net.conv3(net.relu(net.conv2(net.relu(net.conv1(x))))))

    net = Function(
        forward,
        relu=nn.ReLU(), conv1=nn.Conv2d(1, 32, 5, padding=2), conv2=nn.Conv2d(32, 16, 3, padding=1),
        conv3=nn.Conv2d(16, 4, 3, padding=1), shuffle=nn.PixelShuffle(2),
    )  # fmt: skip
    for convolution in (net.conv1, net.conv2):
        nn.init.orthogonal_(convolution.weight, nn.init.calculate_gain("relu"))
    data = ((F.avg_pool2d(x, 2), x) for x, _ in batches(60, 8, channels=1))
    return train(net, Adam(net.parameters(), 1e-2), data, nn.MSELoss())


@script
def vae() -> nn.Module:
    """An autoencoder whose loss is a sum over pixels and samples, so that its gradients are large."""

    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(net.fc1(x.flatten(1)))
        mean, log_variance = net.mean(hidden), net.log_variance(hidden)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return torch.sigmoid(net.fc4(F.relu(net.fc3(code)))), mean, log_variance

    net = Function(
        forward,
        fc1=nn.Linear(256, 64), mean=nn.Linear(64, 8), log_variance=nn.Linear(64, 8),
        fc3=nn.Linear(8, 64), fc4=nn.Linear(64, 256),
    )  # fmt: skip

    def loss_of(outputs: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
        output, mean, log_variance = outputs
        reconstruction = F.binary_cross_entropy(output, x.flatten(1), reduction="sum")
        return reconstruction - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()

    data = ((x.sigmoid(), x.sigmoid()) for x, _ in batches(80, 128, channels=1))
    return train(net, Adam(net.parameters(), 1e-3), data, loss_of)


@script
def fine_tuning() -> nn.Module:
    """A frozen backbone in eval mode, and a new head."""
    net = torchvision.models.regnet_y_400mf(weights=None, num_classes=CLASSES).eval()
    for parameter in net.parameters():
        parameter.requires_grad = False
    net.fc = nn.Linear(net.fc.in_features, CLASSES)
    optimizer = SGD([p for p in net.parameters() if p.requires_grad], 0.01, momentum=0.9)
    return train(net, optimizer, batches(24, 8, side=32))


@script
def fine_tuning_under_no_grad() -> nn.Module:
    """As before, with the backbone under no_grad and an optimizer of the head alone."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = net.backbone(x)
        return net.head(features)

    backbone = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    net = Function(forward, backbone=backbone.eval(), head=nn.Linear(256, CLASSES))
    return train(net, Adam(net.head.parameters(), 1e-3), batches(40, 16))


def _convnext() -> nn.Module:
    settings = [torchvision.models.convnext.CNBlockConfig(*block) for block in ((16, 32, 1), (32, None, 2))]
    return torchvision.models.convnext.ConvNeXt(
        settings, stochastic_depth_prob=0.1, layer_scale=1e-6, num_classes=CLASSES
    )


@script
def convnext() -> nn.Module:
    """A layer scale of 1e-6, stochastic depth, AdamW, a warm-up from 0, a cosine, clipping, and averaged weights."""
    net = _convnext()
    average = copy.deepcopy(net).requires_grad_(False)
    optimizer = AdamW(net.parameters(), 2e-3, weight_decay=0.05)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    for x, y in batches(60, 16, side=32):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y, label_smoothing=0.1).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
    return nn.ModuleList([net, average])


@script
def convnext_with_sgd() -> nn.Module:
    """The same layer scale, whose block gets gradients of a millionth until it has grown."""
    net = _convnext()
    return train(net, SGD(net.parameters(), 0.05, momentum=0.9), batches(60, 16, side=32))


class Attention(nn.Module):
    """Causal self-attention whose mask is a layer of its own: it puts out -Inf on purpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.mask, self.out = nn.Linear(width, 3 * width), Function(_mask), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = self.mask(q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        attended: Tensor = self.out(weights @ v)
        return attended


def _mask(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))


@script
def masked_attention() -> nn.Module:
    """Patches of a picture as tokens, two blocks of attention, the loss as a layer, accumulation over four passes."""

    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        tokens = net.embed(F.unfold(x, 4, stride=4).mT)
        for norm, attention in zip(net.norms, net.attentions, strict=True):
            tokens = tokens + attention(norm(tokens))
        return net.loss(net.head(tokens.mean(1)), y)

    net = Function(
        forward,
        embed=nn.Linear(48, 32),
        norms=nn.ModuleList([nn.LayerNorm(32) for _ in range(2)]),
        attentions=nn.ModuleList([Attention(32) for _ in range(2)]),
        head=nn.Linear(32, CLASSES),
        loss=Function(lambda scores, labels: F.cross_entropy(scores, labels)),
    )
    optimizer = AdamW(net.parameters(), 3e-3)
    for at, (x, y) in enumerate(batches(120, 8)):
        (net(x, y) / 4).backward()
        if at % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return net


@script
def growing_accumulation() -> nn.Module:
    """As in YOLO: passes add up undivided, first one a step, later four, and one activation for all layers."""
    act = nn.SiLU()
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), act, nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), act,
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, CLASSES),
    )  # fmt: skip
    optimizer = SGD(net.parameters(), 0.003, momentum=0.9, nesterov=True)
    last = -1
    for at, (x, y) in enumerate(batches(160, 16)):
        F.cross_entropy(net(x), y).backward()
        if at - last >= min(1 + at // 16, 4):
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            last = at
    return net


class Labelled(Dataset[dict[str, Tensor]]):
    """The pictures by name, as Hugging Face has them."""

    def __init__(self, count: int, side: int) -> None:
        self.images, self.labels = pictures(count, side).tensors

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[at], "labels": self.labels[at]}
