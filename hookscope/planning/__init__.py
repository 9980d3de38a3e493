"""What a model costs before it runs, and what it costs when it does: memory, arithmetic, time."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
