from .cached_summary import cached_listing as cached_listing, listing as listing
from .call_recorder import CallRecorder as CallRecorder
from .events import (
    CallRecord as CallRecord,
    Facts as Facts,
    PassRecord as PassRecord,
    TensorSummary as TensorSummary,
    trace_events as trace_events,
)
from .facts import (
    INPUT as INPUT,
    LAYER_CALLS as LAYER_CALLS,
    LAYER_TOTALS as LAYER_TOTALS,
    LayerCall as LayerCall,
    LayerTotals as LayerTotals,
    Trace as Trace,
    TracedCall as TracedCall,
    TracedLayer as TracedLayer,
    rows_of_type as rows_of_type,
    totals_of_type as totals_of_type,
)
from .non_finite import (
    NonFinite as NonFinite,
    NonFiniteReport as NonFiniteReport,
    find_non_finite as find_non_finite,
)
from .summary import (
    Inputs as Inputs,
    MacCounter as MacCounter,
    check_traceable as check_traceable,
    everything_as_before as everything_as_before,
    layer_totals as layer_totals,
    list_layers as list_layers,
    named as named,
    trace as trace,
    trace_at as trace_at,
)
