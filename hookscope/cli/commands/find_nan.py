"""Find the calls that make NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from hookscope import hooks, tracing
from hookscope.cli.output.formats import Report, Section
from hookscope.cli.output.table import Page, caption_lines, styled, wrapped
from hookscope.cli.shared.subject import OfImage
from hookscope.columns import Column, Columns
from hookscope.findings import counted, listed

COLUMNS = Columns(
    Column("kind"),
    *hooks.CALL.but("index"),
    *("operation", "place", "cause", "source", "deliberate", "nonfinite"),
    Column("inputs", lambda call: _plain(call.inputs), as_json=True),
    Column("output", lambda call: _plain(call.output), as_json=True),
    Column("weights"),
)


class FindNan(OfImage):
    """Find the calls of MODEL that make NaN or Inf on IMAGE.

    \b
    Examples:
      hookscope find-nan resnet18 cat.jpg
      hookscope find-nan my.py:net cat.jpg --format json

    IMAGE is one file, or - for standard input; optical flow takes two. The command prints the calls that make NaN or
    Inf, but not calls that only pass it on. A row has the operation, its line of code, the cause (0 / 0, the logarithm
    of a negative number, an overflow), and the range of its inputs. Every operation and module of one forward pass in
    eval mode is searched. An Inf that the code writes itself, such as a mask, counts if it becomes NaN or reaches the
    output. A note names layers that did not run.

    The exit status is 3 if there is such a call, else 0.
    """

    def run(self) -> int:
        with self.running():
            scan = tracing.find_non_finite(self.net, self.arguments)
        about = asdict(scan) | {"contained": [call.call.key for call in scan.contained]}
        del about["made"]
        section = Section(COLUMNS.rows(scan.made, weights=self.net.weights), COLUMNS, "call")
        words, note = partial(_in_words, scan, self.caption), f"Note: {' '.join(_seen(scan))}"
        self.print(Report([section], about=about, flat_note=note, in_words=words))
        return 3 if scan.made else 0


def _plain(facts: tracing.Facts) -> dict[str, Any]:
    names = ("shape", "dtype", "min", "max", "nonfinite")
    return {part: {name: getattr(tensor, name) for name in names} for part, tensor in facts.items()}


def _in_words(scan: tracing.NonFiniteReport, caption: Mapping[str, Any], page: Page) -> Iterator[str]:
    for call in scan.made:
        where = (call.call.key or hooks.MODEL) + (f" ({call.place})" if call.place else "")
        line = f"{call.kind} {'brought into' if call.source else 'made by'} {where}: {call.cause}"
        yield from (styled(part, "" if call.deliberate else "error", page.colours) for part in _wrapped(line, page))
        for part, tensor in call.inputs.items():
            yield from _wrapped(f"  input {part}: {tensor}", page)
        for part, tensor in call.output.items():
            yield from _wrapped(f"  output {part}".rstrip() + f": {tensor}", page)
    for line in _seen(scan):
        yield from _wrapped(line, page)
    yield from ["", *caption_lines(caption, [], page)]


def _wrapped(line: str, page: Page) -> list[str]:
    return wrapped(line, page.columns, later="    ")


def _seen(scan: tracing.NonFiniteReport) -> Iterator[str]:
    """What became of NaN and Inf, what was looked at, and what was not."""
    if scan.made:
        end = f"The output holds {sum(scan.output.values()):,} NaN or Inf" if scan.output else "The output is finite"
        number = scan.passed_on
        later = (
            f"{counted(number, 'later result')} of operations hold it too" if number else "no operation passes it on"
        )
        end += f"; {later}" if scan.operations else ""
        yield f"Then the model raised {scan.error}." if scan.error else f"{end}."
    if scan.contained:
        keys = listed([call.call.key for call in scan.contained], 3)
        yield f"Inf that the code writes itself, such as a mask, does not spread: {keys}."
    looked = f"{counted(scan.operations, 'operation')} in {counted(scan.layers, 'call')} of modules"
    looked += f", {counted(scan.values, 'value')},"
    if not scan.operations:  # as in an ONNX file
        looked = f"the results of {counted(scan.layers, 'layer')}"
    none = "" if scan.made else "No NaN and no Inf. "
    yield f"{none}Searched {looked} in one forward pass in eval mode."
    if scan.did_not_run:
        yield f"Not searched, because they did not run: {listed(scan.did_not_run, 3)}."
