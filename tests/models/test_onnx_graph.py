"""Names of the layers of an ONNX file, by nodes as exporters write them."""

from onnx import helper

from hookscope.models.onnx_graph import Scopes, call_names


def test_a_node_belongs_to_the_innermost_module_of_its_name() -> None:
    conv = helper.make_node("Conv", ["x", "w"], ["a"], "/layer1/layer1.0/conv1/Conv")
    add = helper.make_node("Add", ["a", "x"], ["b"], "/layer1/layer1.0/Add")
    own = helper.make_node("Mul", ["b", "b"], ["c"], "blocks/0/scale it")
    scopes = Scopes([conv, add, own])
    assert [scopes.leaf_of(node) for node in (conv, add, own)] == ["layer1.0.conv1", "", ""]
    assert [scopes.is_unknown(node) for node in (conv, add, own)] == [False, False, True]
    assert [scopes.name_of(node) for node in (add, add, own)] == ["layer1.0.Add", "layer1.0.Add_1", "blocks.0.scale_it"]


def test_equal_layers_of_a_name_are_calls_and_others_get_another_name() -> None:
    relu, leaky = helper.make_node("Relu", ["x"], ["y"]), helper.make_node("LeakyRelu", ["x"], ["y"], alpha=0.1)
    layers = [("relu", [relu]), ("relu_1", [relu]), ("relu", [leaky])]
    assert call_names(layers, ()) == ["relu", "relu", "relu_1"]


def test_layers_with_other_constants_are_other_layers() -> None:
    first, second = (helper.make_node("Conv", ["x", weight], ["y"]) for weight in ("a", "b"))
    assert call_names([("conv", [first]), ("conv", [second])], {"a", "b"}) == ["conv", "conv_1"]
    assert call_names([("conv", [first]), ("conv", [second])], ()) == ["conv", "conv"]


def test_no_layer_lies_in_a_layer() -> None:
    nodes = [helper.make_node(kind, ["x"], ["y"], name=kind) for kind in ("Relu", "Abs", "Exp")]
    names = call_names([("a", [nodes[0]]), ("a.b", [nodes[1]]), ("c.d", [nodes[2]]), ("c", [nodes[0]])], ())
    assert names == ["a", "a_b", "c.d", "c_1"]
