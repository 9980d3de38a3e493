"""Reports on the images of a long run that cannot be used, and on notes about others."""

from __future__ import annotations

from collections import Counter

from hookscope.cli.output import formats as output
from hookscope.errors import HookscopeError
from hookscope.findings import counted

_NOTES_SHOWN = 3
_KINDS_SHOWN = 3


class LostImages:
    """Prints an error for each lost image, and the first notes on others."""

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self.count = 0
        self._noted = 0
        self._rest: Counter[str] = Counter()

    def lost(self, position: int, name: str, error: HookscopeError) -> None:
        """Report a lost image; with ``strict`` its error ends the run."""
        if self._strict:
            raise error
        self.count += 1
        output.note(f"Error: {error}", always=True)

    def note(self, name: str, text: str) -> None:
        """Print the first three notes; a folder may hold thousands of images with the same note."""
        self._noted += 1
        if self._noted <= _NOTES_SHOWN:
            output.note(f"Note: {name}: {text}")
        else:
            self._rest[text] += 1

    def finish(self) -> None:
        """Sum up in one line the notes that were not shown."""
        if not self._rest:
            return
        total, shown = self._rest.total(), self._rest.most_common(_KINDS_SHOWN)
        kinds = [f"{text} ({count})" for text, count in shown]
        others = total - sum(count for _, count in shown)
        kinds += [f"others ({others})"] if others else []
        output.note(f"Note: {counted(total, 'more note')}: {', '.join(kinds)}")
