"""One job on many images, in this process or in others: parts, engines, progress that is saved."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
