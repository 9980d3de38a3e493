from .cam import (
    ClassActivationMap as ClassActivationMap,
    class_activation_maps as class_activation_maps,
    fused as fused,
    landmark_layers as landmark_layers,
    shared_tops as shared_tops,
)
from .cam_methods import CAM_METHODS as CAM_METHODS
from .page import (
    OverlaySource as OverlaySource,
    draw_overlay as draw_overlay,
    draw_saliency as draw_saliency,
    draw_sheet as draw_sheet,
    saliency_top as saliency_top,
    why_empty as why_empty,
    why_unseen as why_unseen,
)
from .saliency import Saliency as Saliency, saliency_maps as saliency_maps
from .saliency_methods import SALIENCY_METHODS as SALIENCY_METHODS
from .saliency_settings import Settings as Settings
