"""Attention: where each head of each layer looks, for any way in which a model computes it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
