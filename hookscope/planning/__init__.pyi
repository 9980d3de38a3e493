from .facts import (
    CallCost as CallCost,
    Measured as Measured,
    MemoryPlan as MemoryPlan,
    Plan as Plan,
    Timing as Timing,
)
from .figure import plot_plan as plot_plan
from .run import plan as plan
