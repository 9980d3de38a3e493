from .facts import (
    ChannelExemplars as ChannelExemplars,
    Exemplar as Exemplar,
    LayerExemplars as LayerExemplars,
    ReceptiveField as ReceptiveField,
    SynthesizedImage as SynthesizedImage,
)
from .job import MEASURES as MEASURES, ExemplarsJob as ExemplarsJob
from .receptive_field import receptive_fields as receptive_fields
from .run import find_exemplars as find_exemplars
from .storage import (
    SavedExemplars as SavedExemplars,
    load_exemplars as load_exemplars,
    read_exemplars as read_exemplars,
)
