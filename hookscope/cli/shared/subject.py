"""Commands by what they look at: a model, one forward pass, or images; `list-layers` starts sooner without them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from hookscope.cli.command import RowCommand
from hookscope.cli.fields import group
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.engine_options import EngineOptions
from hookscope.cli.shared.image_options import BatchOptions, ImageList
from hookscope.cli.shared.model import ModelAndImages, ModelOptions
from hookscope.errors import UsageError


class OfModel(RowCommand):
    """A command about a model."""

    model: ModelOptions = group(ModelOptions)

    def inputs(self) -> Iterator[tuple[str, str]]:
        yield "model", self.model.model.partition(":")[0]
        yield "weights", self.model.weights


class OfImage(OfModel):
    """A command about one forward pass: of one image, or of two for optical flow."""

    paths: tuple[str, ...] = shared.image_argument()

    def inputs(self) -> Iterator[tuple[str, str]]:
        yield from super().inputs()
        yield from (("image", path) for path in self.paths)

    def check(self) -> None:
        if len(self.paths) > 2:
            raise UsageError(f"expected one image, or two for optical flow, got {len(self.paths)}")
        super().check()

    @cached_property
    def subject(self) -> ModelAndImages:
        """The model and the images, loaded."""
        return ModelAndImages.load(self.model, self.paths)


class OfImages(OfModel, ImageList):
    """A command about images, one after another."""

    def inputs(self) -> Iterator[tuple[str, str]]:
        yield from super().inputs()
        yield from (("image", path) for path in self.images)


class OfManyImages(OfImages, BatchOptions):
    """A command that takes many images through the model, in batches and on any engine."""

    engine: EngineOptions = group(EngineOptions)
