from .collector import StatisticsCollector as StatisticsCollector
from .drifts import FEW_VALUES as FEW_VALUES, WEAK_STEP as WEAK_STEP
from .facts import (
    CHANNELS as CHANNELS,
    QUANTILES as QUANTILES,
    STATISTICS as STATISTICS,
    LayerStatistics as LayerStatistics,
    ValuePosition as ValuePosition,
    channel_rows as channel_rows,
    statistics_rows as statistics_rows,
)
from .figure import (
    buckets as buckets,
    check_installed as check_installed,
    statistics_plot as statistics_plot,
    write_events as write_events,
)
from .findings import (
    StatisticsThresholds as StatisticsThresholds,
    diagnose as diagnose,
    find_problems as find_problems,
)
from .limits import (
    BrokenLimit as BrokenLimit,
    Limits as Limits,
    LimitsResult as LimitsResult,
    check_limits as check_limits,
    checked_layers as checked_layers,
    junit_xml as junit_xml,
)
from .moments import (
    Floats as Floats,
    ValueHistogram as ValueHistogram,
    in_intervals as in_intervals,
)
from .ranges import (
    ANSWERS as ANSWERS,
    INPUT_CALL as INPUT_CALL,
    NUMBERS as NUMBERS,
    READ as READ,
    CallRange as CallRange,
    held_by as held_by,
)
from .run import (
    AS_IN_TRAINING as AS_IN_TRAINING,
    SavedStatistics as SavedStatistics,
    StatisticsJob as StatisticsJob,
    StatisticsSource as StatisticsSource,
    as_reference as as_reference,
    load_statistics as load_statistics,
    measure_images as measure_images,
    merge_statistics as merge_statistics,
)
from .totals import (
    BATCH_NORMS as BATCH_NORMS,
    BatchNormAccumulator as BatchNormAccumulator,
    BatchNormDrift as BatchNormDrift,
    Coverage as Coverage,
    RunningStatistics as RunningStatistics,
)
