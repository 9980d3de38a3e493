"""Scores of classes from the output of a model of any family."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hookscope.display import Cells, Rows, Shown
from hookscope.errors import CategoriesError, InputError, ModelError, OutputNote, UsageError, spelled
from hookscope.findings import counted, listed
from hookscope.hooks import AnyModel, as_float, ending_of, evaluating, output_of, shape_of, tensors_in
from hookscope.images import as_picture, list_pictures
from hookscope.models import NUMBERS, as_loaded, detections_in, given_inputs, model_errors_as_input_errors
from hookscope.scores.target import ClassNames, Target, class_label

LIKE = 0.5  # correlation of each channel with the input, above which an output is an image and not scores
_COARSEST = 8  # pixels of the input for each position; coarser maps are features
_SEEN = 0.02  # of the best probability
_ROUNDING = 5e-3  # of a sum of probabilities in half precision
_LOGITS = ("out", "logits")  # as torchvision and transformers call them
_MOST_NUMBERS = 16  # an output of more values is not a list that a person reads
_EMBEDDINGS = ("image_embeds", "pooler_output")
_SCORES, _FEATURES = re.compile("logit|score|class|prob|pred|label"), re.compile("embed|feat|hidden|pool|proj|latent")
_BOXES = "boxes, labels and scores of objects"
_GIVES = {"detection": _BOXES, "batched_detection": _BOXES, "optical_flow": "the flow of pixels"}
EXPLAIN_SIMILARITY = "explain the similarity to another image: ‹SimilarityTarget|--similar-to IMAGE›"
FIND_NON_FINITE = "see ‹find_non_finite|`hookscope gradients --detect-anomaly`›"
CHOOSE_OUTPUT = "‹load_model(..., model_output=NAME)|--model-output NAME›"
_A_BOX = "cam and saliency explain a box: ‹BoxTarget(0)|--target box:0›"
_A_NUMBER = "cam and saliency explain a number of it: ‹target=function|--target file.py:function›"
_INSTEAD = (
    "‹inspect, capture and layer_gradients(loss='mse')|inspect, visualize, stats and `gradients --loss mse`› work on it"
)


@dataclass(frozen=True, slots=True)
class Score(Shown):
    """A number that a model gives an image, which a map explains: mostly the score of one class.

    Attributes:
        index: Number of the class; None for a number that belongs to no class.
        label: Name of the class, None if unknown.
        score: The number: for a class its logit.
        probability: Of the class, 0 to 1; None where there is none.
        best: The probability of the best class.
        target: What it is the score of where that is not just a class, such as ``box 0``; else empty.
        box: ``(left, top, right, bottom)`` of a detected box, or around a region, in pixels of the network's input.
        image: The image, where `predict` says it.
    """

    index: int | None
    label: str | None
    score: float
    probability: float | None
    best: float = field(default=0.0, compare=False, repr=False)
    target: str = field(default="", kw_only=True)
    box: tuple[float, float, float, float] | None = field(default=None, kw_only=True)
    image: str = field(default="", compare=False, repr=False, kw_only=True)

    def _cells(self) -> Cells:
        """What tables show of it."""
        named = {name: text for name in ("image", "target") if (text := getattr(self, name))}
        which = self.label if self.label or self.index is None else self.index
        return {**named, "class": which, "score": self.score, "probability": self.probability}

    @property
    def name(self) -> str:
        """The target, or the label, or ``class 7`` where it is unknown."""
        return self.target or self.label or f"class {self.index}"

    @property
    def key(self) -> str:
        """The name in files: the number of the class, or the target as one word."""
        return re.sub(r"\W+", "-", self.target).strip("-") or str(self.index)

    @property
    def low_probability(self) -> bool:
        """Whether the model does not see the class: it gives it less than a fiftieth of the best probability."""
        return self.probability is not None and self.probability < _SEEN * self.best


@dataclass(frozen=True, slots=True)
class Prediction(Score):
    """The score of one class of a classifier; ``probability`` is the softmax over all classes."""

    index: int
    probability: float


def class_scores(output: Any, what: str = "the model") -> Tensor:
    """The scores ``(N, K)`` of ``K`` classes in a model's output, in its autograd graph.

    They are logits ``(N, K)``, alone or in a container, or the mean over all positions of a segmentation model's logits
    ``(N, K, H, W)``, which a mapping holds under ``out``, ``logits``, ``masks`` or ``mask``. Of a model that ends in a
    softmax or a sigmoid they are the values before it, as far as `output_of` ran it, and an `OutputNote` says so, as it
    does of the choice among several outputs. Other outputs (boxes, flow, embeddings) raise a ModelError on ``what``.
    """
    notes: list[str] = []
    is_detector = gives_boxes(output)
    logits = None if is_detector else _first(output, notes)
    maps = None if is_detector or (logits is not None and logits.dim() == 2) else class_maps(output)
    if logits is not None and logits.is_floating_point() and (maps is not None or logits.dim() == 2):
        _tell(what, notes)
        return logits if maps is None else maps.mean((2, 3))
    if embeddings(output):
        raise ModelError(f"{what} gives {described(output)}, no score for each class", do=EXPLAIN_SIMILARITY)
    do, tensors = f"{_INSTEAD}; {_A_NUMBER}", tensors_in(output)
    if is_detector:
        do = f"{_INSTEAD}; {_A_BOX}"
    elif class_maps(output, bare=True) is not None:
        do = f"{_INSTEAD}; for a segmentation, cam, saliency and inspect take a class: try ‹target=1|--target 1›"
    elif len(_vectors(tensors)) > 1 or any(tensor.dim() == 4 for tensor in tensors.values()):
        do = f"{_INSTEAD}; choose one with {CHOOSE_OUTPUT}"
    raise ModelError(f"{what} gives {described(output)}, no score for each class", do=do)


def class_at(maps: Tensor) -> Tensor:
    """``(h, w)`` the class with the highest of the scores ``(K, h, w)`` at each position, -1 for none.

    One map alone has its class where the score is above 0, or above 0.5 if its values are probabilities.
    """
    if len(maps) > 1:
        return maps.argmax(0)
    low, high = (-1, 1) if isinstance(maps, Logits) else maps.aminmax()
    return (maps[0] > (0.5 if low >= 0 and high <= 1 else 0.0)).long() - 1


def class_maps(output: Any, bare: bool = False, what: str = "") -> Tensor | None:
    """The scores ``(N, K, h, w)`` of ``K`` classes at each position; None for the output of other models.

    A mapping holds them under ``out``, ``logits``, ``masks`` or ``mask``. With ``bare`` a tensor alone counts
    too. With the name ``what`` of the model, notes come as of `class_scores`.
    """
    notes: list[str] = []
    logits = _first(output, notes)
    fits = isinstance(output, Mapping | Tensor if bare else Mapping)
    if not fits or logits is None or logits.dim() != 4 or not logits.is_floating_point():
        return None
    _tell(what, notes)
    return logits


def _tell(what: str, notes: list[str]) -> None:
    for note in notes if what else ():
        warnings.warn(f"{what} {note}", OutputNote, stacklevel=4)


def _first(output: Any, notes: list[str]) -> Tensor | None:
    """The tensor that may hold the logits; None for the output of a detector or a feature pyramid."""
    if is_a_list_of_records(output):
        return None
    tensors = tensors_in(output)
    masks = [
        name for name in ("masks", "mask") if name in tensors and tensors[name].dim() == 4 and not gives_boxes(output)
    ]
    logits = next((tensors[name] for name in (*_LOGITS, *masks) if name in tensors), None)
    if logits is None:
        logits = None if embeddings(output) else _most_like_scores(tensors, notes)
        # Maps under another name may be features: only vectors can be scores.
        if isinstance(output, Mapping) and logits is not None and logits.dim() != 2:
            return None
    return None if logits is None else _before_ending(logits.dequantize() if logits.is_quantized else logits, notes)


def _vectors(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.dim() == 2 and tensor.is_floating_point()]


def _most_like_scores(tensors: Mapping[str, Tensor], notes: list[str]) -> Tensor | None:
    """The vector that a softmax or a sigmoid made, else by name, of two numbers or more, the first; else the first."""

    def rank(name: str) -> tuple[bool, ...]:
        ends = ending_of(tensors[name]) is not None or is_distribution(tensors[name])
        words = not _SCORES.search(name.lower()), any(words.search(name.lower()) for words in (_FEATURES, NUMBERS))
        return not ends, *words, name.isdecimal() and tensors[name].shape[1] < 2

    first, ranked = next(iter(tensors), ""), sorted(_vectors(tensors), key=rank)
    if len(tensors) < 2 or not ranked or (first not in ranked and [*map(rank, ranked)].count(rank(ranked[0])) > 1):
        return tensors.get(first)
    shapes = [f"{name} ({'x'.join(map(str, tensor.shape)) or 'one value'})" for name, tensor in tensors.items()]
    words = f"{ranked[0]} is taken as the scores of classes; {CHOOSE_OUTPUT} chooses another one"
    notes.append(spelled(f"returns {listed(shapes, 6)}: {words}"))
    return tensors[ranked[0]]


class Logits(Tensor):
    """Scores before a sigmoid: the probability of each class is the sigmoid of its score, whatever the others are."""


def _before_ending(output: Tensor, notes: list[str]) -> Tensor:
    """The scores before the softmax or the sigmoid that made ``output``; without one ``output`` itself."""
    if ending := ending_of(output):
        own = ", and each class has a probability of its own" if ending.kind == "sigmoid" else ""
        notes.append(f"ends in a {ending.kind}: the scores are the values before it{own}")
        return ending.before().as_subclass(Logits) if own else ending.before()
    if not is_distribution(output):
        return output
    notes.append("returns probabilities: the scores are their logarithms")
    return output.clamp_min(torch.finfo(output.dtype).tiny).log()


def is_distribution(output: Tensor) -> bool:
    """Whether the values of each image are probabilities of classes: not below 0, 1 in sum, and not all 0 or 1."""
    if output.dim() not in (2, 4) or output.shape[1] < 2 or not output.numel() or not output.is_floating_point():
        return False
    values = output.detach().float()
    between = (values > 0) & (values < 1)  # a sure softmax rounds to 1
    return bool((values >= 0).all() and between.any() and ((values.sum(1) - 1).abs() < _ROUNDING).all())


def _says_numbers(output: Any) -> bool:
    """Whether the name of the only output says that it holds numbers such as a box, no scores."""
    return isinstance(output, Mapping) and len(output) == 1 and bool(NUMBERS.search(str(next(iter(output)))))


def embeddings(output: Any) -> list[Tensor]:
    """The vectors ``(N, D)`` that a model of transformers calls the embedding of an image."""
    return [output[name] for name in _EMBEDDINGS if name in output] if isinstance(output, Mapping) else []


def gives_boxes(output: Any) -> bool:
    """Whether it has the form of a detector's output, such as of torchvision, transformers or ultralytics."""
    return detections_in(output) is not None


def is_a_list_of_records(output: Any) -> bool:
    """Whether it is a detector's output: boxes, labels and scores of each picture."""
    return isinstance(output, list) and bool(output) and isinstance(output[0], dict)


def described(output: Any) -> str:
    """What a model's output holds, in a few words."""
    if is_a_list_of_records(output):
        *names, last = output[0]
        return " and ".join(filter(None, [", ".join(names), last]))
    if isinstance(output, list):
        return f"a list of {len(output)} tensors"
    shape = shape_of(output)
    if isinstance(shape, dict):
        return ", ".join(
            f"{part} of {'x'.join(map(str, sizes)) or 'one value'}" for part, sizes in list(shape.items())[:3]
        )
    if shape is None:
        return "no tensor"
    return f"{'x'.join(map(str, shape))} values" if shape else "one value"


def check_family(family: str, what: str = "the model", needs: str = "score for each class") -> None:
    """Raise a ModelError, before a forward pass, for a family without what the caller ``needs``."""
    if family in _GIVES:
        do = f"{_INSTEAD}; {_A_BOX}" if _GIVES[family] == _BOXES else _INSTEAD
        raise ModelError(f"{what} gives {_GIVES[family]}, no {needs}", do=do)


def without_scores(output: Any, family: str, what: str = "the model") -> str:
    """Why ``output`` of the model ``what`` has no score for each class; empty if it has."""
    try:
        check_family(family, what)
        class_scores(output, what)
    except ModelError as error:
        return error.asked
    return f"{what} gives {described(output)}, no score for each class" if _says_numbers(output) else ""


def check_categories(categories: Sequence[str], classes: int, what: str = "the model") -> None:
    """Raise a CategoriesError if the number of names differs from the number of classes."""
    if len(categories) != classes:
        asked = f"{counted(len(categories), 'class name')} for {classes:,} {'class' if classes == 1 else 'classes'}"
        raise CategoriesError(f"{asked} of {what}", do="give the class names of this model")


def one_picture(scores: Tensor, do: str = "") -> Tensor:
    """The scores ``(K,)`` of the only picture in ``(1, K)``, which must have at least one class.

    ``do`` is what else to do with several.
    """
    if len(scores) != 1:
        do = do or "call it once for each image; a model that gives several rows for one has no score for each class"
        raise UsageError(f"expected one image, got {len(scores)}", do=do)
    if not scores.shape[1]:
        raise ModelError("the model has no classes: its scores are empty", do=_INSTEAD)
    return scores[0]


def probabilities(scores: Tensor) -> Tensor:
    """The softmax of ``scores`` ``(N, K)`` over the classes, in double precision.

    Of a single class, and of `Logits`, it is the sigmoid.
    """
    values = scores.detach().cpu().double()  # not every device has double precision
    independent = isinstance(scores, Logits) or values.shape[-1] == 1
    return (values.sigmoid() if independent else values.softmax(-1)).as_subclass(Tensor)


def predictions(scores: Tensor, categories: ClassNames, target: Target | None = None) -> list[Prediction]:
    """The classes of ``target`` (default ``top:5``) of one picture with logits ``(K,)``, in `Target.indices`' order."""
    if categories:
        check_categories(categories, len(scores))
    shares = probabilities(scores).tolist()
    values = scores.detach().cpu().double().tolist()
    classes = (target or Target("top:5")).indices(values, categories)
    best = max(shares)
    return [Prediction(at, class_label(at, categories), values[at], shares[at], best) for at in classes]


def check_finite_score(score: Score) -> None:
    """Refuse a score that is NaN or Inf, which nothing can explain."""
    if not math.isfinite(score.score):
        asked = f"the score of {score.target or f'class {score.index}'} is not finite"
        raise InputError(asked, do=FIND_NON_FINITE)


def predict(net: AnyModel, images: Any, target: Any = "top:5", categories: ClassNames = None) -> Rows[Score]:
    """The classes that a model gives to images in eval mode, of each image the highest score first.

    Of a segmentation the score is the share of the pixels where the class is the best, and there is no probability.
    Of an output without scores of classes, such as one number, it is each of up to 16 numbers.

    Args:
        net: What `load_model` returns, or any eager module with a score for each class.
        images: Paths, folders or images, one or several, with what `load_model` returns; or tensors ``(3, H, W)``.
        target: Which classes: ``top:K``, numbers or names.
        categories: Names of the classes, by default the model's.

    Raises:
        ModelError: the model has no score for each class: detection, optical flow.
        TargetError: no such class.
        CategoriesError: the number of names differs from the number of classes.
        ImageError: an image cannot be read.
        InputError: the model refuses an image.
        UsageError: there is no image.

    Example:
        >>> import hookscope
        >>> rows = hookscope.predict(hookscope.load_model("shapes"), "samples/shapes/star.png", "top:2")
        >>> [(row.label, round(row.probability, 3)) for row in rows]
        [('star', 0.954), ('triangle', 0.006)]
    """
    loaded, wanted, rows = as_loaded(net), Target.of(target), Rows[Score]()
    check_family(loaded.family, loaded.name)
    names = loaded.categories if categories is None else categories
    wanted.check(names)
    is_one = isinstance(images, Tensor) and images.dim() == len(loaded.preprocess.input_shape)
    images = images[None] if is_one else images
    for at, image in enumerate(images if tensors_in(images) else list_pictures(images)):
        picture = None if isinstance(image, Tensor) else as_picture(image, loaded.preprocess.frames)
        inputs = given_inputs(net, loaded.inputs(image) if picture is None else picture)
        with model_errors_as_input_errors(loaded.name, inputs), evaluating(loaded.model), torch.no_grad():
            output, what = output_of(loaded.model, *inputs), type(loaded.model).__name__
            maps = pixel_maps(output, next(iter(tensors_in(inputs).values()))[0], what)
            if maps is not None:
                _tell(what, ["gives classes of pixels: the score of a class is its share of the pixels"])
                classes = pixel_classes(maps, names, wanted) or [Score(0, class_label(0, names), 0.0, None)]
            else:
                classes = _classes_or_numbers(output, what, names, wanted)
        name = (picture and picture.name) or str(at)
        rows += [replace(row, image=name) for row in classes]
    if not rows:
        raise UsageError("there is no image to predict", do="give a file, a PIL image or a tensor")
    return rows


def _classes_or_numbers(output: Any, what: str, names: ClassNames, wanted: Target) -> list[Score]:
    """The classes of one image; of an output without a score for each class its numbers."""
    if _says_numbers(output) and wanted.has_top and (numbers := output_numbers(output)):
        return numbers
    try:
        scores = one_picture(class_scores(output, what))
    except ModelError:
        if names or not wanted.has_top or not (numbers := output_numbers(output)):
            raise
        return numbers
    if len(scores) == 1 and not isinstance(scores, Logits):
        _tell(what, ["gives one number: the probability is its sigmoid, which means nothing for a regression"])
    return [*predictions(scores, names, wanted)]


def output_numbers(output: Any) -> list[Score]:
    """The numbers of an output for one image that has few values; none for other outputs."""
    parts = {} if isinstance(output, list) else tensors_in(output)
    parts = {name: tensor for name, tensor in parts.items() if tensor.is_floating_point()}
    total = sum(tensor.numel() for tensor in parts.values())
    if total > _MOST_NUMBERS or any(len(tensor) > 1 for tensor in parts.values() if tensor.dim() > 1):
        return []
    return [
        Score(None, None, value, None, target=" ".join(filter(None, [name or "output", str(at) * (len(values) > 1)])))
        for name, tensor in parts.items()
        for values in [as_float(tensor.detach()).flatten().tolist()]
        for at, value in enumerate(values)
    ]


def pixel_maps(output: Any, prepared: Tensor, what: str = "") -> Tensor | None:
    """The scores ``(K, h, w)`` of the classes of each pixel of one ``prepared`` image; None for other outputs.

    Of a tensor alone, coarse maps are features, and maps like the input are an image. For ``what`` see `class_maps`.
    """
    maps = class_maps(output, bare=True, what=what)
    if maps is None or len(maps) != 1 or not bool(maps.isfinite().all()):
        return None
    coarse = max(prepared.shape[-2] / maps.shape[2], prepared.shape[-1] / maps.shape[3]) > _COARSEST
    is_bare = not isinstance(output, Mapping)
    return None if is_bare and (coarse or likeness(output, prepared) > LIKE) else maps[0].detach()


def likeness(output: Any, prepared: Tensor) -> float:
    """The lowest correlation of a channel of a tensor ``(1, C, h, w)`` with its channel of the input; else 0."""
    if not isinstance(output, Tensor) or output.dim() != 4 or output.shape[:2] != (1, len(prepared)):
        return 0.0
    maps = as_float(output[0].detach())
    given = interpolate(as_float(prepared)[None].to(maps.device), maps.shape[1:])[0]  # or it has another resolution
    pairs = zip(maps.flatten(1), given.flatten(1), strict=True)
    return min(float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in pairs)


def pixel_classes(maps: Tensor, categories: ClassNames, target: Target) -> list[Score]:
    """The classes of ``target`` with their share of the pixels; ``top:K`` leaves out a class without a pixel."""
    if categories:
        check_categories(categories, len(maps))
    best = class_at(maps)
    shares = (torch.bincount(best[best >= 0], minlength=len(maps)).double() / best.numel()).tolist()
    classes = target.indices([share or None for share in shares], categories)
    return [Score(at, class_label(at, categories), shares[at], None) for at in classes]
