"""See inside a vision model: hooks on every layer, activations as pictures and numbers.

Public names are listed in ``__init__.pyi`` and loaded on first use: ``import hookscope`` loads no torch.

Example:
    >>> import hookscope
    >>> hookscope.SaveOutput().outputs
    []
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
