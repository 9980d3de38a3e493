from .cached_summary import cached_listing as cached_listing, listing as listing
from .events import CallRecord as CallRecord, Event as Event, PassRecord as PassRecord, trace_events as trace_events
from .recorder import TracedCall as TracedCall
from .summary import Trace as Trace, list_layers as list_layers, rows_of_type as rows_of_type, trace as trace
