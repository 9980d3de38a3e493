"""Hooks: the one place that registers them, and the calls, selections, activations and gradients they see."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
