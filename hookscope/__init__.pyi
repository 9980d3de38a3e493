from . import interventions as interventions
from ._version import __version__ as __version__
from .attention import (
    attention_maps as attention_maps,
    draw_attention as draw_attention,
)
from .comparison import (
    compare as compare,
    draw_compared_maps as draw_compared_maps,
    make_side as make_side,
)
from .drawing import draw_overlay as draw_overlay, draw_sheet as draw_sheet, read_sheet as read_sheet
from .errors import HookscopeError as HookscopeError, NonFiniteError as NonFiniteError
from .exemplars import (
    draw_exemplars as draw_exemplars,
    find_exemplars as find_exemplars,
    read_exemplars as read_exemplars,
    synthesize_images as synthesize_images,
)
from .explain import (
    SaliencySettings as SaliencySettings,
    animate_clip as animate_clip,
    class_activation_maps as class_activation_maps,
    draw_cam as draw_cam,
    draw_clip as draw_clip,
    draw_saliency as draw_saliency,
    fuse_maps as fuse_maps,
    landmark_layers as landmark_layers,
    saliency_maps as saliency_maps,
)
from .extraction import (
    extract as extract,
)
from .faithfulness import (
    cam_faithfulness as cam_faithfulness,
    compare_maps as compare_maps,
    draw_faithfulness as draw_faithfulness,
    measure_faithfulness as measure_faithfulness,
    sanity_check as sanity_check,
)
from .gradients import (
    ClampGradientSign as ClampGradientSign,
    ClipGradientNorm as ClipGradientNorm,
    ClipGradientValue as ClipGradientValue,
    ScaleGradient as ScaleGradient,
    ZeroGradient as ZeroGradient,
    change_gradients as change_gradients,
    layer_gradients as layer_gradients,
)
from .hooks import (
    SaveOutput as SaveOutput,
    capture as capture,
)
from .images import Listener as Listener, open_image as open_image
from .inspection import (
    inspect as inspect,
)
from .interventions import (
    ablate_each as ablate_each,
    draw_effect as draw_effect,
    intervene as intervene,
    intervention_effect as intervention_effect,
)
from .jobs import RayEngine as RayEngine, RunSettings as RunSettings
from .models import (
    find_models as find_models,
    load_model as load_model,
)
from .parameters import (
    draw_kernels as draw_kernels,
    parameter_statistics as parameter_statistics,
)
from .planning import plan as plan
from .report import diagnose as diagnose, plot as plot, write_page as write_page
from .scores import (
    BoxTarget as BoxTarget,
    DifferenceTarget as DifferenceTarget,
    Loss as Loss,
    RegionTarget as RegionTarget,
    Score as Score,
    ScoreTarget as ScoreTarget,
    SimilarityTarget as SimilarityTarget,
    predict as predict,
)
from .statistics import (
    RunningStatistics as RunningStatistics,
    StatisticsCollector as StatisticsCollector,
    load_statistics as load_statistics,
)
from .structure import (
    draw_graph as draw_graph,
    layer_graph as layer_graph,
    layer_tree as layer_tree,
    write_graph as write_graph,
)
from .tracing import (
    find_non_finite as find_non_finite,
    layer_totals as layer_totals,
    list_layers as list_layers,
    trace_events as trace_events,
)
from .training import (
    Monitor as Monitor,
    read_runs as read_runs,
)
from .verification import verify as verify
