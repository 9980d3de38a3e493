from .facts import (
    CallCost as CallCost,
    Measured as Measured,
    MemoryPlan as MemoryPlan,
    Plan as Plan,
    Timing as Timing,
)
