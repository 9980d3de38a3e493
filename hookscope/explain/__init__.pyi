from .cam import (
    class_activation_maps as class_activation_maps,
    first_batch as first_batch,
    landmark_layers as landmark_layers,
    progress_counter as progress_counter,
)
from .cam_maps import (
    ClassActivationMap as ClassActivationMap,
    candidates as candidates,
    fuse_maps as fuse_maps,
    in_place_of as in_place_of,
    maps_by_class as maps_by_class,
    over_picture as over_picture,
    picture_in as picture_in,
)
from .cam_methods import ATTENTION_METHODS as ATTENTION_METHODS, CAM_METHODS as CAM_METHODS
from .clip import animate_clip as animate_clip, draw_clip as draw_clip
from .page import (
    OverlaySource as OverlaySource,
    draw_cam as draw_cam,
    draw_saliency as draw_saliency,
    why_empty as why_empty,
    why_outside as why_outside,
    why_unseen as why_unseen,
)
from .saliency import Saliency as Saliency, saliency_maps as saliency_maps
from .saliency_methods import SALIENCY_METHODS as SALIENCY_METHODS
from .saliency_settings import SaliencySettings as SaliencySettings
