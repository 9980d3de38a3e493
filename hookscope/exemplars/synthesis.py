"""Images that excite a channel most, made by gradient ascent from noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as F

from hookscope.display import RowTuple
from hookscope.drawing import channel_numbers, input_size_of
from hookscope.errors import UsageError, check_whole
from hookscope.exemplars.facts import ChannelExemplars, LayerExemplars, SynthesizedByChannel, SynthesizedImage
from hookscope.exemplars.job import MEASURED, MEASURES, of_images, with_places
from hookscope.hooks import MODEL, AnyModel, Layers, Selection, as_float, capture, differentiable, tensors_in
from hookscope.models import LoadedModel, Preprocess, as_batch, as_loaded, model_errors_as_input_errors

_RATE = 0.08  # of Adam, for coefficients of about 1
_START = 0.01  # standard deviation of the coefficients of the first noise
_LOUDER = (1, 2, 4, 8, 16, 32)  # noise is tried up to so many times stronger, where a channel is silent
_FALL = 1.25  # the coefficients of images count the less, the higher their frequency to this power
_SHIFT, _ZOOM = 0.05, 0.1  # of the image's side
# brightness, red against blue, green against both: axes along which the colours of natural images vary nearly
# independently, and by how much they do
_COLOURS = ((0.58, 0.20, 0.05), (0.58, 0.00, -0.10), (0.58, -0.20, 0.05))


def synthesize_images(
    net: AnyModel,
    layer: Layers,
    channels: Iterable[int],
    *,
    types: Iterable[Any] | None = None,
    part: str = "",
    best: Mapping[int, float] | None = None,
    count: int = 1,
    seed: int = 0,
    steps: int = 64,
    tries: int = 3,
    measure: str = "max",
    batch_size: int = 8,
    on_progress: Callable[[int], None] = lambda count: None,
) -> SynthesizedByChannel:
    """Make images that excite each of ``channels`` of ``layer`` most, by gradient ascent from noise.

    Activation maximisation (Yosinski et al., arXiv:1506.06579) on the coefficients of a Fourier transform with
    decorrelated colours, of an image that is shifted and scaled a little at random before each step (Olah et al.,
    https://distill.pub/2017/feature-visualization). Shifts and scales shrink to none in the second half of the steps.
    For ``max`` and ``abs`` the unit in the middle of the map is excited.

    The value is for the finished image, with 8 bits a colour, as it would be of an exemplar with these pixels. If
    it is not above ``best``, other noise is tried with more steps, and then the strongest unit of the map is excited;
    the strongest image of all tries is returned.

    The model runs in eval mode, with gradients even under ``no_grad``. Its modes, ``.grad``, hooks and buffers and the
    random states stay as they are. On a CPU, equal arguments give equal images, bit by bit. The images of a channel
    depend on ``seed``, and only by rounding on the other channels of a batch.

    Args:
        net: The model, as `load_model` returns it.
        layer: A selection of one call, as `capture` takes it.
        channels: The channels, from 0.
        types: Class names that indices count, see `capture`.
        part: Name of the tensor if the layer returns several; by default the first.
        best: The value of the best exemplar of each channel.
        count: Images for each channel.
        seed: Seed of the first image; the others follow it.
        steps: Steps of the first try; the second has twice as many, and so on.
        tries: Tries for each image.
        measure: ``max``, ``mean`` or ``abs``, see `find_exemplars`.
        batch_size: Images in one forward pass.
        on_progress: Gets the number of images of each batch that need no further try.

    Returns:
        The images of each channel; none for a channel that no gradient reaches.

    Raises:
        UsageError: ``layer`` selects several calls, it lacks a channel, or the normalisation of the input is unknown.
        LayerError: The model does not have the layer.
        InputError: The rows of the output are not the images of the batch.

    Example:
        >>> import hookscope
        >>> net = hookscope.load_model("shapes")
        >>> [image] = synthesize_images(net, "features.0", [5], steps=4)[5]
        >>> image.image.size, image.seed, image.value > 0
        ((128, 128), 0, True)
    """
    net = as_loaded(net)
    wanted = channel_numbers(channels)
    for name, number in {"count": count, "steps": steps, "tries": tries, "batch size": batch_size}.items():
        check_whole(name, number)
    if measure not in MEASURES:
        raise UsageError(f"unknown measure '{measure}'", f"there are {', '.join(MEASURES)}")
    layer_of = _Layer(net, net.preprocess.of_seen, layer, types, part, measure)
    best = best or {}
    images: dict[int, list[SynthesizedImage]] = {channel: [] for channel in wanted}
    with differentiable(net.model):
        for first in range(count):
            made_images: dict[int, SynthesizedImage] = {}
            for attempt in range(tries):
                own = seed + first + attempt * count
                missing = [c for c in wanted if c not in made_images or not made_images[c].is_enough]
                for at in range(0, len(missing), batch_size):
                    some = missing[at : at + batch_size]
                    for channel, image in _ascend(layer_of, some, own, steps * (attempt + 1), attempt == 0):
                        made = SynthesizedImage(image, layer_of.value(image, channel), best.get(channel), own, channel)
                        if channel not in made_images or made.value > made_images[channel].value:
                            made_images[channel] = made
                    last = attempt == tries - 1
                    on_progress(sum(last or (c in made_images and made_images[c].is_enough) for c in some))
            for channel, made in made_images.items():
                images[channel].append(made)
    return SynthesizedByChannel({channel: tuple(made) for channel, made in images.items()})


def add_synthesized(
    net: LoadedModel,
    found: LayerExemplars,
    channels: Iterable[int] | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
    **settings: Any,
) -> LayerExemplars:
    """``found`` with synthesized images of ``channels``, None for all; ``settings`` as of `synthesize_images`."""
    chosen = {unit.channel for unit in found.channels} if channels is None else set(channels)
    best = {unit.channel: unit.most[0].value for unit in found.channels if unit.channel in chosen and unit.most}
    wanted = [unit.channel for unit in found.channels if unit.channel in chosen]
    settings |= {"part": found.part, "measure": found.measure, "best": best, "on_progress": on_progress}
    images = synthesize_images(net, Selection.of_calls([found.call]), wanted, **settings)

    def excited(channel: ChannelExemplars) -> ChannelExemplars:
        made = images.get(channel.channel)
        return channel if made is None else replace(channel, synthesized=made, unreached=not made)

    return replace(found, channels=RowTuple(map(excited, found.channels)))


@dataclass(frozen=True)
class _Layer:
    """The layer whose channels are excited, and how its values are measured."""

    net: LoadedModel
    seen: Preprocess
    layer: Layers
    types: Iterable[Any] | None
    part: str
    measure: str

    def values(self, inputs: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
        """Values ``(N, C, P)`` of prepared images, and the grid of the positions, see `with_places`."""
        net = self.net
        arguments = as_batch(net.family, list(inputs))
        wanted = capture(net.model, self.layer, self.types, stop=True)
        with model_errors_as_input_errors(net.name, arguments), wanted as activations:
            net.model(*arguments)
        if len(activations.calls) != 1:
            names = ", ".join(call.key for call in activations.calls[:3])
            exists = f"it selects {len(activations.calls)} calls: {names}" if names else "it did not run"
            do = "choose one call: ‹list_layers|list-layers›"
            raise UsageError(f"one layer is needed, and got {self.layer}", exists, do)
        [call] = activations.calls
        tensors = {name: tensor for name, tensor in tensors_in(activations[call.key]).items() if tensor.numel()}
        if (self.part and self.part not in tensors) or not tensors:
            asked = f"{call.key or MODEL} has no output '{self.part}'"
            raise UsageError(asked, f"it has {', '.join(tensors) or 'none'}")
        tensor = tensors[self.part] if self.part else next(iter(tensors.values()))
        wide = torch.promote_types(tensor.dtype, torch.float32)
        tensor = tensor.to(wide) if tensor.requires_grad else as_float(tensor)  # which leaves the graph
        values, grid = with_places(tensor, net.model.get_submodule(call.name), input_size_of(inputs[0]))
        return of_images(values, grid, len(inputs), call.key)

    def prepared(self, colours: Tensor) -> Tensor:
        values = self.seen.transforms.values
        assert values is not None  # `of_seen` raises without
        inputs = values(colours).to(self.seen.dtype)
        return inputs if self.seen.family != "video" else inputs[:, :, None].expand(-1, -1, self.seen.frames, -1, -1)

    def aim(self, inputs: Tensor, channels: Tensor, middle: bool) -> Tensor:
        """What is to grow: a number ``(N,)`` for each image, of its own channel."""
        values, grid = self.values(inputs)
        if missing := [channel for channel in channels.tolist() if not 0 <= channel < values.shape[1]]:
            asked = f"{self.layer} has no channel {missing[0]}"
            raise UsageError(asked, f"it has {values.shape[1]} channels, from 0 to {values.shape[1] - 1}")
        own = values[torch.arange(len(values), device=values.device), channels]
        if grid is not None and middle and self.measure != "mean":
            at = 0
            for side in grid:
                at = at * side + side // 2
            own = own[:, at : at + 1]
        return MEASURED[self.measure](own[:, None])[:, 0]

    def value(self, image: Image.Image, channel: int) -> float:
        """The value of a channel on an image, as of an exemplar with these pixels."""
        with torch.no_grad():
            values, _ = self.values(self.seen(image)[None])
            return float(MEASURED[self.measure](values)[0, channel])


def _ascend(
    layer: _Layer, channels: Sequence[int], seed: int, steps: int, middle: bool
) -> Iterator[tuple[int, Image.Image]]:
    """An image for each channel that a gradient reaches."""
    torch.manual_seed(seed)  # for models that draw numbers; `differentiable` puts the states back
    device, generator = layer.seen.device, torch.Generator().manual_seed(seed)
    picture, own = _Spectrum(layer.seen, device), torch.tensor(channels, device=device)
    first = _first_coefficients(layer, picture, own, generator, middle)
    coefficients = first.requires_grad_()
    optimizer = torch.optim.Adam([coefficients], lr=_RATE)
    reached = torch.zeros(len(channels), dtype=torch.bool, device=device)
    for step in range(steps):
        amount = min(1.0, 2 - 2 * (step + 1) / steps)
        moved = _moved(picture.colours(coefficients), generator, amount)
        aim = layer.aim(layer.prepared(moved), own, middle)
        if not aim.requires_grad:
            return
        [gradient] = torch.autograd.grad(-aim.sum(), coefficients, allow_unused=True)
        if gradient is None:
            return
        coefficients.grad = gradient.nan_to_num(0, 0, 0)
        reached |= (coefficients.grad != 0).flatten(1).any(1)
        optimizer.step()
    with torch.no_grad():
        colours = picture.colours(coefficients).mul(255).round().to(torch.uint8).cpu()
    for channel, image, is_reached in zip(channels, colours, reached.tolist(), strict=True):
        if is_reached:
            yield channel, F.to_pil_image(image)


def _first_coefficients(
    layer: _Layer, picture: _Spectrum, channels: Tensor, generator: torch.Generator, middle: bool
) -> Tensor:
    """The weakest noise on which each channel has a value other than 0: behind a ReLU, 0 has no gradient."""
    coefficients = torch.zeros(len(channels), *picture.shape, device=channels.device)
    silent = torch.ones(len(channels), dtype=torch.bool, device=channels.device)
    with torch.no_grad():
        for louder in _LOUDER:
            noise = torch.randn(picture.shape, generator=generator).mul(_START * louder).to(channels.device)
            coefficients[silent] = noise
            aim = layer.aim(layer.prepared(picture.colours(coefficients[silent])), channels[silent], middle)
            silent[silent.clone()] = aim == 0
            if not bool(silent.any()):
                break
    return coefficients


class _Spectrum:
    """Images as coefficients of their Fourier transform, scaled like the spectrum of natural images."""

    def __init__(self, preprocess: Preprocess, device: str) -> None:
        self.size = height, width = preprocess.input_shape[-2:]
        frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None])
        scale = math.sqrt(height * width) / 4 / frequency.clamp(min=1 / max(height, width)) ** _FALL
        self.scale = scale[..., None].to(device)
        self.mix = torch.tensor(_COLOURS if preprocess.channels == 3 else [[1.0]], device=device)
        self.shape = (preprocess.channels, *frequency.shape, 2)

    def colours(self, coefficients: Tensor) -> Tensor:
        waves = torch.fft.irfft2(torch.view_as_complex(coefficients * self.scale), s=self.size)
        return torch.einsum("ck,nkhw->nchw", self.mix, waves).sigmoid()


def _moved(images: Tensor, generator: torch.Generator, amount: float) -> Tensor:
    """The images, all shifted and scaled alike at random; what leaves at an edge is mirrored in."""
    down, across, zoom = (torch.rand(3, generator=generator) * 2 - 1).mul(amount).tolist()
    rows, columns = (
        _resampling(side, 1 + zoom * _ZOOM, shift * _SHIFT * side).to(images.device)
        for side, shift in zip(images.shape[-2:], (down, across), strict=True)
    )
    return rows @ images @ columns.T


def _resampling(side: int, zoom: float, shift: float) -> Tensor:
    """The matrix ``(side, side)`` that interpolates a row of pixels: unlike a sampler's, its gradient repeats."""
    middle = (side - 1) / 2
    place = ((torch.arange(side) - middle) / zoom + middle + shift).remainder(max(2 * (side - 1), 1))
    place = torch.where(place > side - 1, 2 * (side - 1) - place, place)
    return (1 - (torch.arange(side)[None] - place[:, None]).abs()).clamp(min=0)
