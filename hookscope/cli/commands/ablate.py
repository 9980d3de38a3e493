"""Rank the channels of a layer by the score they carry."""

from __future__ import annotations

from contextlib import ExitStack

from hookscope import drawing, hooks, interventions, scores
from hookscope.cli.commands.intervene import Change, at_option
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section, note
from hookscope.cli.progress import pass_progress
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import write_plot
from hookscope.cli.shared.subject import OfImage
from hookscope.cli.shared.written import open_option, show_option
from hookscope.columns import Column, Columns
from hookscope.errors import UsageError
from hookscope.findings import counted, listed

COLUMNS = Columns(
    Column("place", need=5),
    *hooks.CALL.but(index={"need": 1}, type={"need": 1}),
    Column("channel"),
    Column("score_drop"),
    Column("score", where="rows"),
    Column("score_after", need=2),
    Column("probability_after", need=4),
    Column("top_after", need=3),
    Column("top_label", hide="zero"),
    Column("weights", where="rows"),
)
_MAPS = 11  # of --plot, beside the image


class Ablate(OfImage):
    """Set each channel of a layer of MODEL to 0, one after another, and rank them by the score that is lost.

    \b
    Examples:
      hookscope ablate resnet34 cat.jpg --layer layer4.2.conv2
      hookscope ablate resnet34 cat.jpg --layer layer4.2.conv2 --target tabby --plot channels.png
      hookscope ablate resnet34 cat.jpg --layer -1 --at layer3 zero:channels=0-31

    IMAGE is one file, or - for standard input; optical flow takes two. A row for each channel has score_drop, the score
    before minus the score without the channel, and the class that comes first then. --plot draws the channels as bars,
    and the maps of the first ones. --at changes activations or weights in every pass; `hookscope help intervene`
    lists the changes.
    """

    layers: hooks.Selection | None = shared.calls_option(
        "Calls whose channels to set to 0", "the last index", default="-1"
    )
    types: tuple[str, ...] = shared.type_option(shared.COUNTED_TYPES)
    target: scores.Target = shared.target_option("Whose score is measured")
    categories: tuple[str, ...] | None = shared.categories_option()
    top: int = option("Number of channels to show.", default=20)
    plot: str | None = shared.plot_file(
        "Draw the channels as bars, and the maps of the first ones", also=[open_option(), show_option()]
    )
    changes: tuple[Change, ...] = at_option()
    batch_size: int | None = option("Channels in one pass.  [default: as many as fit in 64 MiB, 8 to 1024]")

    def check(self) -> None:
        if self.target.count > 1:
            raise UsageError(f"ablate needs one class, got --target {self.target}")
        super().check()

    def run(self) -> None:
        types, seed = self.types or None, self.model.seed
        net, categories = self.net, shared.categories_of(self.net, self.categories)
        assert self.layers is not None
        built = Change.build_all(self.changes, net, types)
        with ExitStack() as stack:
            stack.enter_context(self.running())
            resolved = list(interventions.from_the_start(net.model, self.arguments, built, types, seed))
            stack.enter_context(interventions.intervene(net.model, resolved, types))
            ablation = interventions.ablate_each(
                net,
                self.arguments,
                self.layers,
                self.target,
                types=types,
                categories=categories,
                batch_size=self.batch_size,
                on_progress=stack.enter_context(pass_progress()),
                seed=seed,
                keep=min(self.top, _MAPS) if self.plot else 0,
            )
        if self.plot is not None:
            figure = interventions.draw_ablation(ablation, self.read_images[0], net, top=self.top)
            write_plot(self.plot, figure, drawing.Origin.of(net, *self.read_images).facts())
        if ablation.skipped:
            skipped = counted(len(ablation.skipped), "call")
            note(f"Note: left out {skipped} without channels: {listed(ablation.skipped, 3)}")
        shown, prediction = ablation.channels[: self.top], ablation.prediction
        worth = [channel for channel in ablation.channels if channel.score_drop != 0]
        if ablation.channels and not worth:
            also = ", with the changes of --at" if self.changes else ""
            note(f"Note: none of these channels changes the score{also}")
        if [channel.channel for channel in worth] == [prediction.index] != [row.channel for row in ablation.channels]:
            only = f"only channel {prediction.index} of {worth[0].call.key}, the class itself, changes the score"
            note(f"Note: {only}; choose an earlier layer, such as --layer -2")
        name, count = f"{prediction.index} {prediction.label or ''}".strip(), counted(len(ablation.channels), "channel")
        totals = [
            f"{len(shown)} of {count}, ranked by how much of the score of {name} is lost without each",
            f"score with all channels: {prediction.score:.4g}",
        ]
        rows = [COLUMNS.row(channel, place=place, weights=net.weights) for place, channel in enumerate(shown, 1)]
        self.print(Report([Section(rows, COLUMNS)], totals=totals, caption=self.caption))
