"""Rules of operations that move values to other positions: views, slices, padding."""

from __future__ import annotations

from collections.abc import Collection

from hookscope.geometry.operation import Followed, Operation, rule


def shifted(known: Followed, dim: int, length: int, by: int, count: int, every: int = 1) -> Followed:
    """Of ``count`` values along ``dim``: the indices from ``by`` on, ``every`` so many."""
    if (count, by, every) == (length, 0, 1):
        return known
    return known.each(lambda reach: reach.resampled(dim, length, every, by, by, count), known.flat)


@rule("permute", "transpose", "t", "swapaxes", "movedim", "numpy_T", "mT", "adjoint")
def _permute(operation: Operation) -> Followed:
    dims = operation["dims"]
    if dims is None:
        dims = list(range(operation.input.dim()))
        a, b = (operation["dim0"], operation["dim1"]) if operation.name.startswith("transpose") else (0, -1)
        dims[a], dims[b] = dims[b], dims[a]
    dims = [dim % len(dims) for dim in dims]
    known = operation.followed
    return known.each(lambda reach: reach.permuted(dims.index, ""), (dims.index(dim) for dim in known.flat))


def inserted(known: Followed, at: int) -> Followed:
    def later(dim: int) -> int:
        return dim + (dim >= at)

    return known.each(lambda reach: reach.permuted(later, ""), map(later, known.flat))


def removed(known: Followed, gone: Collection[int], why: str) -> Followed:
    def earlier(dim: int) -> int | None:
        return None if dim in gone else dim - sum(each < dim for each in gone)

    flat = (earlier(dim) for dim in known.flat)
    return known.each(lambda reach: reach.permuted(earlier, why), (dim for dim in flat if dim is not None))


@rule("unsqueeze")
def _unsqueeze(operation: Operation) -> Followed:
    return inserted(operation.followed, operation["dim"] % operation.output.dim())


@rule("squeeze")
def _squeeze(operation: Operation) -> Followed:
    shape = operation.input.shape
    chosen = operation["dim"]
    chosen = [chosen] if isinstance(chosen, int) else chosen
    dims = range(len(shape)) if chosen is None else [dim % len(shape) for dim in chosen]
    return removed(operation.followed, [dim for dim in dims if shape[dim] == 1], "")


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy")
def _view(operation: Operation) -> Followed:
    before, after = operation.input.shape, operation.output.shape
    same = operation.followed.flat if tuple(before) == tuple(after) else ()
    return operation.followed.each(lambda reach: reach.reshaped(before, after), same)


@rule("slice")
def _slice(operation: Operation) -> Followed:
    dim = (operation["dim"] or 0) % operation.input.dim()
    length, count = operation.input.shape[dim], operation.output.shape[dim]
    begin, _, every = slice(operation["start"], operation["end"], operation["step"]).indices(length)
    return shifted(operation.followed, dim, length, begin, count, every) if count else operation.followed


@rule("select")
def _select(operation: Operation) -> Followed:
    dim = operation["dim"] % operation.input.dim()
    length = operation.input.shape[dim]
    return removed(shifted(operation.followed, dim, length, operation["index"] % length, 1), {dim}, "")


@rule("split", "split_with_sizes", "unbind", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
def _split(operation: Operation) -> list[Followed]:
    dim = (operation["dim"] or 0) % operation.input.dim()
    length, at, pieces = operation.input.shape[dim], 0, []
    for output in operation.output:
        count = 1 if operation.name == "unbind" else output.shape[dim]
        piece = shifted(operation.followed, dim, length, at, count)
        pieces.append(removed(piece, {dim}, "") if operation.name == "unbind" else piece)
        at += count
    return pieces


@rule("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
@rule("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _pad(operation: Operation) -> Followed:
    """Pads of any values count as pixels outside: a window that covers one and its mirror image sees no more."""
    pad = operation["pad"] or operation["padding"]
    shape, dims = operation.input.shape, operation.input.dim()
    followed = operation.followed
    for at in range(len(pad) // 2):
        dim = dims - 1 - at
        followed = shifted(followed, dim, shape[dim], -pad[2 * at], operation.output.shape[dim])
    return followed


@rule("roll", "flip")
def _moved(operation: Operation) -> Followed:
    dims = operation["dims"] or range(operation.input.dim())
    gone = {dim % operation.input.dim() for dim in dims}
    return operation.followed.each(lambda reach: reach.without(gone, operation.name))
