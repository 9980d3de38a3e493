from .facts import (
    CallCost as CallCost,
    Measured as Measured,
    MemoryPlan as MemoryPlan,
    Plan as Plan,
    Timing as Timing,
)
from .figure import plan_plot as plan_plot
from .run import plan as plan
