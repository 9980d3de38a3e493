"""Change activations or weights and see the effect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem

from hookscope import hooks, interventions, models, scores
from hookscope.cli import process
from hookscope.cli.fields import kept_rows, option
from hookscope.cli.output.formats import Report, Section, note
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import write_picture
from hookscope.cli.shared.subject import OfImage, with_notes
from hookscope.cli.shared.written import show_option
from hookscope.columns import Column, Columns
from hookscope.errors import UsageError
from hookscope.findings import counted, listed

LAYERS = Columns(
    *hooks.CALL.but(type={"need": 6}),
    Column("shape", need=7),
    Column("changed"),
    Column("relative_l2"),
    Column("cosine"),
    Column("nonfinite", hide="zero"),
    Column("weights", where="rows"),
)
CLASSES = Columns(
    Column("class", lambda change: change.index),
    Column("label"),
    Column("target", need=3),
    Column("score", need=5),
    Column("score_after"),
    Column("change", need=1),
    Column("probability", need=4, hide="random"),
    Column("probability_after", hide="random"),
    Column("rank", need=2),
    Column("rank_after"),
    Column("weights", where="rows"),
)


def _name(change: interventions.ClassChange) -> str:
    return f"{change.index} {change.label or ''}".strip()


def _answer_lines(classes: Sequence[interventions.ClassChange]) -> list[str]:
    """Whether the best class changed; nothing for models without classes."""
    best = [_name(change) for change in classes if change.rank == 1]
    after = [_name(change) for change in classes if change.rank_after == 1]
    words = "the answer stays" if best == after else f"the answer changes from {listed(best, 1)} to"
    return [f"{words} {listed(after, 1)}"] if best and after else []


def _target_line(change: interventions.ClassChange) -> str:
    line = f"score of {_name(change)}: {change.score:.4g} to {change.score_after:.4g} ({change.change:+.3g})"
    line += f", probability {change.probability:.3g} to {change.probability_after:.3g}"
    return line + ("" if math.isfinite(change.score_after) else ": it is not finite")


def _complete_at(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of layers, and words for interventions: click does not say which of the two is being typed."""
    words = shared.complete_words(*sorted(interventions.WORDS))(ctx, param, incomplete)
    return shared.complete_layers(ctx, param, incomplete) + words


def at_option() -> Any:
    return option(
        "Apply the intervention WORD at SEL: a layer selection or the name of a parameter; repeatable.",
        "--at",
        metavar="SEL WORD",
        nargs=2,
        multiple=True,
        parse=lambda pairs: tuple(Change.parse(*pair) for pair in pairs),
        shell_complete=_complete_at,
    )


@dataclass(frozen=True)
class Change:
    """One ``--at``: a layer selection or the name of a parameter, and an intervention."""

    where: hooks.Selection
    spec: interventions.InterventionSpec

    @classmethod
    def parse(cls, where: str, text: str) -> Change:
        words = interventions.WORDS
        if text.startswith("--"):
            asked = f"--at needs a layer and an intervention, but '{text}' is an option"
            raise UsageError(asked, do="such as --at layer3 zero")
        if where.partition(":")[0] in words and text.partition(":")[0] not in words:
            raise UsageError(f"no intervention '{text}'", do=f"the layer comes first: --at {text} {where}")
        return cls(hooks.Selection(where), interventions.InterventionSpec.parse(text, one_image=True))

    @staticmethod
    def build_all(
        changes: Sequence[Change], net: models.LoadedModel, types: Sequence[str] | None = None
    ) -> list[tuple[hooks.Selection, Any]]:
        """The interventions with the images and tensors that they read from files, and where they act."""
        built = []
        with process.prints_to_standard_error():
            for change in changes:
                source = interventions.read_source(net, str(change.where), change.spec, types, with_notes)
                built.append((change.where, change.spec.build(source, one_pass=True)))
        return built


class Intervene(OfImage):
    """Change what flows through MODEL on IMAGE, and show the effect.

    \b
    Examples:
      hookscope intervene resnet34 cat.jpg --at layer3 zero:channels=0-31
      hookscope intervene resnet34 cat.jpg --at layer3 dropblock:p=0.1,block_size=7 --seed 1
      hookscope intervene vgg16 cat.jpg --at features.28 scale:factor=2 --at features.0 noise:std=0.1
      hookscope intervene resnet34 cat.jpg --at layer4.2.conv2 patch:from=rocket.jpg --grid patched.png
      hookscope intervene resnet34 cat.jpg --at 'layer4*.weight' quantize:bits=4,per_channel=true --classes

    IMAGE is one file, or - for standard input; optical flow takes two. The command runs the model without and with the
    interventions of --at; nothing is changed on disk. It prints the five best classes of both passes with their scores,
    and how much the activation of each later layer changed. relative_l2 is the norm of the difference divided by the
    norm before. cosine is the cosine of the angle between both activations.

    --at takes SEL, a layer selection or the name of a parameter, and WORD or WORD:PARAMETER=VALUE,...

    \b
    Words, with their parameters and defaults:
      {table}

    freeze and prune act on parameters: SEL names a parameter, or a layer for all its parameters. All others act on
    activations, or on the parameter that SEL names. They also take channels=0-31,40 (filters of a parameter),
    positions=0-9x5-14 (rows, columns) and on=output or input. dropout and dropblock act here also in eval mode.
    Interventions are applied in the given order. --seed sets random weights and the random numbers of interventions.

    A table shows classes and layers; tsv and csv have the layers. With --classes they show only classes. json has
    both. In ndjson, the field "row" names the kind of a line. index and order are as in list-layers.
    """

    table = kept_rows("interventions", "interventions", lambda: interventions.help_rows())

    changes: tuple[Change, ...] = at_option()
    grid: str | None = shared.picture_file(
        "Draw the maps before and after, and their difference: a PNG file.", also=[show_option()]
    )
    classes: bool = option("In a table, tsv and csv, print classes and no layers.")
    target: scores.Target = shared.target_option("Whose score is shown")
    categories: tuple[str, ...] | None = shared.categories_option()
    layers: hooks.Selection | None = shared.calls_option(
        "Calls to compare, and to draw with --grid",
        "changed layers, and later layers with a weight of two or more dimensions",
    )
    types: tuple[str, ...] = shared.type_option(shared.COUNTED_TYPES)

    def check(self) -> None:
        if not self.changes:
            do = "such as --at layer3 zero:channels=0-31; `hookscope help intervene` lists them"
            raise UsageError("intervene needs --at", do=do)
        super().check()

    def run(self) -> None:
        net, types, seed, draws = self.net, self.types or None, self.model.seed, self.grid is not None
        built = Change.build_all(self.changes, net, types)
        with self.running():
            effect = interventions.intervention_effect(
                net,
                self.arguments,
                built,
                self.layers,
                types,
                seed=seed,
                keep=self.layers if draws else None,
                keep_changed=draws and not self.layers,
            )
        classes = _classes(effect, self)
        if not effect.changed:
            note("Note: nothing was changed")
        if idle := [layer.call.key for layer in effect.layers if layer.changed and layer.relative_l2 == 0]:
            note(f"Note: unchanged output: {listed(idle, 6)}")
        for word in sorted({change.spec.word for change in self.changes if not change.spec.kind.changes_forward}):
            note(f"Note: {word} has no effect on a forward pass: it acts in training")
        if effect.missing:
            calls = counted(len(effect.missing), "call")
            note(f"Note: {calls} ran in only one pass: {listed(effect.missing, 3)}")
        if self.grid is not None and not effect.changed:
            note(f"Note: {self.grid} was not written")
        elif self.grid is not None:
            words = [f"{change.where} {change.spec.text}" for change in self.changes]
            page = interventions.draw_effect(effect, self.read_images[0], net, interventions=words, seed=seed)
            write_picture(self.grid, page)
        about = {
            "model": net.name,
            "weights": net.weights,
            "seed": seed,
            "image": [image.name for image in self.read_images],
            "interventions": [{"at": str(change.where), "word": change.spec.text} for change in self.changes],
            "changed": effect.changed,
        }
        total = f"changed: {listed(list(effect.changed), 6)}" if effect.changed else "nothing was changed"
        sections = [
            Section(
                CLASSES.rows(classes, weights=net.weights),
                CLASSES,
                "class",
                totals=[_target_line(change) for change in classes if change.target],
                in_flat=self.classes,
                needs_rows=True,
            ),
            Section(
                LAYERS.rows(effect.layers, weights=net.weights),
                LAYERS,
                "layer",
                in_table=not self.classes,
                needs_rows=True,
            ),
        ]
        lead = _answer_lines(classes)
        self.print(Report(sections, about=about, totals=[total], caption=self.caption, lead=lead))


def _classes(effect: interventions.Effect, options: Intervene) -> list[interventions.ClassChange]:
    """The classes of both passes; a model without scores is an error only if an option is about classes."""
    net, needs_classes = options.net, shared.was_given("target") or options.classes
    if not needs_classes and (why := scores.without_scores(effect.before, net.family, net.name)):
        note(f"Note: {why}: only layers are shown")
        return []
    categories = shared.categories_of(net, options.categories)
    return interventions.class_changes(effect.before, effect.after, options.target, categories, net.name)
