"""What ``stats`` and ``check`` share: their options, and one streaming pass over many images."""

from __future__ import annotations

from typing import Any

from hookscope import hooks, jobs, statistics
from hookscope.cli.output import formats as output
from hookscope.cli.shared.engine_options import torchrun_rank
from hookscope.cli.shared.image_run import image_run
from hookscope.cli.shared.model import check_choice
from hookscope.cli.shared.options import ops_option, type_option
from hookscope.cli.shared.subject import OfManyImages
from hookscope.findings import operations_in_words


class Measuring(OfManyImages):
    """A command that measures layers on many images."""

    layers: hooks.Selection | None = None
    types: tuple[str, ...] = type_option()
    ops: bool | None = ops_option()

    def start(self) -> Any:
        """Other processes of torchrun work for the first."""
        return self.engine.serve(self.model.load) if torchrun_rank() else super().start()

    def measured(
        self,
        rank: bool,
        save: str | None = None,
        resume: bool = False,
        every: bool = False,
        allow: hooks.Selection | None = None,
    ) -> tuple[statistics.SavedStatistics, int]:
        """Run every image through the model; returns the statistics and the number of skipped images."""
        engine, net = self.engine.make(divides=True), self.model.load()
        ops = every if self.ops is None else self.ops
        check_choice(net, self.types, self.layers, allow)
        if allow is not None:
            allow.check_names([name for name, _ in net.model.named_modules()], net.name, ops=ops)
        with image_run(len(self.images), save, self.strict) as run:
            saved = statistics.measure_images(
                net,
                self.images,
                self.layers,
                self.types or None,
                rank=rank,
                ops=ops,
                every=every,
                save=save,
                resume=resume,
                run=jobs.RunSettings(self.batch_size, self.workers, engine, run.listener),
            )
        if self.layers is None and (words := operations_in_words(saved.coverage.operations)):
            output.note(f"Note: not measured: {words}; --ops measures them")
        skipped = saved.progress.skipped if saved.progress is not None else 0
        if skipped:
            output.note(f"Note: {skipped:,} of {run.total} skipped")
        return saved, skipped
