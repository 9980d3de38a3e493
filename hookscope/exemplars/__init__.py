"""What each channel reacts to: the images of a collection that excite it most, and an image made to do so."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
