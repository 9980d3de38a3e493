"""The options that say where the passes of a long run take place, and the engine that they choose."""

from __future__ import annotations

import os
from collections.abc import Callable

import click

from hookscope import jobs, models
from hookscope.cli import process
from hookscope.cli.fields import Options, option
from hookscope.cli.output.formats import Output
from hookscope.cli.shared.options import FiniteRange
from hookscope.errors import UsageError


class EngineOptions(Options):
    """``--engine``, ``--address`` and ``--gpus-per-worker``."""

    topic = "run"

    engine: str = option(
        "Where the images are read and the model runs: in this process, or on a Ray cluster, which needs"
        " hookscope[ray].",
        type=click.Choice(("local", "ray")),
        default="local",
    )
    address: str | None = option(
        "With --engine ray: the cluster, auto or HOST:PORT.  [default: start Ray on this machine]", metavar="ADDRESS"
    )
    gpus_per_worker: float | None = option(
        "With --engine ray: GPUs of each worker, also a fraction such as 0.5.  [default: 0]",
        metavar="N",
        type=FiniteRange(0),
    )

    def __post_init__(self) -> None:
        """Refuse options of a cluster without one, and a cluster inside torchrun."""
        if self.engine == "ray" and torchrun_rank() is not None:
            raise UsageError("--engine ray cannot be used under torchrun", do="use one of the two")
        given = {"--address": self.address, "--gpus-per-worker": self.gpus_per_worker}
        for name, value in given.items():
            if self.engine == "local" and value is not None:
                asked = f"{name} needs a cluster"
                raise UsageError(asked, "--engine local is this process", f"add --engine ray, or leave {name} out")

    def make(self, divides: bool = False) -> jobs.Engine:
        """The engine, which connects to its cluster when it runs; ``divides`` if the command calls `serve` too."""
        if self.engine == "ray":
            return jobs.RayEngine(self.address, self.gpus_per_worker or 0.0)
        if torchrun_rank() is not None:
            if not divides:
                asked = "torchrun divides the work of stats and check only"
                raise UsageError(asked, do="start this command without torchrun; --engine ray divides it too")
            return self._torchrun()
        return jobs.LocalEngine()

    def serve(self, load: Callable[[], models.LoadedModel]) -> None:
        """Work for rank 0 in another process of torchrun, on the model that ``load`` returns."""
        Output.now.quiet = True  # rank 0 says it
        engine = self._torchrun()
        with process.prints_to_standard_error():
            engine.serve(load())

    def _torchrun(self) -> jobs.TorchrunEngine:
        return jobs.TorchrunEngine(
            torchrun_rank() or 0, int(os.environ["WORLD_SIZE"]), local_rank=_number("LOCAL_RANK")
        )


def torchrun_rank() -> int | None:
    """The number of this process among those that torchrun started; None if it was started otherwise, or is alone."""
    size = _number("WORLD_SIZE")
    return _number("RANK") if size is not None and size > 1 and "MASTER_ADDR" in os.environ else None


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None
