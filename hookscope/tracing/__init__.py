"""Layers in order of execution, and the hooks of a pass in the order in which they fire."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
