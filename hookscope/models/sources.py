"""The sources of models, in the order in which they are asked. A new source is one file and one entry here."""

from __future__ import annotations

import os
from itertools import chain

from hookscope.errors import ModelError, nearest
from hookscope.models.from_efficientnet_lite import EfficientNetLiteSource
from hookscope.models.from_onnx import OnnxSource
from hookscope.models.from_python import PythonSource
from hookscope.models.from_timm import TimmSource
from hookscope.models.from_torchvision import BundledSource, QuantizedSource, TorchvisionSource
from hookscope.models.from_transformers import TransformersSource
from hookscope.models.model_source import ModelSource

SOURCES: list[ModelSource] = [
    BundledSource(),
    EfficientNetLiteSource(),
    TimmSource(),
    OnnxSource(),
