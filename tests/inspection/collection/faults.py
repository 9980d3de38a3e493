"""Faults for the trained networks, each with the places that count as right and the words that name its cause.

Places, words and ``visible`` were written down before anybody ran an inspection on them: leave them as they are.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from tests.inspection.collection import nets
from tests.inspection.collection.nets import normalise

# What counts as naming the cause, in the kind or the reason of a place.
INIT = r"initiali|initial|untrained|never trained|not trained|not (been )?loaded|default|random|fresh|not learn"
STRANGE = (
    r"another (layer|network|model|run|training)|other (layer|network|run)|does not (fit|belong)|not (fit|match)"
    r"|mismatch|swap|exchang|mix|foreign|statistics|untrained|random|disagree|expects"
)
ORDER = r"permut|order|shuffl|swap|exchang|transpos|mismatch|does not (fit|match)|mix|disagree"
STATS = r"running|statistic|buffer|batch ?norm|mean|variance|var\b|initial"
BATCH = r"batch|other (images|pictures)|depends on|running"
EPS = r"\beps|epsilon"
PRUNED = r"zero|prun|sparse|dead|empty"
COARSE = r"quanti|coarse|bits|levels|distinct|values|precision|round"
SKIP = r"skip|residual|shortcut|identity|add|branch|double"
ACT = r"activation|relu|gelu|silu|non-?linear|negative|linear|clip"
NORM = r"norm"
SCALE = (
    r"scale|magnitude|larger|smaller|too (large|small)|explod|vanish|shrink|shrunk|grow|amplif|gain|big|small|tiny"
    r"|huge|std|factor|weak|loud"
)
SIGN = r"sign|negat|flip|invert|opposite|mirror|anti|correlat"
NAN = r"nan\b|non-?finite|inf\b|infinit|overflow|not finite"
DEAD = r"dead|zero|never (active|fire)|silent|inactive|closed|constant"
SOFT = r"softmax|probabilit|sum to|already normal|logit"
DROP = r"dropout|random|differ|not (repeatable|determin)|two (runs|passes)|stochastic|nondetermin"
ATTN = r"attention|softmax|axis|dim|head|query|queries|key|uniform|scale"
POS = r"position"
TOKEN = r"token|class"
FLAT = r"flatten|order|permut|layout|reshape|shuffl|view"
GATE = r"gate|sigmoid|squeeze|excit|range|0\.\.1|negative|closed|zero"
LOST = r"zero|lost|missing|unused|ignored|constant|dead|no (effect|influence)|disconnect|branch|skip|silent"
POOL = r"pool|pad|stride|dilat|size|border"
FLATOUT = r"flat|uniform|confiden|small|same answer|logit|scale|indiffer|weak"
INPUT = (
    r"input|preproc|image|picture|pixel|normali|mean|std|range|255|channel|colou?r|bgr|rgb|grey|gray|orient|size|dark"
    r"|contrast"
)
SHIFT = r"shift|offset|mean|zero.?point|bias|one sign|positive|" + COARSE
Make = Callable[[Any, str], Any]


@dataclass(frozen=True)
class Fault:
    """A fault at the first of its places; an empty place is the whole network.

    Attributes:
        places: Parted by spaces; ``input`` alone for what is right for all faults of the input.
        words: A pattern for words that name the cause.
        visible: Whether model and images can tell that something is wrong.
        other: Whether the layer comes from the second training.
        prepare: Makes the input of a picture from 0 to 1, in place of `normalise`.
    """

    name: str
    places: str
    words: str
    make: Make = lambda net, place: None
    visible: bool = True
    other: bool = False
    prepare: Callable[[Tensor, str], Tensor] = normalise
    picture: Callable[[Image.Image], Image.Image] = lambda picture: picture

    def right(self, name: str) -> list[str]:
        return ["", "input", *nets.RECIPES[name].first.split()] if self.places == "input" else self.places.split(" ")

    def planted(self, net: nn.Module, other: Any) -> nn.Module:
        """A copy of the network with the fault; ``other`` is its second training."""
        net, place = copy.deepcopy(net), self.places.split(" ")[0]
        if self.other:
            net.get_submodule(place).load_state_dict(other.get_submodule(place).state_dict())
        self.make(net, place)
        return net.eval()


def _prepared(name: str, prepare: Callable[[Tensor, str], Tensor]) -> Fault:
    return Fault(name, "input", INPUT, prepare=prepare)


def _picture(name: str, change: Callable[[Image.Image], Image.Image], visible: bool = True) -> Fault:
    return Fault(name, "input", INPUT, picture=change, visible=visible)


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(15)


def _changed(change: Callable[[Tensor], Tensor], *names: str) -> Make:
    """Change the weight of the layer, or the parameters with these names."""

    def make(net: nn.Module, place: str) -> None:
        for name in names or ("weight",):
            parameter = net.get_parameter(f"{place}.{name}".strip("."))
            parameter.data = change(parameter.data).contiguous()

    return make


def _reset(name: str = "reset_parameters") -> Make:
    """As built: the keys were missing in the file of weights."""

    def make(net: nn.Module, place: str) -> None:
        torch.manual_seed(99)
        getattr(net.get_submodule(place), name)()

    return make


def _permuted(axis: int, *names: str) -> Make:
    return _changed(lambda w: w.index_select(axis, torch.randperm(w.shape[axis], generator=_random())), *names)


def _bias(value: float, share: float = 1.0, name: str = "bias") -> Make:
    return _changed(lambda b: b.index_fill(0, torch.arange(int(share * len(b))), value), name)


def _in_two_bits(w: Tensor) -> Tensor:
    step = w.abs().max() / 1.5
    return ((w / step).floor() + 0.5) * step


def _wrapped(w: Tensor) -> Tensor:
    """As int8 with too small a step: larger values wrap around."""
    step = w.std() * 1.4 / 127
    return ((w / step).round() + 128).remainder(256).sub(128) * step


def _pruned(share: float) -> Make:
    return _changed(lambda w: w * (w.abs() > w.abs().flatten().kthvalue(int(share * w.numel()))[0]))


def _one(value: float, name: str) -> Make:
    return _changed(lambda w: w.flatten().index_fill(0, torch.tensor(3), value).view_as(w), name)


def _grid_transposed(w: Tensor) -> Tensor:
    return torch.cat([w[:, :1], w[:, 1:].reshape(1, 8, 8, -1).transpose(1, 2).flatten(1, 2)], 1)


def _exchanged(other: str, own: str = "", *buffers: str) -> Make:
    """Keys of two layers are mixed up in the file of weights: all, or these alone."""

    def make(net: nn.Module, place: str) -> None:
        layers = net.get_submodule(own or place), net.get_submodule(other)
        states = [copy.deepcopy(layer.state_dict()) for layer in layers]
        for layer, state in zip(layers, reversed(states), strict=True):
            layer.load_state_dict({key: state[key] for key in buffers or state}, strict=not buffers)

    return make


def _affine_lost(net: nn.Module, place: str) -> None:
    nn.init.ones_(net.get_parameter(f"{place}.weight"))
    nn.init.zeros_(net.get_parameter(f"{place}.bias"))


def _last_batch(net: nn.Module, place: str) -> None:
    """A momentum of 1: the running statistics are of the last batch alone, which was nearly black."""
    norm: Any = net.get_submodule(place)
    norm.train().momentum = 1.0
    with torch.no_grad():
        net(normalise(torch.rand(16, 3, 40, 40, generator=_random()) * 0.05, "dense"))


def _with(**values: Any) -> Make:
    def make(net: nn.Module, place: str) -> None:
        for name, value in values.items():
            setattr(net.get_submodule(place), name, value)

    return make


def _replaced(make: Callable[[], nn.Module]) -> Make:
    return lambda net, place: net.set_submodule(place, make())


def _runs(at: str | None = None, /, **methods: Callable[..., Any]) -> Make:
    """The layer, or the one ``at`` another place, has other methods."""

    def make(net: nn.Module, place: str) -> None:
        layer = net.get_submodule(place if at is None else at)
        layer.__class__ = type("Other", (type(layer),), methods)

    return make


FAULTS: dict[str, tuple[Fault, ...]] = {}
FAULTS["preact"] = (
    Fault("stem-not-loaded", "stem stage1.0.bn1", INIT, _reset()),
    Fault("other-run-late", "stage3.0.conv2 stage3.1.bn1", STRANGE, other=True),
    Fault("keys-swapped", "stage2.1.conv1 stage2.1.conv2 stage2.1.bn2 stage3.0.bn1", STRANGE,
          _exchanged("stage2.1.conv2")),
    Fault("buffers-lost", "stage2.0.bn2", STATS, _reset("reset_running_stats")),
    Fault("affine-lost", "stage2.0.bn1", INIT, _affine_lost),
    Fault("no-skip", "stage2.1 stage3.0.bn1", SKIP,
          _runs(forward=lambda b, x: b.conv2(F.relu(b.bn2(b.conv1(F.relu(b.bn1(x)))))))),
    Fault("skip-twice", "stage1.1 stage2.0.bn1", SKIP + "|" + SCALE,
          _runs(forward=lambda b, x: nets.PreAct.forward(b, x) + x)),
    Fault("no-relu", "stage1.0 stage1.0.bn1 stage1.0.conv1 stage1.0.bn2", ACT,
          _runs(forward=lambda b, x: b.conv2(F.relu(b.bn2(b.conv1(y := b.bn1(x))))) + b.shortcut(y))),
    Fault("no-bn2", "stage3.0 stage3.0.bn2 stage3.0.conv1 stage3.0.conv2", NORM + "|unused|not called",
          _runs(forward=lambda b, x: b.conv2(F.relu(b.conv1(y := F.relu(b.bn1(x))))) + b.shortcut(y))),
    Fault("batch-statistics", "stage3.0.bn1", BATCH,
          _with(track_running_stats=False, running_mean=None, running_var=None)),
    Fault("eps-small-change", "stage2.1.bn2", EPS, _with(eps=1e-3), visible=False),
    Fault("eps-large", "stage1.0.bn1", EPS, _with(eps=0.5)),
    Fault("pruned", "stage1.1.conv1 stage1.1.bn2", PRUNED, _pruned(0.97)),
    Fault("nan", "stage2.0.conv1 stage2.0.bn2", NAN, _one(math.nan, "weight")),
    _prepared("bgr", lambda x, net: normalise(x.flip(0), net)),
    _prepared("unscaled", lambda x, net: normalise(x * 255, net)),
    _picture("mirrored", lambda p: p.transpose(Image.Transpose.FLIP_LEFT_RIGHT), visible=False),
)  # fmt: skip
FAULTS["incept"] = (
    Fault("branch-order",
          "mixed2 mixed3.branch1.conv mixed3.branch3.0.conv mixed3.branch5.0.conv mixed3.branch_pool.conv", ORDER,
          _runs(forward=lambda b, x: torch.cat([b.branch3(x), b.branch5(x), b.branch1(x), b.branch_pool(F.avg_pool2d(x,
          3, 1, 1))], 1))),
    Fault("branch-lost", "mixed3 mixed3.branch5 fc1", LOST,
          _runs(forward=lambda b, x: torch.cat([b.branch1(x), b.branch3(x), torch.zeros_like(b.branch5(x)),
          b.branch_pool(F.avg_pool2d(x, 3, 1, 1))], 1))),
    Fault("no-activation", "mixed1.branch3.1.act mixed1.branch3.1.conv", ACT, _replaced(nn.Identity)),
    Fault("slope", "reduce.act reduce.conv", ACT + "|slope", _with(negative_slope=0.01), visible=False),
    Fault("not-loaded", "reduce.conv reduce.act", INIT, _reset()),
    Fault("bias-lost", "mixed2.branch3.1.conv mixed2.branch3.1.act", r"bias", _bias(0.0)),
    Fault("eight", "mixed1.branch5.2.conv mixed1.branch5.2.act", SCALE, _changed(lambda w: w * 8, "weight", "bias")),
    Fault("sign", "mixed3.branch3.1.conv mixed3.branch3.1.act", SIGN, _changed(lambda w: w * -1)),
    Fault("two-bits", "stem.conv stem.act", COARSE, _changed(_in_two_bits)),
    Fault("wrapped", "mixed1.branch3.1.conv mixed1.branch3.1.act", COARSE + "|wrap|overflow|distribution|tail|cut",
          _changed(_wrapped)),
    Fault("inf", "mixed3.branch_pool.conv mixed3.branch_pool.act mixed3", NAN, _one(math.inf, "bias")),
    Fault("padding", "stem.conv stem", POOL, _with(padding=(0, 0)), visible=False),
    _prepared("imagenet", lambda x, net: normalise(x, "dense")),
    _prepared("range-255", lambda x, net: x * 255),
    _picture("grey", lambda p: p.convert("L").convert("RGB")),
)  # fmt: skip
FAULTS["flat"] = (
    Fault("flatten-order", "fc1 ", FLAT, _runs("", rest=lambda n, x: nets.Flat.rest(n, x.permute(0, 2, 3, 1)))),
    Fault("transposed", "fc2", ORDER, _changed(lambda w: w.T)),
    Fault("other-run", "conv2 conv3", STRANGE, other=True),
    Fault("not-loaded", "conv3 conv4", INIT, _reset()),
    Fault("no-relu", "conv4 fc1 ", ACT, _runs("", last=lambda n, x: F.max_pool2d(x, 2))),
    Fault("softmax-inside", "fc3 ", SOFT, _runs("", forward=lambda n, x: nets.Flat.forward(n, x).softmax(1))),
    Fault("dropout", "fc1 fc2 ", DROP,
          _runs("", rest=lambda n, x: n.fc3(F.relu(n.fc2(F.dropout(F.relu(n.fc1(torch.flatten(x, 1))), 0.5)))))),
    Fault("pruned", "fc1", PRUNED, _pruned(0.995)),
    Fault("two-bits", "conv2", COARSE, _changed(_in_two_bits)),
    Fault("kernel-flipped", "conv2 conv3", ORDER + "|flip", _changed(lambda w: w.flip(2, 3)), visible=False),
    Fault("dead", "conv4 fc1", DEAD + "|bias", _bias(-30.0, 0.9)),
    Fault("overflow", "fc1", NAN + "|" + SCALE, _changed(lambda w: w * 1e38)),
    _picture("inverted", lambda p: p.point(lambda v: 255 - v)),
    _prepared("not-normalised", lambda x, net: x),
    _picture("rotated", lambda p: p.rotate(90), visible=False),
)  # fmt: skip
FAULTS["dense"] = (
    Fault("norm-not-loaded", "features.norm0 features.relu0", INIT, _reset()),
    Fault("transition-not-loaded", "features.transition1.conv features.transition1.pool", INIT, _reset()),
    Fault("keys-swapped", "features.block2.0.conv2 features.block2.1.conv2", STRANGE,
          _exchanged("features.block2.1.conv2")),
    Fault("cat-order", "features.block1.1 features.block1.2.norm1", ORDER + "|concat",
          _runs(forward=lambda b, x: torch.cat([b.new(x), x], 1))),
    Fault("new-lost", "features.block2.1 features.block2.1.conv2 features.block2.2.norm1", LOST,
          _runs(forward=lambda b, x: torch.cat([x, b.new(x) * 0], 1))),
    Fault("buffers-swapped", "features.block3.0.norm2 features.block3.3.norm2", STATS,
          _exchanged("features.block3.3.norm2", "", "running_mean", "running_var")),
    Fault("momentum", "features.block1.0.norm2", STATS, _last_batch),
    Fault("eps", "features.norm5", EPS, _with(eps=0.1)),
    Fault("max-pool", "features.transition1.pool", POOL, _replaced(lambda: nn.MaxPool2d(2)), visible=False),
    Fault("class-order", "classifier ", ORDER + "|class|label", _permuted(0), visible=False),
    _prepared("bgr", lambda x, net: normalise(x.flip(0), net)),
    _prepared("twice-normalised", lambda x, net: normalise(normalise(x, net), net)),
    _picture("larger", lambda p: p.resize((80, 80), Image.Resampling.BILINEAR)),
)  # fmt: skip
FAULTS["vitc"] = (
    Fault("positions-initial", "positions patches layers.0.ln_1", INIT + "|" + POS,
          _changed(lambda w: torch.randn(w.shape, generator=_random()) * 0.02, "")),
    Fault("positions-transposed", "positions patches layers.0.ln_1", POS,
          _changed(_grid_transposed, ""), visible=False),
    Fault("token-initial", "class_token patches layers.0.ln_1", TOKEN + "|" + INIT, _changed(torch.zeros_like, "")),
    Fault("token-last", "class_token positions patches ln_final head layers.0.ln_1 ", TOKEN + "|" + POS,
          _runs("", joined=lambda n, token, x: torch.cat([x, token], dim=1))),
    Fault("query-key", "layers.1.attention", ATTN + "|swap",
          _exchanged("layers.1.attention.key", "layers.1.attention.query"), visible=False),
    Fault("values-swapped",
          "layers.1.attention.value layers.2.attention.value layers.1.attention.out layers.2.attention.out", STRANGE,
          _exchanged("layers.2.attention.value")),
    Fault("no-scale", "layers.0.attention", ATTN,
          _runs(scores=lambda a, q, k: torch.matmul(q, k.transpose(-1, -2))), visible=False),
    Fault("softmax-axis", "layers.2.attention", ATTN, _with(axis=1)),
    Fault("no-merge", "layers.1.attention", ATTN + "|transpos|order",
          _runs(merge=lambda a, x: x.reshape(len(x), x.shape[2], -1))),
    Fault("out-transposed", "layers.0.attention.out", ORDER, _changed(lambda w: w.T)),
    Fault("no-gelu", "layers.0 layers.0.up layers.0.down", ACT,
          _runs(forward=lambda b, x: (y := x + b.attention(b.ln_1(x))) + b.down(b.up(b.ln_2(y))))),
    Fault("no-residual", "layers.1 layers.1.down layers.2.ln_1", SKIP,
          _runs(forward=lambda b, x: b.down(F.gelu(b.up(b.ln_2(x + b.attention(b.ln_1(x)))))))),
    Fault("norm-initial", "layers.0.ln_2 layers.0.up", INIT, _reset()),
    Fault("other-run", "layers.2.up layers.2.down", STRANGE, other=True),
    Fault("twentieth", "layers.0.down layers.0.up", SCALE, _changed(lambda w: w * 0.05, "weight", "bias")),
    _picture("grey", lambda p: p.convert("L").convert("RGB")),
)  # fmt: skip
FAULTS["vitm"] = (
    Fault("positions-zero", "pos project encoder.layers.0.norm1", POS + "|zero", _changed(torch.zeros_like, "")),
    Fault("positions-shuffled", "pos project encoder.layers.0.norm1", POS + "|" + ORDER, _permuted(0, "")),
    Fault("batch-axis", "encoder ", BATCH + "|" + ATTN,
          _runs("", forward=lambda n, x: n.head(n.encoder((n.project(n.cut(x)) + n.pos).transpose(0, 1)).mean(0)))),
    Fault("post-norm", "encoder.layers.2", NORM, _with(norm_first=False)),
    Fault("relu", "encoder.layers.1 encoder.layers.1.linear1 encoder.layers.1.linear2", ACT,
          _with(activation=F.relu, activation_relu_or_gelu=1), visible=False),
    Fault("qkv-order", "encoder.layers.1.self_attn", ATTN + "|" + ORDER,
          _changed(lambda w: torch.cat(w.chunk(3)[::-1]), "in_proj_weight", "in_proj_bias")),
    Fault("eight-heads", "encoder.layers.1.self_attn", ATTN, _with(num_heads=8, head_dim=8), visible=False),
    Fault("out-not-loaded", "encoder.layers.0.self_attn.out_proj", INIT, _reset()),
    Fault("no-final-norm", "encoder.norm encoder head.0 ", NORM, lambda net, place: setattr(net.encoder, "norm", None)),
    Fault("keys-swapped", "encoder.layers.0.linear2 encoder.layers.1.linear2", STRANGE,
          _exchanged("encoder.layers.1.linear2")),
    Fault("patch-order", "project ", ORDER + "|layout",
          _runs("", cut=lambda n, x: nets.MeanViT.cut(n, x).unflatten(2, (3, 25)).transpose(2, 3).flatten(2))),
    Fault("sign", "encoder.layers.0.linear1 encoder.layers.0.linear2", SIGN, _changed(lambda w: w * -1)),
    Fault("dropout", "head head.0 encoder.norm ", DROP,
          _runs("", forward=lambda n, x: n.head(F.dropout(n.encoder(n.project(n.cut(x)) + n.pos).mean(1), 0.5)))),
    Fault("heads-cut", "encoder.layers.1.self_attn", PRUNED + "|head",
          _changed(lambda w: w.index_fill(1, torch.arange(16, 64), 0.0), "out_proj.weight")),
    _picture("upside-down", lambda p: p.rotate(180), visible=False),
)  # fmt: skip
FAULTS["seg"] = (
    Fault("cat-order", "up2 up2.fuse1.conv up2.fuse1.bn", ORDER + "|concat",
          _runs(forward=lambda b, x, skip: b.fuse2(b.fuse1(torch.cat([skip, F.interpolate(x, size=skip.shape[-2:],
          mode="bilinear", align_corners=False)], 1))))),
    Fault("skip-zero", "up1 up1.fuse1.conv up1.fuse1.bn enc1.1", LOST,
          _runs(forward=lambda b, x, skip: nets.Up.forward(b, x, torch.zeros_like(skip)))),
    Fault("norm-not-loaded", "enc2.0.bn enc2.0.act", INIT, _reset()),
    Fault("buffers-lost", "enc1.1.bn enc1.1.act", STATS, _reset("reset_running_stats")),
    Fault("permuted", "enc2.0.conv enc2.0.bn", ORDER + "|" + STATS, _permuted(0)),
    Fault("keys-swapped", "enc2.1.conv enc2.1.bn up2.fuse2.conv up2.fuse2.bn", STRANGE, _exchanged("up2.fuse2.conv")),
    Fault("not-loaded", "enc1.1.conv enc1.1.bn", INIT, _reset()),
    Fault("no-relu", "up1.fuse1.act up1.fuse1.bn up1.fuse2.conv", ACT, _replaced(nn.Identity)),
    Fault("ten", "up3.fuse2.conv up3.fuse2.bn", SCALE, _changed(lambda w: w * 10)),
    Fault("zero-point", "enc3.0.conv enc3.0.bn", SHIFT, _changed(lambda w: w + w.std())),
    _picture("dark", lambda p: p.point(lambda v: v // 10)),
    _prepared("not-normalised", lambda x, net: x),
    _picture("upside-down", lambda p: p.rotate(180), visible=False),
)  # fmt: skip
FAULTS["wsse"] = (
    Fault("no-standardisation", "body.1.conv1 body.1.gn1", r"standardi|weight|" + SCALE, _with(__class__=nn.Conv2d)),
    Fault("groups", "body.2.gn1", r"group", _with(num_groups=4), visible=False),
    Fault("norm-initial", "root.gn root.act", INIT, _reset()),
    Fault("no-sigmoid", "body.2.gate", GATE,
          _runs(forward=lambda b, x: x * b.fc2(F.relu(b.fc1(x.mean((2, 3)))))[:, :, None, None])),
    Fault("gates-swapped", "body.1.gate body.2.gate", STRANGE, _exchanged("body.2.gate")),
    Fault("gate-closed", "body.1.gate body.1", GATE, _bias(-15.0, name="fc2.bias")),
    Fault("no-act", "body.1.act body.1", ACT, _replaced(nn.Identity)),
    Fault("no-skip", "body.2 body.3", SKIP,
          _runs(forward=lambda b, x: b.act(b.gate(b.gn2(b.conv2(b.act(b.gn1(b.conv1(x))))))))),
    Fault("side-not-loaded", "body.1.side.1 body.1.side.2", INIT, _reset()),
    Fault("permuted", "body.1.conv1 body.1.gn1", ORDER, _permuted(1)),
    Fault("head-not-loaded", "head ", INIT, _reset()),
    Fault("noise", "body.0.conv1 body.0.gn1", r"noise|random|initial|untrained|rank|flat|spectr",
          _changed(lambda w: w + 4 * w.std() * torch.randn(w.shape, generator=_random()))),
    Fault("hundredth", "head ", FLATOUT, _changed(lambda w: w * 0.01, "weight", "bias")),
    _prepared("not-normalised", lambda x, net: x),
)  # fmt: skip
