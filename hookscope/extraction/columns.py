"""The features of a batch as columns of a file: their names, data types and bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookscope.errors import InputError, LayerError
from hookscope.extraction.facts import FeatureBatch
from hookscope.extraction.formats import RESERVED, check_dtype
from hookscope.extraction.job import check_alike
from hookscope.extraction.output import Output


def columns_of(batch: FeatureBatch) -> dict[str, Tensor]:
    """The features by column; a layer that is called as a field of the row gets another name."""
    named: dict[str, Tensor] = {}
    for name, value in batch.features.items():
        column = f"{name} (layer)" if name.lower() in RESERVED else name
        if column in named:
            raise InputError(f"two columns are called '{column}'", do="choose one of the layers")
        named[column] = value
    return named


def storable(output: Output, name: str, value: Tensor) -> Tensor:
    """The values as they are written, of a type that the format has."""
    if not value[0].numel():
        raise InputError(f"{name} has no values", f"its shape is {tuple(value.shape)}", "choose another layer")
    check_dtype(output.format, output.suffix, name, dtype_of(value))
    return value.detach().cpu().contiguous()


def dtype_of(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def bytes_of(value: Tensor) -> Any:
    return value.reshape(-1).view(torch.uint8).numpy().data


def check_same_columns(columns: dict[str, tuple[str, tuple[int, ...]]], values: dict[str, Tensor], name: str) -> None:
    """Refuse an image whose features do not fit those of earlier images, also of a run that is resumed."""
    check_alike({column: shape for column, (_, shape) in columns.items()}, values, name)
    for column, (dtype, _) in columns.items():
        if (other := dtype_of(values[column])) != dtype:
            raise LayerError(f"{name}: {column} is {other}, and {dtype} for earlier images", do="use --dtype")
