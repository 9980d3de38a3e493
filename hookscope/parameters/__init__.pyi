from .figure import weights_plot as weights_plot
from .findings import (
    WEIGHTS as WEIGHTS,
    ParameterStatistics as ParameterStatistics,
    ParameterThresholds as ParameterThresholds,
    finding_names as finding_names,
    parameter_findings as parameter_findings,
    weights_rows as weights_rows,
)
from .kernels import draw_kernels as draw_kernels, drawable_filters as drawable_filters, kernel_sheet as kernel_sheet
from .statistics import parameter_statistics as parameter_statistics
