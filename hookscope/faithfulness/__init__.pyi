from .answer import (
    MapComparison as MapComparison,
    MapScores as MapScores,
    compare_maps as compare_maps,
    draw_faithfulness as draw_faithfulness,
)
from .facts import (
    BASELINES as BASELINES,
    MAP_SUFFIXES as MAP_SUFFIXES,
    Faithfulness as Faithfulness,
    over_input as over_input,
    read_boxes as read_boxes,
    read_maps as read_maps,
)
from .measure import (
    measure_faithfulness as measure_faithfulness,
)
from .methods import (
    RandomizedWeights as RandomizedWeights,
    cam_faithfulness as cam_faithfulness,
    sanity_check as sanity_check,
)
