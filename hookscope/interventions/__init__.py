"""Change activations and parameters while a model runs, and measure the effect."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
