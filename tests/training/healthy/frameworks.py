"""Sound training scripts with training frameworks, each of which needs its framework installed."""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.training.healthy.scripts import CLASSES, Labelled, batches, pictures
from tests.training.watched import train


def _small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32),
        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, CLASSES),
    )  # fmt: skip


def trainer() -> nn.Module:
    """A ViT in the Trainer of transformers: accumulation, warm-up, evaluation."""
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=CLASSES,
    )  # fmt: skip
    net: nn.Module = ViTForImageClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=40, per_device_train_batch_size=8, gradient_accumulation_steps=2, warmup_steps=4,
            learning_rate=2e-3, report_to=[], disable_tqdm=True, logging_strategy="no", save_strategy="no",
            eval_strategy="steps", eval_steps=20, use_cpu=True, dataloader_pin_memory=False,
        )  # fmt: skip
        Trainer(net, settings, train_dataset=Labelled(256, 16), eval_dataset=Labelled(16, 16)).train()
    return net


def lightning() -> nn.Module:
    """A LightningModule with accumulation over four batches, clipping and validation."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _small()

        def training_step(self, batch: Any, at: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, at: int) -> None:
            self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 2e-3)

    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        fitted = L.Trainer(
            max_epochs=4, accumulate_grad_batches=4, gradient_clip_val=1.0, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        fitted.fit(module, DataLoader(pictures(640), 16, shuffle=True), DataLoader(pictures(32), 16))
    return module


def accelerate() -> nn.Module:
    """A loop with an Accelerator that accumulates over two batches."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    net = _small()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(pictures(256), 16, shuffle=True))
    for _ in range(5):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(x), y))
                accelerator.clip_grad_norm_(net.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
    return net


def segmentation() -> nn.Module:
    """A U-Net of segmentation_models with the Dice loss."""
    import segmentation_models_pytorch as smp

    net: nn.Module = smp.Unet("resnet18", encoder_weights=None, decoder_channels=(32, 16, 16, 8, 8))
    data = ((x, (x.mean(1, keepdim=True) > 0.5).float()) for x, _ in batches(24, 4, side=32))
    return train(net, torch.optim.Adam(net.parameters(), 1e-3), data, smp.losses.DiceLoss("binary"))
