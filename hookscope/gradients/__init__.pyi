from .anomaly import made_by as made_by, operation_of_node as operation_of_node
from .autograd_flow import refuse_reentrant_checkpoints as refuse_reentrant_checkpoints
from .backward_pass import (
    GRADIENTS as GRADIENTS,
    PARAMETER_GRADIENTS as PARAMETER_GRADIENTS,
    GradientReport as GradientReport,
    LayerGradient as LayerGradient,
    ParameterGradient as ParameterGradient,
    layer_gradients as layer_gradients,
    select_parameters as select_parameters,
)
from .figure import gradients_plot as gradients_plot
from .findings import (
    GradientThresholds as GradientThresholds,
    diagnose_gradients as diagnose_gradients,
    examine_gradients as examine_gradients,
    gradient_rows as gradient_rows,
)
from .modify import (
    ClampGradientSign as ClampGradientSign,
    ClipGradientNorm as ClipGradientNorm,
    ClipGradientValue as ClipGradientValue,
    GradientChanges as GradientChanges,
    ScaleGradient as ScaleGradient,
    ZeroGradient as ZeroGradient,
    change_gradients as change_gradients,
)
