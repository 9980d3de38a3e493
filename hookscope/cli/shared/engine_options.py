"""The options that say where the passes of a long run take place, and the engine that they choose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import click

from hookscope import jobs
from hookscope.cli.shared.options import FiniteRange, apply_options
from hookscope.errors import UsageError


@dataclass(frozen=True)
class EngineOptions:
    """``--engine``, ``--address`` and ``--gpus-per-worker``."""

    engine: str = "local"
    address: str | None = None
    gpus_per_worker: float | None = None

    def check(self) -> None:
        """Refuse options of a cluster without one."""
        given = {"--address": self.address, "--gpus-per-worker": self.gpus_per_worker}
        for option, value in given.items():
            if self.engine == "local" and value is not None:
                asked = f"{option} needs a cluster"
                raise UsageError(asked, "--engine local is this process", f"add --engine ray, or leave {option} out")

    def make(self) -> jobs.Engine:
        """The engine, which connects to its cluster when it runs."""
        if self.engine == "ray":
            return jobs.RayEngine(self.address, self.gpus_per_worker or 0.0)  # type: ignore[attr-defined]
        return jobs.LocalEngine()


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `EngineOptions`, which the command gets as ``engine``."""
    names = [field.name for field in fields(EngineOptions)]

    @functools.wraps(command)
    def with_engine(**options: Any) -> Any:
        engine = EngineOptions(**{name: options.pop(name) for name in names})
        engine.check()
        return command(engine=engine, **options)

    return apply_options(
        [
            click.option(
                "--engine",
                type=click.Choice(("local", "ray")),
                default="local",
                show_default=True,
                help="Where the images are read and the model runs: in this process, or on a Ray cluster, which needs"
                " hookscope[ray].",
            ),
            click.option(
                "--address",
                metavar="ADDRESS",
                help="With --engine ray: the cluster, such as auto or ray://head:10001.  [default: start Ray on this"
                " machine]",
            ),
            click.option(
                "--gpus-per-worker",
                metavar="N",
                type=FiniteRange(0),
                help="With --engine ray: GPUs of each worker, also a fraction such as 0.5.  [default: 0]",
            ),
        ],
        with_engine,
    )
