"""Merge the statistics of several runs."""

from __future__ import annotations

import os

import click

from hookscope import statistics
from hookscope.cli.commands.stats import StatisticsCommand
from hookscope.cli.fields import argument
from hookscope.cli.output.formats import note
from hookscope.errors import UsageError


class Merge(StatisticsCommand):
    """Merge the files that `hookscope stats --save` wrote for one model, and report on all their images.

    \b
    Examples:
      hookscope merge a.json b.json
      hookscope merge part-*.json --save all.json --plot all.png

    The result equals one run over all images. Images are known by the content of their files: the command refuses
    files that hold the same image, and files of other models, weights or preprocessing.
    """

    files: tuple[str, ...] = argument("FILE...", required=True, type=click.Path())

    def check(self) -> None:
        names: set[str] = set()
        for path in self.files:
            if os.path.realpath(path) in names:
                raise UsageError(f"'{path}' is named twice", "its images would count twice", "name each file once")
            names.add(os.path.realpath(path))
        super().check()

    def run(self) -> None:
        merged = statistics.merge_statistics(self.files, lambda name, text: note(f"Note: {name}: {text}"))
        if self.save is not None:
            merged.save(self.save)
        self.report(merged)
