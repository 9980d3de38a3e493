"""Lines of text that fit on a page: how wide they are, where they wrap, what is cut off."""

from __future__ import annotations

from hookscope.drawing import colours

_HINTED = 1.06  # small letters are drawn at whole pixels, which makes lines up to 5 % wider than their outlines


def inches(text: str, points: float, bold: bool = False) -> float:
    """How wide a line is at most, as matplotlib draws it."""
    return float(colours.font(100, bold).getlength(text)) * points / 100 / 72 * _HINTED


def fitting(line: str, width: float, points: float, bold: bool = False) -> str:
    """``line``, cut off where ``width`` inches end.

    Example:
        >>> fitting("conv1", 9, 8.5), fitting("a" * 300, 0.5, 8.5)
        ('conv1', 'aaaa…')
    """
    if inches(line, points, bold) <= width:
        return line
    while len(line) > 1 and inches(f"{line}…", points, bold) > width:
        line = line[: min(len(line) - 1, int(len(line) * width / inches(line, points, bold)))]
    return f"{line}…"


def wrapped_lines(text: str, width: float, points: float, most: int, indent: str = "") -> list[str]:
    """``text`` in ``most`` lines at most, parted between words; what does not fit in these is cut off.

    Args:
        text: Of one paragraph.
        width: In inches.
        points: Size of its letters.
        most: How many lines.
        indent: What the second and later lines begin with.

    Example:
        >>> wrapped_lines("one two three", 0.6, 8.5, 2)
        ['one two', 'three']
    """
    lines, rest = [""], text.split(" ")
    while rest:
        longer = f"{lines[-1]}{rest[0]}" if lines[-1] in ("", indent) else f"{lines[-1]} {rest[0]}"
        if lines[-1] in ("", indent) or inches(longer, points) <= width:
            lines[-1] = longer
            rest = rest[1:]
        elif len(lines) < most:
            lines.append(indent)
        else:
            lines[-1] = " ".join([lines[-1], *rest])
            rest = []
    return [fitting(line, width, points) for line in lines]
