"""Draw what each head of attention looks at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from hookscope import attention, explain, hooks, images
from hookscope.cli.fields import option
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import file_word, model_word
from hookscope.cli.shared.picture_run import PEAK, PictureCommand, check_arrays, peak
from hookscope.cli.shared.subject import running
from hookscope.columns import Column, Columns, Row
from hookscope.errors import UsageError

COLUMNS = Columns(
    Column("image"),
    *hooks.CALL.but("order", type={"need": 2}),
    Column("head"),
    Column("shape", need=5),
    Column("query"),
    *PEAK,
    *("effective_positions", "non_patch_weight", "windows", "weights", "file"),
)
Query = str | int | tuple[float, float] | None


def _parse_query(text: str) -> Query:
    with suppress(ValueError):
        return text if text in ("class", "mean") else int(text)
    with suppress(ValueError):
        x, y = (float(part) for part in text.split(","))
        if math.isfinite(x + y):
            return x, y
    raise UsageError(f"--query {text} cannot be read", do="give class, mean, X,Y in pixels, or the number of a token")


class Attention(PictureCommand):
    """Draw what each head of attention in MODEL looks at in each IMAGE.

    \b
    Examples:
      hookscope attention vit_b_16 cat.jpg --layer 'encoder.layers.*'
      hookscope attention vit_b_16 cat.jpg --layer -1 --query 120,80
      hookscope attention swin_t photos/ -o out/ --raw weights.npz

    The command writes one page for each image, with a row of maps for each layer and a map for each head. A map has the
    attention weight of each position for the query. --layer counts the calls of attention.

    A row for each head has the highest weight and its position in pixels of the image. effective_positions is exp of
    the entropy: how many positions the head looks at. non_patch_weight is the weight on the class token and padding. A
    table has one head of each layer: the one with the fewest positions.
    """

    printed = COLUMNS
    totals = ("of each layer: the head that looks at the fewest positions; --format tsv has all heads",)

    layers: hooks.Selection | None = shared.calls_option("Calls of attention to draw", "all")
    query: Query = option(
        "class (the class token), mean (of all positions), X,Y (pixels of the image), or K (token number K)."
        "  [default: class, or mean if there is no class token]",
        metavar="QUERY",
        parse=_parse_query,
    )
    head_mean: bool = option("Also draw the mean of the heads, at the left.")
    one_scale: bool = option("Give all maps of a page one scale, so that heads and layers can be compared.")
    output: str | None = shared.output_option("page")
    cmap: str | None = shared.colour_map_option("Any matplotlib colour map.  [default: inferno]")
    columns: int | None = shared.columns_option("Maps in a row.  [default: the heads of a layer]")
    cell: int | None = shared.cell_option("Smallest side of a drawn map.  [default: 112]")
    raw: str | None = shared.out_file(
        "Keep the exact weights too: .npy, .npz or .safetensors with keys IMAGE/LAYER.", writes=check_arrays
    )

    def shown(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Of the heads of each call the one that looks at the fewest positions."""
        for _, heads in groupby(rows, key=lambda row: (row["image"], row["name"], row["call"])):
            yield min(heads, key=lambda row: row["effective_positions"])

    def draw(self, read: Sequence[images.InputImage]) -> Iterator[Row]:
        net, image = self.net, read[0]
        inputs, layers = net.inputs(*map(net.prepare, read)), self.layers
        source = explain.OverlaySource.of(image, net)
        with running(net, inputs):
            maps = attention.attention_maps(net, inputs, layers, _in_shares(self.query, source))
        word = self.files.words[image.name]
        self.arrays.expect(len(maps))
        chosen = [str(layers)] * (layers is not None) + [str(self.query)] * (self.query is not None)
        name = "-".join([word, model_word(net.name), "attention", *map(file_word, chosen)])
        path = self.path(f"{name}.png", image.name, self.is_single)
        look = self.given("columns", "cell", "cmap", "head_mean", "one_scale")
        self.write(attention.draw_attention(maps, image, net, **look), path)
        for grid in maps:
            self.arrays.keep(f"{word}/{grid.call.key}", grid.values)
            about: dict[str, Any] = {"image": image.name, "weights": net.weights, "file": path}
            about["shape"] = grid.values.shape[1:]
            shares = zip(grid.stills, grid.effective_positions, grid.non_patch_weight, strict=True)
            for head, (still, positions, elsewhere) in enumerate(shares):
                about |= {"effective_positions": float(positions), "non_patch_weight": float(elsewhere)}
                yield COLUMNS.row(grid, head=head, **about, **peak(still, source))


def _in_shares(query: Query, source: explain.OverlaySource) -> Query:
    """A position in pixels of the image as ``(y, x)``, shares of what the network saw."""
    if not isinstance(query, tuple):
        return query
    x, y = source.in_input(*query)
    if not (0 <= y <= 1 and 0 <= x <= 1):
        left, top, right, bottom = source.box
        asked = f"the model does not see the position {query[0]:g},{query[1]:g}"
        raise UsageError(
            asked, f"it sees {left:g},{top:g} to {right:g},{bottom:g}", "choose one there, or --resize pad"
        )
    return y, x
