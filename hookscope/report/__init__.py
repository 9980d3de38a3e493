"""Pages of HTML: self-contained files with their pictures, numbers, styles and scripts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
