"""``hookscope extract``: what layers return on many images, as columns of a file."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from hookscope import extraction, hooks, models, scores
from hookscope.cli.output import formats as output
from hookscope.cli.output.formats import write_report
from hookscope.cli.output.report import Report, Section
from hookscope.cli.shared import image_options, options as shared
from hookscope.cli.shared.class_options import target_option
from hookscope.cli.shared.engine_options import EngineOptions
from hookscope.cli.shared.help import GroupedCommand
from hookscope.cli.shared.image_run import image_run
from hookscope.cli.shared.model import ModelOptions, caption_of, check_choice
from hookscope.cli.shared.output_paths import refuse_input
from hookscope.cli.shared.written import wrote_arrays
from hookscope.columns import Columns
from hookscope.errors import UsageError

COLUMNS = Columns("layer", "shape", "dtype", "images", "weights")


@click.command("extract", cls=GroupedCommand)
@shared.model_argument()
@image_options.images_argument
@shared.layer_option(f"Calls whose outputs to write, a column each: {shared.SELECTION}")
@shared.counted_type_option
@click.option(
    "--pool",
    type=click.Choice(extraction.POOLS),
    default="none",
    show_default=True,
    help="What to keep of an output: none keeps all of it, mean and max one number for each channel, cls the class"
    " token of a transformer, flatten all values in one row.",
)
@click.option(
    "--dtype",
    type=click.Choice(models.FILE_DTYPES),
    help="Data type of the columns.  [default: that of the output]",
)
@click.option("--logits", is_flag=True, help="Add a column with the scores of all classes.")
@target_option(default=None, help="Add a column with the probability of a class", best=False)
@click.option(
    "-o",
    "--output",
    "path",
    metavar="PATH",
    type=click.Path(),
    required=True,
    help="A .npy file (one column), .npz, .safetensors, .parquet or .zarr, or a folder of .parquet files.",
)
@shared.count_option("--shard", "Write a folder of files with N images each.")
@click.option("--resume", is_flag=True, help="Continue the interrupted run that wrote to -o.")
@click.option("--overwrite", is_flag=True, help="Replace what is at -o.")
@image_options.run_options
@shared.format_option
def command(
    model: ModelOptions,
    paths: Sequence[str],
    files0_from: str | None,
    limit: int | None,
    layers: hooks.Selection | None,
    types: tuple[str, ...],
    pool: str,
    dtype: str | None,
    logits: bool,
    target: scores.Target | None,
    path: str,
    shard: int | None,
    resume: bool,
    overwrite: bool,
    batch_size: int,
    workers: int,
    strict: bool,
    engine: EngineOptions,
    format: str,
) -> None:
    """Write what layers of MODEL return on images to a file: a row for each image, a column for each layer.

    \b
    Examples:
      hookscope extract resnet50 photos/ --layer avgpool -o features.parquet
      hookscope extract resnet50 photos/ --layer layer3,layer4 --pool mean -o features.safetensors
      find photos -name '*.jpg' -print0 | hookscope extract resnet50 --files0-from - --layer avgpool -o out/

    IMAGE is a file, a folder, a glob, or - for standard input. The images go through the model once, for all layers.
    NumPy, pandas, polars and DuckDB read the files. docs/howto/extract.md shows how to search for similar images and to
    train a classifier with them. A file also holds position, path, SHA-256 and label of each image. The label is the
    name of its folder, inside a folder that was named. The metadata hold the versions, model, weights, preprocessing
    and layers.

    Rows are in the order of the images. An image that cannot be used has no row: an error says why, a file .lost.tsv
    beside the output lists it with its position, and the exit status is 1.

    Finished images are saved within seconds. After an interruption of any kind, --resume continues with the first
    image that is missing. It refuses another model, weights, preprocessing, or list of images.

    A row is printed for each column. Its shape is that of one image.
    """
    if layers is None and not types and target is None and not logits:
        raise UsageError("no layer is chosen", "list-layers prints their names", "add --layer, --logits or --target")
    images = image_options.image_list(paths, files0_from, limit)
    extraction.check_output(path, shard, overwrite=overwrite, resume=resume)
    refuse_input(path, images)
    runs_on, net = engine.make(), model.load()
    check_choice(net, types, layers)
    with image_run(len(images), path, strict) as run:
        features = extraction.extract(
            net,
            images,
            layers,
            types or None,
            pool=pool,
            dtype=dtype,
            batch_size=batch_size,
            workers=workers,
            targets=() if target is None else (target,),
            logits=logits,
            folders=[each for each in paths if os.path.isdir(each)],
            engine=runs_on,
            on_progress=run.advance,
            on_lost=run.lost,
            on_note=run.note,
        )
        written = features.save(
            path,
            shard,
            overwrite=overwrite,
            resume=resume,
            on_start=run.started,
            on_interrupt=run.interrupted,
        )
    counts = {"images": written.rows, "weights": net.weights}
    rows = [
        {"layer": name, "shape": shape, "dtype": written.dtypes[name], **counts}
        for name, shape in written.columns.items()
    ]
    if written.was_complete:
        output.note(f"Note: {path} was complete; nothing was left to do")
    else:
        wrote_arrays(path)
    if written.lost:
        output.note(f"Note: {written.lost:,} of {run.total} skipped: {written.lost_file} names them")
    write_report(Report([Section(rows, COLUMNS)], caption=caption_of(net)), format)
    if written.lost and not written.was_complete:
        raise click.exceptions.Exit(1)
