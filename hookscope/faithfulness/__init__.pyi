from .answer import (
    MapComparison as MapComparison,
    MapScores as MapScores,
    compare_maps as compare_maps,
    draw_faithfulness as draw_faithfulness,
)
from .measure import (
    BASELINES as BASELINES,
    Faithfulness as Faithfulness,
    measure_faithfulness as measure_faithfulness,
)
from .methods import (
    MAP_SUFFIXES as MAP_SUFFIXES,
    RandomizedWeights as RandomizedWeights,
    cam_faithfulness as cam_faithfulness,
    over_input as over_input,
    read_boxes as read_boxes,
    read_maps as read_maps,
    sanity_check as sanity_check,
)
