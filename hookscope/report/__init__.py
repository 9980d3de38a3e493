"""Pages of HTML: one file that holds pictures, numbers and scripts, and asks for nothing else."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
