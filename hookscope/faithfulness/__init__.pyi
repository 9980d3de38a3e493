from .answer import MapComparison as MapComparison, MapScores as MapScores, compare_maps as compare_maps
from .facts import BASELINES as BASELINES, Faithfulness as Faithfulness
from .map_file import (
    MAP_SUFFIXES as MAP_SUFFIXES,
    over_input as over_input,
    read_boxes as read_boxes,
    read_maps as read_maps,
)
from .measure import measure_faithfulness as measure_faithfulness
from .methods import (
    RandomizedWeights as RandomizedWeights,
    cam_faithfulness as cam_faithfulness,
    sanity_check as sanity_check,
)
from .page import draw_faithfulness as draw_faithfulness
