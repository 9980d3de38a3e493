from .catalogue import (
    CATALOGUE as CATALOGUE,
    GRAVITY as GRAVITY,
    FindingKind as FindingKind,
    Threshold as Threshold,
    Thresholds as Thresholds,
    add_kind as add_kind,
    default as default,
    thresholds_for as thresholds_for,
)
from .finding import (
    Finding as Finding,
    chains as chains,
    counted as counted,
    listed as listed,
    nonfinite_words as nonfinite_words,
    percent as percent,
)
from .rules import Rules as Rules, existing as existing
