"""A model's name to a model that is ready to run: weights, preprocessing, batches."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
