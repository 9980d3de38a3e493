from .ablation import (
    Ablation as Ablation,
    ChannelWorth as ChannelWorth,
    ablate_each as ablate_each,
    channel_scores as channel_scores,
    scores_without as scores_without,
)
from .base import Intervention as Intervention, ParameterIntervention as ParameterIntervention
from .context import intervene as intervene
from .effect import (
    ClassChange as ClassChange,
    Effect as Effect,
    MovedLayer as MovedLayer,
    class_changes as class_changes,
    from_the_start as from_the_start,
    intervention_effect as intervention_effect,
)
from .elementwise import (
    Clamp as Clamp,
    Mean as Mean,
    Noise as Noise,
    Patch as Patch,
    Permute as Permute,
    Quantize as Quantize,
    Scale as Scale,
    Steer as Steer,
    Zero as Zero,
)
from .figure import draw_ablation as draw_ablation, draw_effect as draw_effect
from .regularisers import (
    DropBlock as DropBlock,
    DropBlock2d as DropBlock2d,
    DropBlock3d as DropBlock3d,
    Dropout as Dropout,
    Dropout2d as Dropout2d,
    Freeze as Freeze,
    LinearSchedule as LinearSchedule,
    Prune as Prune,
)
from .spec import (
    WORDS as WORDS,
    InterventionSpec as InterventionSpec,
    help_rows as help_rows,
    read_source as read_source,
)
