from .answer import check_comparison as check_comparison
from .facts import (
    ANSWER as ANSWER,
    BROKEN_LIMITS as BROKEN_LIMITS,
    CHANGED_IMAGES as CHANGED_IMAGES,
    PAIRS as PAIRS,
    UNPAIRED as UNPAIRED,
    Agreement as Agreement,
    Answer as Answer,
    ChangedImage as ChangedImage,
    CkaMatrix as CkaMatrix,
    ComparedMaps as ComparedMaps,
    Comparison as Comparison,
    Difference as Difference,
    LargestDifference as LargestDifference,
    PairedCall as PairedCall,
    SideFacts as SideFacts,
    answer_row as answer_row,
    how_different as how_different,
    pair_row as pair_row,
)
from .figure import (
    differences_plot as differences_plot,
    draw_compared_maps as draw_compared_maps,
    map_difference as map_difference,
    matrix_plot as matrix_plot,
)
from .reference import (
    SHIFTS as SHIFTS,
    AgainstReference as AgainstReference,
    CallShift as CallShift,
    against_reference as against_reference,
    check_shifts as check_shifts,
)
from .run import compare as compare
from .side import Side as Side, make_side as make_side
