"""Commands by what they look at: a model, one forward pass, or images; `list-layers` starts sooner without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from hookscope import hooks, models
from hookscope.cli.command import RowCommand
from hookscope.cli.fields import group
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.images import ImageFiles, ImageList
from hookscope.cli.shared.model import ModelOptions, caption_of, check_choice, running
from hookscope.errors import UsageError
from hookscope.images import InputImage


class OfModel(RowCommand):
    """A command about a model."""

    model: ModelOptions = group(ModelOptions)

    def inputs(self) -> Iterator[tuple[str, str]]:
        yield "model", self.model.model.partition(":")[0]
        yield "weights", self.model.weights


class OfImage(OfModel):
    """A command about one forward pass: of one image, or of two for optical flow."""

    paths: tuple[str, ...] = shared.image_argument()
    layers: hooks.Selection | None = None
    types: tuple[str, ...] = ()
    changes: Sequence[Any] = ()

    def inputs(self) -> Iterator[tuple[str, str]]:
        yield from super().inputs()
        yield from (("image", path) for path in self.paths)

    def check(self) -> None:
        if len(self.paths) > 2:
            raise UsageError(f"expected one image, or two for optical flow, got {len(self.paths)}")
        super().check()

    @cached_property
    def files(self) -> ImageFiles:
        return ImageFiles(self.paths)

    @cached_property
    def net(self) -> models.LoadedModel:
        """The model, which must have layers of the ``types``; a single image is read first."""
        self.files.read_first()
        net = self.model.load(pictures=bool(self.paths))
        if len(self.paths) > 1 and net.family != "optical_flow":
            raise UsageError(f"{net.name} takes one image", f"{len(self.paths)} were given", "give one")
        check_choice(net, self.types, self.layers, *(change.where for change in self.changes))
        return net

    @cached_property
    def read_images(self) -> Sequence[InputImage]:
        return [self.files.read(path, self.net.preprocess.frames) for path in self.paths]

    @cached_property
    def tensors(self) -> Sequence[Any]:
        return [self.net.prepare(image) for image in self.read_images]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the model is called with."""
        return self.net.inputs(*self.tensors)

    @property
    def caption(self) -> dict[str, Any]:
        return (
            caption_of(self.net, self.read_images)
            if self.paths
            else {"model": self.net.name, "weights": self.net.weights}
        )

    def running(self) -> contextlib.AbstractContextManager[None]:
        """The context in which the model runs on these images."""
        return running(self.net, self.tensors)


class OfImages(OfModel, ImageList):
    """A command about images, one after another."""

    layers: hooks.Selection | None = None
    types: tuple[str, ...] = ()

    def inputs(self) -> Iterator[tuple[str, str]]:
        yield from super().inputs()
        yield from (("image", path) for path in self.images)

    @cached_property
    def files(self) -> ImageFiles:
        return ImageFiles(self.images)

    @cached_property
    def net(self) -> models.LoadedModel:
        """The model, which must have layers of the ``types``; a single image is read first."""
        self.files.read_first()
        net = self.model.load()
        check_choice(net, self.types, self.layers)
        return net
