from .log.file import LateLog as LateLog, Run as Run, RunLog as RunLog, last_rows as last_rows, read_runs as read_runs
from .log.findings import findings_over_time as findings_over_time
from .log.series import LayerSeries as LayerSeries, series_of as series_of
from .log.summary import (
    TimedFinding as TimedFinding,
    duration_words as duration_words,
    judged as judged,
    summary as summary,
)
from .monitor import Monitor as Monitor
from .plot import loss_chart as loss_chart, plot_training as plot_training, run_plot as run_plot
from .sinks import Sink as Sink, SinkChoice as SinkChoice
