"""Where two models, or two ways to run one, begin to differ: call by call over the same images."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
