"""The result of a gate as JUnit XML, which CI services show as tests."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from hookscope.errors import printable
from hookscope.statistics.limits import BrokenLimit


def junit_xml(
    suite: str, limits: Sequence[str], layers: Sequence[str], offences: Sequence[BrokenLimit], lost: int = 0
) -> bytes:
    """A test suite with a case for each limit and layer; an offence is a failure.

    Args:
        suite: Its name, such as ``hookscope check resnet34``.
        limits: Which limits were held against the layers.
        layers: The layers that were measured, by their keys.
        offences: What `broken_limits` found.
        lost: How many images could not be used, which is an error of a case of its own.

    Example:
        >>> junit_xml("check", ["no-nan"], ["conv1"], []).decode().splitlines()[1][:50]
        '<testsuites><testsuite name="check" tests="1" fail'
    """
    broken = {(offence.limit, offence.layer): offence for offence in offences}
    root = ElementTree.Element("testsuites")
    tests, errors = len(limits) * len(layers) + bool(lost), int(bool(lost))
    counts = {"tests": tests, "failures": len(broken), "errors": errors, "skipped": 0}
    attributes = {name: str(count) for name, count in counts.items()}
    cases = ElementTree.SubElement(root, "testsuite", {"name": printable(suite), **attributes})
    if lost:
        case = ElementTree.SubElement(cases, "testcase", {"classname": "images", "name": "all could be used"})
        ElementTree.SubElement(case, "error", {"message": f"{lost} could not be used", "type": "images"})
    for limit in limits:
        for layer in layers:
            case = ElementTree.SubElement(cases, "testcase", {"classname": limit, "name": printable(layer)})
            offence = broken.get((limit, layer))
            if offence is not None:
                message = printable(offence.evidence)
                failure = ElementTree.SubElement(case, "failure", {"message": message, "type": limit})
                failure.text = f"{message} (measured {offence.value:.6g}, allowed {offence.allowed:.6g})"
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text if text.endswith(b"\n") else text + b"\n"
