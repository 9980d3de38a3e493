"""MODEL argument and weights to a model that is ready to run, with all that belongs to it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookscope.dry import build_dry
from hookscope.errors import InstallationError, ModelError, UsageError, WeightsError, nearest
from hookscope.inputs import CLIP_FRAMES, as_inputs, family_of, in_channels, native_size
from hookscope.installation import broken_pair
from hookscope.preprocess import MODES, Preprocess, imagenet_transforms
from hookscope.registry import model_names
from hookscope.weights import Progress, fetch, fitting_error, is_weights_file, mismatches, read_state_dict

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Net", "build_listed", "listing_size", "load_model"]


@dataclass(frozen=True)
class Net:
    """A model ready to run, in eval mode, and what belongs to it.

    Attributes:
        model: The module, on ``device``.
        name: As it was asked for.
        weights: What the weights are, such as ``IMAGENET1K_V1``, ``random (seed 0)`` or a file's name.
        preprocess: Photograph to tensor ``(3, H, W)``.
        categories: Class names, None where none are known.
        family: ``classification``, ``segmentation``, ``detection``, ``video`` or ``optical_flow``.
        device: Where the model is.
        notes: What the person should know, such as why the weights are random.
    """

    model: nn.Module
    name: str
    weights: str
    preprocess: Preprocess
    categories: tuple[str, ...] | None
    family: str
    device: str
    notes: tuple[str, ...] = ()

    def inputs(self, *pictures: Tensor) -> tuple[Any, ...]:
        """The positional inputs of one pass for prepared pictures ``(3, H, W)``, as the family takes them."""
        return as_inputs(self.family, pictures)


@dataclass
class _Loaded:
    """A model while it is made: the module, the words for its weights, the weights entry that has its transforms."""

    model: nn.Module
    weights: str
    entry: Any = None
    categories: tuple[str, ...] | None = None
    notes: list[str] = field(default_factory=list)


def load_model(
    model: str,
    weights: str = "auto",
    seed: int = 0,
    device: str = "auto",
    *,
    preprocess: str = "weights",
    input_size: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> Net:
    """Build a model, give it weights and eval mode, and find the preprocessing and class names that go with them.

    Args:
        model: A torchvision name, ``package.module:factory``, ``path/to/file.py:factory`` or ``timm:NAME``.
        weights: ``auto`` (torchvision's default weights, or seeded random ones where neither cache nor network has
            them, which ``notes`` says), ``default`` or a weights name (these or none), ``none``, or a checkpoint.
        seed: Seed of random weights; the global random state is left as it was.
        device: ``auto``, ``cpu``, ``cuda`` (``cuda:1``) or ``mps``.
        preprocess: ``weights``, ``stretch`` or ``none``, see `hookscope.preprocess.Preprocess`.
        input_size: ``(H, W)`` of the picture the model sees.
        progress: Called with bytes done and total during a download.

    Raises:
        ModelError: no such model, or it cannot be built.
        WeightsError: no such weights, or they cannot be had, trusted or fitted.
        UsageError: for a device or a preprocessing that does not exist.

    Example:
        >>> net = load_model("squeezenet1_1", weights="none", seed=1)
        >>> net.weights, net.family, net.preprocess.describe()
        ('random (seed 1)', 'classification', 'ImageClassification resize 256 crop 224')
    """
    if preprocess not in MODES:
        raise UsageError(f"no preprocessing '{preprocess}'", f"there are {', '.join(MODES)}")
    where = pick_device(device)
    with _warnings_off(), _seeded(seed):
        if ":" in model:
            made = _from_elsewhere(model, weights, seed)
        else:
            made = _from_torchvision(model, weights, seed, progress)
    made.model.eval().to(where)
    return Net(
        model=made.model,
        name=model,
        weights=made.weights,
        preprocess=_preprocess(made, preprocess, input_size, where),
        categories=made.categories,
        family=family_of(made.model),
        device=where,
        notes=tuple(made.notes),
    )


def pick_device(device: str) -> str:
    """``device`` as torch spells it; ``auto`` is the fastest there is.

    Raises:
        UsageError: for a device this machine or torch does not have.
    """
    import torch

    have = ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
    if device == "auto":
        return have[-1]
    kind, _, number = device.partition(":")
    if kind not in have or (number and not (kind == "cuda" and number.isdigit())):
        raise UsageError(f"no device '{device}'", f"this machine has {', '.join(have)}")
    if number and int(number) >= torch.cuda.device_count():
        raise UsageError(f"no device '{device}'", f"there are {torch.cuda.device_count()} CUDA devices")
    return device


@contextmanager
def _warnings_off() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def torchvision_models() -> Any:
    """``torchvision.models``, or one line that says how the installation is broken."""
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:
        broken = broken_pair(error)
        raise broken or InstallationError(f"cannot import torchvision: {error}") from error


def _check_name(name: str) -> None:
    if name not in model_names():
        see = "see `hookscope list-models`"
        if name.endswith(".py") or "/" in name:
            raise ModelError(f"no model '{name}'", "a file needs a factory", "write path/to/file.py:factory")
        raise ModelError(f"no model '{name}'", nearest(name, model_names()), see)


def build_kwargs(name: str, quantize: bool = False) -> dict[str, Any]:
    """What a torchvision builder must be told so that it downloads no backbone and warns of nothing."""
    builder = torchvision_models().get_model_builder(name)
    kwargs: dict[str, Any] = {}
    if "weights_backbone" in inspect.signature(builder).parameters:
        kwargs["weights_backbone"] = None
    if name in ("googlenet", "inception_v3", "quantized_googlenet", "quantized_inception_v3"):
        kwargs["init_weights"] = True
    if quantize:
        kwargs["quantize"] = True
    return kwargs


def _build(name: str, **kwargs: Any) -> nn.Module:
    try:
        model: nn.Module = torchvision_models().get_model(name, weights=None, **(build_kwargs(name) | kwargs))
    except (RuntimeError, ImportError, ValueError, TypeError) as error:
        raise ModelError(f"cannot build {name}: {error}") from error
    return model


def build_listed(name: str) -> nn.Module:
    """The torchvision model ``name`` without values, on the meta device; with values where its builder needs them.

    Raises:
        ModelError: no such model.
    """
    _check_name(name)
    with _warnings_off(), _seeded(0):
        try:
            return build_dry(lambda: _build(name)).eval()
        except Exception:  # a builder that computes with its tensors
            return _build(name).eval()


def build_real(name: str) -> nn.Module:
    """The torchvision model ``name`` with seeded random weights, for the pass that needs values."""
    with _warnings_off(), _seeded(0):
        return _build(name).eval()


def listing_size(name: str, model: nn.Module) -> tuple[int, int]:
    """``(H, W)`` of the input that the torchvision model ``name`` is made for."""
    if native := native_size(model):
        return native
    family = family_of(model)
    if family in ("detection", "optical_flow"):
        return (320, 320) if family == "detection" else (224, 224)
    entry = _default_entry(name)
    return _made_for(entry.transforms() if entry is not None else imagenet_transforms())


def _made_for(transforms: Any) -> tuple[int, int]:
    size = getattr(transforms, "crop_size", None) or getattr(transforms, "resize_size", None) or [224]
    return (size[0], size[-1])


def _float_entries(name: str) -> dict[str, Any]:
    """The weights of ``name`` by name; those of a quantized model beside the float weights they were made from."""
    entries = {entry.name: entry for entry in torchvision_models().get_model_weights(name)}
    unquantized = (entry.meta.get("unquantized") for entry in list(entries.values()))
    return entries | {entry.name: entry for entry in unquantized if entry is not None}


def _default_entry(name: str) -> Any:
    """The entry of the weights ``default`` means: of a quantized model, the float weights for its float twin."""
    found = torchvision_models().get_model_weights(name)
    default = getattr(found, "DEFAULT", None)
    return default.meta.get("unquantized", default) if default is not None else None


def _from_torchvision(name: str, weights: str, seed: int, progress: Progress | None) -> _Loaded:
    _check_name(name)
    default = _default_entry(name)
    categories = _categories(default)
    if weights == "none":
        return _Loaded(_build(name), f"random (seed {seed})", default, categories)
    if is_weights_file(weights):
        return _from_file(name, weights, default, categories)
    entry = default if weights in ("auto", "default") else _named_entry(name, weights)
    if entry is None:
        if weights == "default":
            raise WeightsError(f"torchvision has no weights for {name}", do="use --weights none, or a checkpoint file")
        return _Loaded(_build(name), f"random (seed {seed})", None, None, ["torchvision has no weights for this model"])
    try:
        return _Loaded(_build_with(name, entry, progress), entry.name, entry, _categories(entry))
    except WeightsError as error:
        if weights != "auto":
            raise WeightsError(f"no weights {entry.name} for {name}: {error.asked}", error.exists, error.do) from error
        note = f"weights of {name} are random (seed {seed}): {error.asked}"
        return _Loaded(_build(name), f"random (seed {seed})", default, categories, [note])


def _categories(entry: Any) -> tuple[str, ...] | None:
    return tuple(entry.meta.get("categories") or ()) or None if entry is not None else None


def _named_entry(name: str, weights: str) -> Any:
    entries = _float_entries(name)
    wanted = weights.rpartition(".")[2]
    if wanted not in entries:
        have = ", ".join(entries) or "none"
        raise WeightsError(f"no weights '{weights}' for {name}", f"there are {have}", "or auto, default, none, a file")
    return entries[wanted]


def _build_with(name: str, entry: Any, progress: Progress | None) -> nn.Module:
    """The model with torchvision's weights: its own builder sets all that goes with them, we fetch and check.

    torchvision would load its cached file with unpickling allowed and its hash unchecked, so the one method that
    reads the file is replaced while the builder runs.
    """
    from unittest.mock import patch

    models = torchvision_models()
    path = fetch(entry.url, progress)
    quantize = "backend" in entry.meta
    with patch.object(models.WeightsEnum, "get_state_dict", lambda self, *args, **kwargs: _whole_state_dict(path)):
        try:
            model: nn.Module = models.get_model(name, weights=entry, **_with_weights(build_kwargs(name, quantize)))
        except (RuntimeError, ImportError, ValueError, TypeError) as error:
            raise ModelError(f"cannot build {name} with {entry.name}: {error}") from error
    return model


def _with_weights(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "init_weights"}


def _whole_state_dict(path: Path) -> Mapping[str, Any]:
    from hookscope.weights import load_file

    return load_file(path)


def _from_file(name: str, path: str, default: Any, categories: tuple[str, ...] | None) -> _Loaded:
    state = read_state_dict(path)
    kwargs = _fitting_kwargs(name, state)
    if kwargs is None:
        skeleton = build_dry(lambda: _build(name))
        raise fitting_error(path, name, skeleton, state, _model_that_fits(state))
    model = _build(name, **kwargs)
    model.load_state_dict(state)
    made = _Loaded(model, Path(path).name, default, None if "num_classes" in kwargs else categories)
    made.notes += _non_finite_note(path, state)
    return made


def _fitting_kwargs(name: str, state: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """What to tell the builder so that ``state`` fits: number of classes, auxiliary heads; None if nothing helps."""
    tries: list[dict[str, Any]] = [{}]
    if any(key.startswith("aux_classifier.") for key in state):
        tries = [{"aux_loss": True}]
    elif name.removeprefix("quantized_") in ("googlenet", "inception_v3"):
        tries += [{"aux_logits": False}]
    for kwargs in tries:
        skeleton = build_dry(lambda kwargs=kwargs: _build(name, **kwargs))  # type: ignore[misc]
        wrong = mismatches(skeleton, state)
        if not wrong:
            return kwargs
        classes = _other_number_of_classes(skeleton, state, wrong)
        if classes is None:
            continue
        with_classes = kwargs | {"num_classes": classes}
        with suppress(ModelError):
            if not mismatches(build_dry(lambda: _build(name, **with_classes)), state):  # noqa: B023
                return with_classes
    return None


def _other_number_of_classes(model: nn.Module, state: Mapping[str, Tensor], wrong: Sequence[str]) -> int | None:
    """The classes of a fine-tuned head: every key is there, and what differs does so in its first size alone."""
    own = model.state_dict()
    sizes: set[int] = set()
    for key in wrong:
        if key not in own or key not in state or not own[key].dim() or own[key].shape[1:] != state[key].shape[1:]:
            return None
        sizes.add(int(state[key].shape[0]))
    return min(sizes) if sizes else None


def _model_that_fits(state: Mapping[str, Tensor]) -> str | None:
    """The torchvision model a state dict belongs to, found by the number of parameters its metadata states."""
    count = sum(v.numel() for key, v in state.items() if "running_" not in key and "num_batches" not in key)
    for name in model_names():
        entry = _default_entry(name)
        if entry is not None and abs(entry.meta.get("num_params", 0) - count) <= 0.01 * count:
            with suppress(ModelError), _warnings_off():
                if not mismatches(build_dry(lambda name=name: _build(name)), state):  # type: ignore[misc]
                    return name
    return None


def _non_finite_note(path: str, state: Mapping[str, Tensor]) -> list[str]:
    import torch

    bad = sum(int((~torch.isfinite(v)).sum()) for v in state.values() if v.is_floating_point())
    return [f"{path} holds {bad} values that are NaN or infinite"] if bad else []


def _from_elsewhere(spec: str, weights: str, seed: int) -> _Loaded:
    """A model of a factory or of timm."""
    source, _, name = spec.rpartition(":")
    if weights not in ("auto", "none") and not is_weights_file(weights):
        raise UsageError(f"{spec} has no torchvision weights '{weights}'", do="use auto, none or a checkpoint file")
    if source == "timm":
        made = _from_timm(name, weights, seed)
    else:
        made = _Loaded(_call_factory(spec, source, name), f"from factory (seed {seed})")
    if is_weights_file(weights):
        state = read_state_dict(weights)
        if mismatches(made.model, state):
            raise fitting_error(weights, spec, made.model, state, None)
        made.model.load_state_dict(state)
        made.weights = Path(weights).name
        made.notes = _non_finite_note(weights, state)
    return made


def _from_timm(name: str, weights: str, seed: int) -> _Loaded:
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        raise ModelError(f"timm:{name} needs the package timm", do="pip install timm") from None
    if not timm.is_model(name):
        raise ModelError(f"no timm model '{name}'", nearest(name, timm.list_models()))
    notes: list[str] = []
    model = None
    if weights == "auto":
        try:
            model = timm.create_model(name, pretrained=True)
        except Exception as error:
            notes.append(f"weights of timm:{name} are random (seed {seed}): {str(error).splitlines()[0][:120]}")
    words = "timm pretrained" if model is not None else f"random (seed {seed})"
    made = _Loaded(model if model is not None else timm.create_model(name, pretrained=False), words, notes=notes)
    data = timm.data.resolve_model_data_config(made.model)
    crop = data["input_size"][-1]
    resize = round(crop / data.get("crop_pct", 0.875))
    made.entry = imagenet_transforms(crop, resize, mean=data["mean"], std=data["std"])
    return made


def _call_factory(spec: str, source: str, name: str) -> nn.Module:
    import torch

    module = _import_source(spec, source)
    factory = getattr(module, name, None)
    if factory is None:
        raise ModelError(f"no '{name}' in {source}", nearest(name, [n for n in vars(module) if not n.startswith("_")]))
    try:
        model = factory if isinstance(factory, torch.nn.Module) else factory()
    except Exception as error:
        raise ModelError(f"{spec} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"{spec} gave a {type(model).__name__}", do="a factory returns an nn.Module")
    return model


def _import_source(spec: str, source: str) -> Any:
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        found = importlib.util.spec_from_file_location(Path(source).stem, source)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules.setdefault(found.name, module)
        found.loader.exec_module(module)
    except Exception as error:
        raise ModelError(f"cannot import {source} for {spec}: {type(error).__name__}: {error}") from error
    return module


def _preprocess(made: _Loaded, mode: str, size: tuple[int, int] | None, device: str) -> Preprocess:
    family = family_of(made.model)
    transforms = made.entry.transforms() if hasattr(made.entry, "meta") else made.entry or imagenet_transforms()
    native = native_size(made.model)
    # a ViT without weights may be made for another size than the default weights are (vit_h_14)
    if size is None and native is not None and mode == "weights" and _made_for(transforms) != native:
        size = native
    return Preprocess(
        family=family,
        transforms=None if family == "optical_flow" else transforms,
        mode=mode,
        size=size,
        default_size=native or _made_for(transforms),
        channels=in_channels(made.model),
        device=device,
        frames=CLIP_FRAMES if family == "video" else 1,
    )
