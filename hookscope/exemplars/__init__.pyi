from .facts import (
    ChannelExemplars as ChannelExemplars,
    Exemplar as Exemplar,
    LayerExemplars as LayerExemplars,
    ReceptiveField as ReceptiveField,
    SynthesizedImage as SynthesizedImage,
)
