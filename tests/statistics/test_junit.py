"""JUnit XML, read back with a parser."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from hookscope.statistics.junit import junit_xml
from hookscope.statistics.limits import BrokenLimit

EVIL = 'a<b>&"c"\x00\x1b]0;x\x07\n\ud800\uffff\u202e\u00e9'


def test_a_case_for_each_limit_and_layer() -> None:
    offence = BrokenLimit("max-dead", "relu", None, 0.25, 0.05, "1 of 4 channels is dead: 2", (2,))
    root = ElementTree.fromstring(junit_xml("check", ["max-dead", "no-nan"], ["conv", "relu"], [offence]))
    suite = root[0]
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    assert suite.attrib == {"name": "check", "tests": "4", "failures": "1", "errors": "0", "skipped": "0"}
    cases = [(case.get("classname"), case.get("name"), len(case)) for case in suite]
    assert cases == [("max-dead", "conv", 0), ("max-dead", "relu", 1), ("no-nan", "conv", 0), ("no-nan", "relu", 0)]
    failure = suite[1][0]
    assert (failure.tag, failure.get("type"), failure.get("message")) == ("failure", "max-dead", offence.evidence)
    assert failure.text == "1 of 4 channels is dead: 2 (measured 0.25, allowed 0.05)"


def test_no_layer_is_an_empty_suite() -> None:
    suite = ElementTree.fromstring(junit_xml("check", ["no-nan"], [], []))[0]
    assert (suite.get("tests"), len(suite)) == ("0", 0)


@pytest.mark.parametrize("name", [EVIL, *map(chr, range(32)), "\x7f", "\x85", "\ufffe", "\udcff"])
def test_any_name_makes_valid_xml(name: str) -> None:
    offence = BrokenLimit("no-nan", name, 0, float("inf"), 0, name)
    text = junit_xml(name, ["no-nan"], [name], [offence])
    assert text.decode("utf-8").startswith("<?xml version='1.0' encoding='utf-8'?>\n")
    assert text.endswith(b">\n")
    suite = ElementTree.fromstring(text)[0]
    assert suite.attrib["name"].isprintable()
    assert suite[0][0].get("message") == suite[0].get("name")


def test_lost_images_are_an_error_of_their_own() -> None:
    suite = ElementTree.fromstring(junit_xml("check", ["no-nan"], ["conv1"], [], lost=2))[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "1")
    assert [case.get("name") for case in suite if case.find("error") is not None] == ["all could be used"]
