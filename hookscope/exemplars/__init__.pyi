from .facts import (
    EXEMPLARS as EXEMPLARS,
    ChannelExemplars as ChannelExemplars,
    Exemplar as Exemplar,
    LayerExemplars as LayerExemplars,
    SynthesizedImage as SynthesizedImage,
    class_words as class_words,
    exemplar_row as exemplar_row,
)
from .job import MEASURES as MEASURES, ExemplarsJob as ExemplarsJob
from .run import (
    SavedExemplars as SavedExemplars,
    find_exemplars as find_exemplars,
    load_exemplars as load_exemplars,
    read_exemplars as read_exemplars,
    read_exemplars_of as read_exemplars_of,
    save_synthesized as save_synthesized,
)
from .sheet import (
    CELL as CELL,
    RING_WORDS as RING_WORDS,
    Crop as Crop,
    Crops as Crops,
    cut_crops as cut_crops,
    draw_exemplars as draw_exemplars,
    field_words as field_words,
    fitted as fitted,
    is_sheet as is_sheet,
    lost_words as lost_words,
    measure_words as measure_words,
    times_best as times_best,
)
from .synthesis import add_synthesized as add_synthesized, synthesize_images as synthesize_images
