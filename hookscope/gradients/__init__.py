"""Gradients of every layer: measure, change, find where the gradient vanishes or stops."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
