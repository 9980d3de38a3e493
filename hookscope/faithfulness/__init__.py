"""Which map tells the truth: how the score changes when a map's pixels are removed, and with shuffled weights."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
