"""Help in groups: the options of a command are shown whole, those that many commands share by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import click

_OF_A_SIDE = (  # of compare, whose options are for A, for B or for both
    *("weights", "seed", "device", "preprocess", "resize", "mean", "std", "range", "input_size", "dtype", "compile"),
)
SHARED = {
    "images": (
        "Images",
        "Which images are read, and how many at a time.",
        ("files0_from", "limit", "batch_size", "workers", "strict"),
    ),
    "model": (
        "Model and preprocessing",
        "How MODEL is loaded, and how an image becomes its input.",
        (
            *("weights", "seed", "device", "preprocess", "resize", "mean", "std", "range", "input_size", "categories"),
            *(f"{name}_{side}" for name in _OF_A_SIDE for side in "ab"),
            "compile",
        ),
    ),
    "run": (
        "Run",
        "Where the work runs, and how the result is printed and shown.",
        (
            *("engine", "address", "gpus_per_worker", "format", "utf8", "open", "show"),
            *("quiet", "traceback", "help"),
        ),
    ),
}
"""Topic of `hookscope help` -> title, what it is about, names of the options that are in it."""

_LAYERS = ("layers", "layer", "types", "ops", "channels")
_FILES = (
    "output",
    "raw",
    "plot",
    "html",
    "save",
    "resume",
    "sheet",
    "grid",
    "tensorboard",
    "junit",
    "kernels",
    "synthesized",
)


class GroupedCommand(click.Command):
    """A command whose help shows its own options in groups, and names the shared ones."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and a line for each shared group."""
        for title, options in own_groups(self).items():
            if records := [record for option in options if (record := option.get_help_record(ctx))]:
                with formatter.section(title):
                    formatter.write_dl(records)
        shared = shared_options(self, self.get_params(ctx))
        with formatter.section("Shared options, explained by `hookscope help TOPIC`"):
            formatter.write_dl([(topic, " ".join(map(_word, options))) for topic, options in shared.items()])


def own_groups(command: click.Command) -> Mapping[str, list[click.Option]]:
    """The options of the command itself by the title of their group."""
    groups: dict[str, list[click.Option]] = {"Options": [], "Layers": [], "Output": []}
    for option in own_options(command):
        title = "Layers" if option.name in _LAYERS else "Output" if option.name in _FILES else "Options"
        groups[title].append(option)
    return {title: options for title, options in groups.items() if options}


def own_options(command: click.Command) -> list[click.Option]:
    """The options that belong to no shared group."""
    names = {name for topic in _topics(command) for name in SHARED[topic][2]}
    return [option for option in _options(command.params) if option.name not in names]


def shared_options(command: click.Command, params: Iterable[click.Parameter]) -> dict[str, list[click.Option]]:
    """The shared options that the command has, by topic."""
    found = {
        topic: [option for option in _options(params) if option.name in SHARED[topic][2]] for topic in _topics(command)
    }
    return {topic: options for topic, options in found.items() if options}


def _topics(command: click.Command) -> Iterator[str]:
    """The topics; images only for commands that read lists of them, elsewhere ``--batch-size`` means something else."""
    names = {parameter.name for parameter in command.params}
    yield from (topic for topic in SHARED if topic != "images" or "files0_from" in names)


def _options(params: Iterable[click.Parameter]) -> list[click.Option]:
    return [parameter for parameter in params if isinstance(parameter, click.Option)]


def _word(option: click.Option) -> str:
    return max(option.opts, key=len)
