"""The structure of a network: its modules as a tree, and its data flow as a graph."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
