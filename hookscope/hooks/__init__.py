"""The one place that registers hooks, and what hooks see: calls, activations, gradients, selections."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
