"""See inside a vision model: hooks on every layer, activations as pictures and numbers.

Load a model, or take a torch.nn.Module of your own, and ask one question at a time:

    net = hookscope.load_model("resnet34")
    hookscope.predict(net, "cat.jpg")                       # which classes
    hookscope.inspect(net, "cat.jpg")                       # where to look first
    hookscope.list_layers(net)                              # what it is made of
    maps = hookscope.class_activation_maps(net, "cat.jpg")  # why this class
    hookscope.draw_cam(maps, "cat.jpg", net)                # a picture of it

    with hookscope.capture(net, "layer4.*") as activations:
        net(net.preprocess(hookscope.open_image("cat.jpg"))[None])
    activations.sheet("layer4.0.conv1")

Everything takes a model, an image or its path. docs/python-api.md has a table of tasks. A name is loaded on first use.
"""

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name in __all__:
        return _load(name)
    from hookscope.errors import nearest

    near = "" if name[:1] == "_" else nearest(name, __all__)
    raise AttributeError("; ".join(filter(None, [f"module 'hookscope' has no attribute '{name}'", near])), name=name)
