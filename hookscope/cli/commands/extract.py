"""Write the features of many images to a file."""

from __future__ import annotations

import click

from hookscope import extraction, hooks, jobs, models, scores
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section, note
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.long_run import ImageRun, OfManyImages
from hookscope.cli.shared.output_paths import refuse_input
from hookscope.cli.shared.subject import caption_of, check_choice
from hookscope.cli.shared.written import wrote_arrays
from hookscope.columns import Columns
from hookscope.errors import UsageError

COLUMNS = Columns("layer", "shape", "dtype", "images", "weights")


class Extract(OfManyImages):
    """Write what layers of MODEL return on images to a file: a row for each image, a column for each layer.

    \b
    Examples:
      hookscope extract resnet50 photos/ --layer avgpool -o features.parquet
      hookscope extract resnet50 photos/ --layer layer3,layer4 --pool mean -o features.safetensors
      find photos -name '*.jpg' -print0 | hookscope extract resnet50 --files0-from - --layer avgpool -o out/

    IMAGE is a file, a folder, a glob, or - for standard input. The images go through the model once, for all layers.
    NumPy, pandas, polars and DuckDB read the files. docs/howto/extract.md shows how to search for similar images and to
    train a classifier with them. A file also holds position, path, SHA-256 and label of each image. The label is the
    name of the image's folder, if the command names a folder above it. The metadata hold the versions, model, weights,
    preprocessing and layers.

    Rows are in the order of the images. An image that cannot be used has no row: an error says why, a file .lost.tsv
    beside the output lists it with its position, and the exit status is 1.

    Finished images are saved within seconds. After an interruption of any kind, --resume continues with the first
    image that is missing. It refuses another model, weights, preprocessing, or list of images.

    A row is printed for each column. Its shape is for one image.
    """

    layers: hooks.Selection | None = shared.calls_option("Calls whose outputs to write, one column for each")
    types: tuple[str, ...] = shared.type_option(shared.COUNTED_TYPES)
    pool: str = option(
        "What to keep of an output: none keeps all of it, mean and max one number for each channel, cls the class"
        " token of a transformer, flatten all values in one row.",
        metavar="POOL",
        type=click.Choice(extraction.POOLS),
        default="none",
    )
    dtype: str | None = option(
        "Data type of the columns: float16, float32 or float64.  [default: the output's]",
        metavar="TYPE",
        type=click.Choice(models.file_dtypes()),
    )
    logits: bool = option("Add a column with the scores of all classes.")
    target: scores.Target | None = shared.target_option(
        "Add a column with the probability of a class", best=False, default=None
    )
    output: str = shared.in_file(
        "A .npy file (one column), .npz, .safetensors, .parquet or .zarr, or a folder of .parquet files.",
        "-o",
        metavar="PATH",
        type=click.Path(),
        section="Output",
        required=True,
    )
    shard: int | None = option("Write a folder of files with N images each.")
    resume: bool = option("Continue the interrupted run that wrote to -o.", section="Output")
    overwrite: bool = option("Replace what is at -o.")

    def check(self) -> None:
        if self.layers is None and not self.types and self.target is None and not self.logits:
            do = "add --layer, --logits or --target"
            raise UsageError("no layer is chosen", "list-layers prints their names", do)
        extraction.check_output(self.output, self.shard, overwrite=self.overwrite, resume=self.resume)
        refuse_input(self.output, self.images)

    def run(self) -> int:
        path, engine, net = self.output, self.engine.make(), self.model.load()
        check_choice(net, self.types)
        with ImageRun(len(self.images), path, self.strict) as run:
            features = extraction.extract(
                net,
                self.images,
                self.layers,
                self.types or None,
                targets=() if self.target is None else (self.target,),
                **self.given("pool", "dtype", "logits", "folders"),
                run=jobs.RunSettings(self.batch_size, self.workers, engine, run.listener),
            )
            written = features.save(path, self.shard, overwrite=self.overwrite, resume=self.resume)
        counts = {"images": written.rows, "weights": net.weights}
        rows = [
            {"layer": name, "shape": shape, "dtype": written.dtypes[name], **counts}
            for name, shape in written.columns.items()
        ]
        if written.was_complete:
            note(f"Note: {path} was complete; nothing was left to do")
        else:
            for file in (path, *written.beside):
                wrote_arrays(file)
        if written.skipped:
            note(f"Note: {written.skipped:,} of {run.total} skipped: {written.skipped_file} names them")
        self.print(Report([Section(rows, COLUMNS)], caption=caption_of(net)))
        return 1 if written.skipped and not written.was_complete else 0
