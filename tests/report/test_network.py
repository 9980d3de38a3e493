"""Tests of the network as a list."""

import re

import numpy as np
import pytest
import torchvision
from PIL import Image

import hookscope
from hookscope.display import engineering
from hookscope.hooks import Call
from hookscope.inspection import CallFacts
from hookscope.report import draw_page
from hookscope.report.charts import outline
from hookscope.report.inspection import network_rows
from tests.helpers import seeded
from tests.report.example import example


@pytest.fixture(scope="module")
def resnet():
    net = seeded(lambda: torchvision.models.resnet18(num_classes=3))
    return net, hookscope.inspect(net, [Image.new("RGB", (64, 64), "teal")])


def test_a_module_has_the_parameters_that_torch_counts_in_it(resnet):
    net, inspection = resnet
    modules = [row for row in network_rows(inspection) if row.is_module]
    assert [row.name for row in modules if not row.parents] == ["layer1", "layer2", "layer3", "layer4"]
    for row in modules:
        assert row.params == sum(parameter.numel() for parameter in net.get_submodule(row.name).parameters())
    whole = re.findall(r"(?:Parameters|accumulates)</dt><dd>(.*?)</dd>", draw_page(inspection))
    macs = sum(row.macs for row in network_rows(inspection) if not row.parents)
    assert whole == [engineering(sum(parameter.numel() for parameter in net.parameters())), engineering(macs)]


def test_rows_are_in_order_of_execution_each_in_its_modules(resnet):
    _, inspection = resnet
    rows = network_rows(inspection)
    assert [row.number for row in rows] == list(range(len(rows)))
    calls = [row for row in rows if not row.is_module]
    assert [row.name for row in calls] == [facts.call.key for facts in inspection.calls]
    for row in rows:
        for parent in row.parents:
            assert row.name.startswith(f"{rows[parent].name}.") and parent < row.number
    by_name = {row.name: row for row in rows}
    assert by_name["layer2.0"].orders == f"{by_name['layer2.0.conv1'].orders}–{by_name['layer2.0.relu#1'].orders}"
    assert by_name["layer2"].cam_of == "layer2.1.conv2"  # of the last layer in it


def test_few_rows_are_open_at_first(resnet):
    _, inspection = resnet
    rows = network_rows(inspection)
    seen = [row for row in rows if all(rows[parent].is_open for parent in row.parents)]
    assert len(seen) <= 40 and any(row.is_open for row in rows)
    assert all(row.is_open for row in network_rows(example()) if row.is_module)  # a small one is all open


def facts(name, order, params=0, macs=0, call=0):
    return CallFacts(Call(name, "Conv2d", call, None, order), (1,), params, macs, 0, 0, 0, 0, 0, (1,))


def with_calls(*calls):
    inspection = example()
    return type(inspection)(**{**vars(inspection), "calls": calls, "layers": (), "places": ()})


def test_a_layer_that_is_called_twice_has_its_parameters_once():
    rows = network_rows(with_calls(facts("head.conv", 0, 10, 100), facts("head.conv", 1, 10, 100, call=1)))
    assert [(row.name, row.params, row.macs) for row in rows] == [
        *[("head", 10, 200), ("head.conv", 10, 100), ("head.conv#1", 10, 100)]
    ]
    assert [row.number for row in rows] == [0, 1, 2]


def test_a_module_that_runs_twice_stands_where_it_runs():
    rows = network_rows(with_calls(facts("a.0", 0), facts("a.1", 1), facts("b", 2), facts("a.0", 3), facts("a.1", 4)))
    assert [row.name for row in rows] == ["a", "a.0", "a.1", "b", "a", "a.0", "a.1"]
    assert [row.parents for row in rows] == [(), (0,), (0,), (), (), (4,), (4,)]


def test_a_block_is_the_head_of_the_calls_in_it():
    block = facts("block", None, 5)
    rows = network_rows(with_calls(facts("block.0", 0, 1), facts("block.1", 1, 2), block, facts("", 2, 3)))
    assert [(row.label, row.is_module, row.is_call, row.params, row.calls) for row in rows] == [
        ("block", True, False, 8, 2),
        ("0", False, True, 1, 1),
        ("1", False, True, 2, 1),
        ("(model)", False, True, 3, 1),
    ]
    assert rows[0].facts is block


def test_the_outline_of_a_distribution_has_square_roots_of_its_numbers():
    assert outline((4, 0, 1)) == "M0 20V0h1V20h1V10h1V20Z"
    assert outline((0, 0)) == "M0 20V20h1V20h1V20Z"
    assert len(outline(tuple(np.random.default_rng(0).integers(0, 10**9, 32)))) < 400
