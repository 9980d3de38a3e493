"""Follow the gradient of a loss through the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from hookscope import gradients, hooks, models, report, scores
from hookscope.cli import process
from hookscope.cli.fields import option
from hookscope.cli.output.formats import Report, Section, note, plain_json
from hookscope.cli.shared import options as shared
from hookscope.cli.shared.output_paths import write_html, write_plot
from hookscope.cli.shared.subject import OfImage
from hookscope.errors import UsageError
from hookscope.findings import Finding, counted


class Gradients(OfImage):
    """Follow the gradient of a loss through MODEL on IMAGE.

    \b
    Examples:
      hookscope gradients resnet34 cat.jpg --plot flow.png
      hookscope gradients resnet50 cat.jpg --target tabby --layer 'layer3*'
      hookscope gradients resnet34 cat.jpg --clip-norm 1.0 --plot clipped.png
      hookscope gradients vgg16 cat.jpg --loss cross-entropy --target 281 --freeze features --parameters
      hookscope gradients nets.py:mine cat.jpg --detect-anomaly --format json | jq '.findings'
      hookscope gradients raft_small first.png second.png --loss mse

    IMAGE is one file, or - for standard input; optical flow takes two. The command runs one forward and one backward
    pass in eval mode: no dropout, and BatchNorm with its running statistics.

    A row for each layer call has the shape and norm of the gradient of its output (grad_output) and of its input
    (grad_input). For grad_output it also has the mean absolute value, the share of zeros, NaN and Inf. A row for each
    parameter has the same for its gradient. The ratio of a layer is the norm of grad_output divided by the norm of the
    activation. The ratio of a parameter is the norm of its gradient divided by its own norm.

    \b
    Findings look at the ratio of weights with two or more dimensions:
      vanishing-gradient  the ratio is below the threshold, or the gradient is 0
      exploding-gradient  the ratio is above the threshold, or NaN or Inf
      no-gradient         no gradient arrives: frozen, unused, detached, no graph

    Findings on neighbouring layers become one, at the layer nearest to the loss, with the worst value. The exit status
    is 0, with or without findings.

    --freeze, --scale, --clamp-sign, --clip-value and --clip-norm change the gradients, in this order. norm is the norm
    before the changes; norm_after is the norm that an optimizer would get. Layers before a frozen layer still get a
    gradient.

    A table shows the layers, and with --parameters or changed gradients the parameters too; tsv and csv have the
    layers, or with --parameters the parameters. json has all fields of both. In ndjson, the field "row" names the kind
    of a line. index and order are as in list-layers.
    """

    layers: hooks.Selection | None = shared.calls_option(
        "Calls to show, and their parameters",
        "layers with a weight of two or more dimensions; with --type: all layers of that type",
    )
    types: tuple[str, ...] = shared.type_option()
    loss: str = option(
        "The loss. score: the score of the class; cross-entropy: with the class as label; mse: the mean square of all"
        " outputs, which needs no classes.",
        metavar="LOSS",
        type=click.Choice(["score", "cross-entropy", "mse"]),
        default="score",
    )
    target: scores.Target = shared.target_option("Which class")
    categories: tuple[str, ...] | None = shared.categories_option()
    parameters: bool = option("Print parameters too; in tsv and csv instead of layers.")
    plot: str | None = shared.plot_file("Draw the gradient flow")
    html: str | None = shared.html_file("findings, layers and parameters")
    clip_value: float | None = option("Clip every value of the parameter gradients to ±X.", metavar="X", type=float)
    scale: float | None = option("Multiply the gradients by X; -1 reverses them.", metavar="X", type=float)
    clamp_sign: str | None = option(
        "Keep only gradients of this sign: positive or negative; set the others to 0.",
        metavar="SIGN",
        type=click.Choice(["positive", "negative"]),
    )
    clip_norm: float | None = option("Clip the total norm of all parameter gradients to X.", metavar="X", type=float)
    freeze: tuple[str, ...] = option(
        "Set the gradients of these parameters to 0: layer1, 'bn*', fc.bias; repeatable, comma separated. These are"
        " names: 2 is the layer named 2, not an index.",
        metavar="SEL",
        shell_complete=shared.complete_layers,
    )
    detect_anomaly: bool = option("Find the operation that made the first NaN; runs a second pass.")
    thresholds: dict[str, Any] = shared.threshold_option("gradients")

    def check(self) -> None:
        if self.loss == "mse" and shared.was_given("target"):
            exists = "it compares the outputs with zeros"
            raise UsageError("--loss mse takes no --target", exists, "leave --target out")
        super().check()

    def run(self) -> None:
        thresholds = gradients.GradientThresholds(**self.thresholds)
        changes = gradients.GradientChanges(self.freeze, self.clip_value, self.clip_norm, self.scale, self.clamp_sign)
        net, categories = self.net, shared.categories_of(self.net, self.categories)
        if self.loss != "mse":
            scores.check_family(net.family, net.name)
            self.target.check(categories)
        loss = scores.Loss(self.loss, self.target, categories)
        with self.running():
            measured, findings, anomaly = gradients.examine_gradients(
                net,
                self.arguments,
                loss,
                layers=self.layers,
                types=self.types or None,
                change=changes.of(net.model, net.name) if changes else None,
                thresholds=thresholds,
                detect_anomaly=self.detect_anomaly,
            )
        if self.detect_anomaly and anomaly is None:
            note("Note: no NaN in the forward pass or in the backward pass")
        lines = _totals(measured, loss.name, changes.describe())
        shown = gradients.select_parameters(measured, net.model, self.layers or "all")
        layers, parameters = gradients.gradient_rows(shown, thresholds, net.weights)
        also = self.parameters or bool(changes)
        rows = [
            Section(layers, gradients.GRADIENTS, "layer", in_flat=not self.parameters),
            Section(parameters, gradients.PARAMETER_GRADIENTS, "parameter", in_table=also),
        ]
        unlisted = [f"not listed: {counted(len(parameters), 'parameter')}; --parameters lists them"] * (not also)
        names = {"class": "index", "label": "label", "score": "score", "probability": "probability"}
        about = {
            "model": net.name,
            "weights": net.weights,
            "loss": {"name": self.loss, "value": measured.value},
            "targets": [{name: getattr(answer, of) for name, of in names.items()} for answer in measured.targets],
            "total_norm": measured.total_norm,
            "total_norm_after": measured.total_after,
        }
        with self.printed_after(Report(rows, findings, about, [*lines, *unlisted], caption=self.caption)):
            said = {
                "findings": findings,
                "title": models.short_name(net.name),
                "weights": net.weights,
                "thresholds": thresholds,
            }
            if self.plot is not None:
                above = [f"preprocessing: {net.preprocess.describe()}", *lines]
                write_plot(self.plot, report.plot(shown, lines=above, **said), _provenance(self, measured, findings))
            if self.html is not None:
                facts = {**_provenance(self, measured, []), "command": process.command_line()}
                write_html(self.html, report.draw_gradients_page(shown, lines=lines, provenance=facts, **said))


def _provenance(options: Gradients, measured: gradients.GradientReport, findings: Sequence[Finding]) -> dict[str, Any]:
    net, images = options.net, options.read_images
    names = ("types", "freeze", "scale", "clamp_sign", "clip_value", "clip_norm")
    return {
        **models.package_versions(),
        "model": net.name,
        "weights": net.weights,
        "images": [os.path.basename(image.name) or image.name for image in images],
        "sha256": [image.sha256 for image in images],
        "preprocess": net.preprocess.describe(),
        "loss": options.loss,
        "target": str(options.target),
        "layers": [str(term) for term in options.layers.terms] if options.layers else [],
        **{name: plain_json(getattr(options, name)) for name in names},
        "value": plain_json(measured.value),
        "findings": plain_json([finding.as_row() for finding in findings]),
    }


def _totals(measured: gradients.GradientReport, loss: str, changes: Sequence[str]) -> list[str]:
    """The lines under the tables: the loss, and the total norm of all gradients before and after ``changes``."""
    of = ", ".join(f"{answer.index} {answer.label or ''}".strip() for answer in measured.targets)
    lines = [f"{loss} of class {of}: {measured.value:.4g}" if of else f"{loss}: {measured.value:.4g}"]
    lines += [
        f"total norm of the gradients of {counted(len(measured.parameters), 'parameter')}: {measured.total_norm:.4g}"
    ]
    if measured.total_after is not None:
        lines[-1] += f"; after {', then '.join(changes)}: {measured.total_after:.4g}"
    bad = sum(1 for p in measured.parameters if p.gradient is not None and p.gradient.nan + p.gradient.inf)
    if bad:
        lines.append(f"NaN or Inf in the gradients of {counted(bad, 'parameter')}: the norms count finite values only")
    spread = sum(1 for p in measured.parameters if p.after is not None and p.after.nan + p.after.inf)
    if spread > bad:
        lines.append(f"clipping by norm spreads NaN or Inf to {counted(spread, 'parameter')}, as in training")
    return lines
