from .facts import (
    CallFacts as CallFacts,
    Evidence as Evidence,
    ImageMaps as ImageMaps,
    InspectedImage as InspectedImage,
    InspectedLayer as InspectedLayer,
    Inspection as Inspection,
    Place as Place,
)
from .run import inspect as inspect
