"""Maps of attention: what each head looks at, for one query or the mean of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.attention.weights import Attention, Coordinates, follow_attention
from hookscope.display import Cells, Picture, Rows, Shown
from hookscope.drawing import map_png
from hookscope.errors import NoMapError, UsageError
from hookscope.findings import percent
from hookscope.hooks import (
    MODEL,
    AnyModel,
    Call,
    InputSize,
    Layers,
    differentiable,
    module_of,
    passed_on,
    tensors_in,
    token_grid,
)
from hookscope.models import takes_inputs


@dataclass(frozen=True, repr=False)
class AttentionMap(Shown):
    """Where the heads of one call of attention look.

    Attributes:
        call: The place of the call: the module that computes it, and the index among all calls of attention.
        values: ``(heads, h, w)``, or ``(heads, T, h, w)`` for a clip: the attention weight of each position for the
            query, 0 to 1.
        non_patch_weight: ``(heads,)``, the weight on the class token, padding and other keys without a position; with
            ``values`` it adds up to 1.
        query: What looks, such as ``class token`` or ``mean of 196 queries``.
        at: ``(y, x)`` of a query with a position, as shares 0..1 of the input's height and width; else None.
        windows: The number of windows that the attention is cut into; 1 where all positions meet.
        seen: ``(H, W)`` of the network's input.
        weights: ``(windows, heads, L, S)``, the weights of all ``L`` queries and ``S`` keys, if they were asked for.
    """

    call: Call
    values: NDArray[np.float32]
    non_patch_weight: NDArray[np.float32]
    query: str
    at: tuple[float, float] | None
    windows: int
    seen: tuple[int, int]
    weights: Tensor | None = field(default=None, compare=False)

    @property
    def heads(self) -> int:
        return len(self.values)

    @property
    def stills(self) -> NDArray[np.float32]:
        """The maps ``(heads, h, w)`` that are drawn: for a clip the sums over its frames."""
        values: NDArray[np.float32] = self.values.sum(1) if self.values.ndim == 4 else self.values
        return values

    @property
    def effective_positions(self) -> NDArray[np.float32]:
        """``(heads,)``: how many positions a head looks at, as the exponential of the entropy of its map.

        It is 1 for one position, and ``h * w`` where all have the same weight.
        """
        flat = self.values.reshape(self.heads, -1).astype(np.float64)
        weights = flat / np.maximum(flat.sum(1, keepdims=True), np.finfo(float).tiny)
        entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(1)
        effective: NDArray[np.float32] = np.exp(entropy).astype(np.float32)
        return effective

    def _cells(self) -> Cells:
        cells = {"layer": self.call.key, "heads": self.heads, "query": self.query, "map": self.values.shape[1:]}
        cells |= {"windows": self.windows, "non_patch_weight": float(self.non_patch_weight.mean())}
        mean = self.stills.mean(0)
        return cells | {"picture": Picture(partial(map_png, mean), f"mean attention of {self.call.key}")}


Query = str | int | tuple[float, float] | None
_STEP = 1e-4  # of a side: coordinates that are nearer belong to one row or column
_SPARSE = 4  # cells for each key, at most: else the keys form no grid


@takes_inputs
def attention_maps(
    model: AnyModel,
    inputs: Any,
    layers: Layers | None = None,
    query: Query = None,
    *,
    weights: bool = False,
) -> Rows[AttentionMap]:
    """Compute what each head of each layer of attention looks at in one image, the layers in order of execution.

    The weights are ``softmax(Q K^T / sqrt(d))``, with the scale, bias and mask of the model. They come from the pass
    itself; if a fused kernel hides them, they are computed from its queries and keys. This works for torch,
    torchvision, timm, transformers, and any softmax that weighs values. Windows stand at their place in the image,
    whatever their shift and padding. The model runs in eval mode, and stays as it is.

    Args:
        model: Any eager module with attention.
        inputs: The image ``(1, 3, H, W)`` or clip ``(1, 3, T, H, W)``, or the tuple of positional inputs.
        layers: A selection, see `Selection`: names of modules that compute attention or of blocks around them; indices
            count the calls of attention. By default all calls whose keys have positions in the picture.
        query: What looks: ``class`` for the class token, ``mean`` for the mean of all positions, a position ``(y, x)``
            as shares 0..1 of the input's height and width, or the number of a token from 0. By default the class
            token, and where there is none, the mean.
        weights: Also keep the weights of all queries, ``(windows, heads, L, S)``.

    Raises:
        NoMapError: for a model without attention; for calls of ``layers`` whose keys have no positions, or that have no
            such query.
        LayerError: for a layer that does not exist or has no attention.
        UsageError: for a query that cannot be read.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4, 4), torch.nn.Flatten(2))
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.patches, self.attention = torch.nn.Conv2d(3, 8, 4, 4), torch.nn.MultiheadAttention(8, 2)
        ...     def forward(self, x):
        ...         tokens = self.patches(x).flatten(2).permute(2, 0, 1)
        ...         return self.attention(tokens, tokens, tokens)[0]
        >>> [attention] = attention_maps(Net(), torch.ones(1, 3, 16, 16))
        >>> attention.call.name, attention.values.shape, attention.query
        ('attention', (2, 4, 4), 'mean of 16 queries')
    """
    model = module_of(model)
    _check_query(query)
    picture = next((tensor for tensor in tensors_in(inputs).values() if tensor.dim() > 2), None)
    if picture is None:
        raise UsageError("no image among the inputs", do="give a tensor (1, 3, H, W)")
    if picture.dim() > 3 and len(picture) != 1:
        raise UsageError(f"expected one image, got {len(picture)}", do="call it once for each image")
    shown = InputSize.of(picture)
    with differentiable(model), torch.no_grad():
        reduce = partial(map_of, query=usual_query(model) if query is None else query, shown=shown, weights=weights)
        _, pairs = follow_attention(model, passed_on(inputs), "0:" if layers is None else layers, reduce)
    maps = [value for _, value in pairs if isinstance(value, AttentionMap)]
    errors = [value for _, value in pairs if isinstance(value, NoMapError)]
    if errors and (layers is not None or not maps):
        raise errors[-1]
    return Rows(maps)


def _check_query(query: Query) -> None:
    good = query is None or query in ("class", "mean") or (type(query) is int and query >= 0)
    if isinstance(query, tuple) and len(query) == 2:
        good = all(isinstance(share, int | float) and 0 <= share <= 1 for share in query)
    if not good:
        asked = f"query {query!r} cannot be read"
        raise UsageError(asked, do="give class, mean, (y, x) as shares 0..1 of the sides, or the number of a token")


@dataclass(frozen=True)
class TokenGrid:
    """Where the queries and keys of a call of attention lie in the picture.

    Attributes:
        sizes: ``(h, w)`` or ``(T, h, w)``, the rows and columns of the keys.
        keys: ``(N, S)``, the cell of each key in the flat grid; -1 for a key without one.
        queries: Coordinates of the queries, each ``(N, L)``; of one without a position not within 0..1.
        apart: ``(N, L)``: whether a query has no position, as a class token; padding has an outside one.
    """

    sizes: tuple[int, ...]
    keys: Tensor
    queries: Coordinates
    apart: Tensor

    @property
    def class_token(self) -> int | None:
        """The first query without a position, where others have one; or an only query."""
        alone = self.apart[0].nonzero()
        is_class = len(self.apart) == 1 and len(alone) and (not self.apart.all() or self.apart.numel() == 1)
        return int(alone[0]) if is_class else None


def grid_of(attention: Attention, shown: InputSize) -> TokenGrid:
    """The grid of a call of attention, else the tokens in a row; a NoMapError for keys that form no grid."""
    keys, queries = attention.keys, attention.queries
    count, _, length, width = attention.weights.shape
    if not any(bool((axis >= 0).any()) for axis in keys):
        grid = token_grid(width, shown) if count == 1 else None
        if grid is None or keys:
            asked = f"the keys of {attention.call.key or MODEL} have no positions in the image"
            raise NoMapError(asked, do="choose another call of attention")
        extra, *sizes = grid
        keys = _folded(extra, sizes[1:] if sizes[0] == 1 else sizes)
        queries = keys if length == width else ()
    edges = [_edges(axis) for axis in keys]
    sizes = [len(axis) + 1 for axis in edges]
    if np.prod(sizes) > _SPARSE * keys[0].numel():
        asked = f"the keys of {attention.call.key or MODEL} form no grid"
        raise NoMapError(asked, f"{keys[0].numel():,} keys lie in {'x'.join(map(str, sizes))} rows and columns")
    cells = torch.zeros_like(keys[0], dtype=torch.long)
    for axis, edge, size in zip(keys, edges, sizes, strict=True):
        cells = cells * size + torch.bucketize(axis.contiguous(), edge)
    cells = torch.where(keys[0] >= 0, cells, -1)
    queries = queries or (keys[0].new_full((count, length), torch.nan),) * len(keys)
    return TokenGrid(tuple(sizes), cells, queries, queries[0].isnan())


def _folded(extra: int, sizes: list[int]) -> Coordinates:
    """Coordinates ``(1, S)`` of tokens in a row: ``extra`` without a position, then a grid."""
    axes = [(torch.arange(size) + 0.5) / size for size in sizes]
    nowhere = torch.full((extra,), torch.nan)
    return tuple(torch.cat([nowhere, axis.flatten()])[None] for axis in torch.meshgrid(*axes, indexing="ij"))


def _edges(values: Tensor) -> Tensor:
    """The limits between the rows, or columns, at which ``values`` lie."""
    levels = values[values >= 0].unique()
    apart = levels.diff() > _STEP
    edges: Tensor = (levels[:-1][apart] + levels[1:][apart]) / 2
    return edges


def usual_query(model: nn.Module) -> Query:
    """None for the class token, if there is one; of a model that says that its other tokens are none, the mean."""
    return "mean" if getattr(model, "has_class_token", True) is False else None


def map_of(
    attention: Attention,
    query: Query,
    shown: InputSize,
    weights: bool = False,
    looks: Callable[[Tensor], Tensor] | None = None,
) -> AttentionMap | NoMapError:
    """The map of one call, or why it has none.

    ``looks`` gives what queries with shares ``(N, L)`` look at, ``(N, heads, S)``; by default their weighted mean.
    """
    try:
        grid = grid_of(attention, shown)
        share, name, at = _shares(attention, grid, query)
    except NoMapError as error:
        return error
    if looks is None:
        rows = torch.einsum("nl,nhls->nhs", share.to(attention.weights.device), attention.weights.float())
    else:
        rows = looks(share)
    looked = rows.movedim(1, 0).flatten(1).cpu()
    cells = grid.keys.flatten()
    inside, flat = cells >= 0, looked.new_zeros(len(looked), int(np.prod(grid.sizes)))
    flat.index_add_(1, cells[inside], looked[:, inside])
    return AttentionMap(
        attention.call,
        flat.reshape(-1, *grid.sizes).numpy(),
        looked[:, ~inside].sum(1).numpy(),
        name,
        at,
        len(attention.weights),
        (shown.height, shown.width),
        attention.weights.detach().clone() if weights else None,
    )


def _shares(attention: Attention, grid: TokenGrid, query: Query) -> tuple[Tensor, str, tuple[float, float] | None]:
    """The share ``(N, L)`` of each query in what is shown, its name, and its ``(y, x)``."""
    key, valid = attention.call.key or MODEL, grid.queries[0] >= 0
    share = torch.zeros(valid.shape)
    if query is None:
        query = "mean" if grid.class_token is None else "class"
    if query == "mean":
        chosen = valid if valid.any() else ~valid
        return chosen / chosen.sum(), f"mean of {int(chosen.sum()):,} queries", None
    if query == "class":
        if grid.class_token is None:
            raise NoMapError(f"{key} has no class token", do="choose the mean of all queries, or a position")
        share[0, grid.class_token] = 1
        return share, "class token", None
    if isinstance(query, int):
        if len(share) > 1 or query >= share.shape[1]:
            exists = f"it has {share.shape[1]:,} in each of {len(share):,} windows" if len(share) > 1 else ""
            exists = exists or f"it has {share.shape[1]:,}: 0 to {share.shape[1] - 1}"
            raise NoMapError(f"{key} has no single query {query}", exists, "choose a position")
        share[0, query] = 1
        *_, y, x = (float(axis[0, query]) for axis in grid.queries)
        return share, f"token {query}", (y, x) if valid[0, query] else None
    assert isinstance(query, tuple)
    if not valid.any():
        raise NoMapError(f"the queries of {key} have no positions", do="choose the mean, or the number of a query")
    distance = sum((axis - to) ** 2 for axis, to in zip(grid.queries[-2:], query, strict=True))
    nearest = int(torch.where(valid, distance, torch.inf).argmin())
    share.view(-1)[nearest] = 1
    y, x = (float(axis.flatten()[nearest]) for axis in grid.queries[-2:])
    return share, f"position x {percent(x)}, y {percent(y)}", (y, x)
