from .cam import (
    ClassActivationMap as ClassActivationMap,
    class_activation_maps as class_activation_maps,
    fused as fused,
    landmark_layers as landmark_layers,
)
from .cam_methods import CAM_METHODS as CAM_METHODS
from .cam_page import (
    draw_overlay as draw_overlay,
    draw_sheet as draw_sheet,
    still_of as still_of,
    why_empty as why_empty,
)
from .overlay_source import OverlaySource as OverlaySource
from .saliency import Saliency as Saliency, saliency_maps as saliency_maps
from .saliency_methods import SALIENCY_METHODS as SALIENCY_METHODS
from .saliency_page import draw_saliency as draw_saliency, saliency_still as saliency_still
from .saliency_settings import Settings as Settings
