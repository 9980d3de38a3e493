from .answers import Answer as Answer
from .facts import (
    CallFacts as CallFacts,
    ImageMaps as ImageMaps,
    InspectedImage as InspectedImage,
    InspectedLayer as InspectedLayer,
    Inspection as Inspection,
    InspectionEvidence as InspectionEvidence,
    Place as Place,
)
from .run import inspect as inspect
