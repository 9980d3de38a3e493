from .catalogue import (
    CATALOGUE as CATALOGUE,
    REPORT_ORDER as REPORT_ORDER,
    add_kind as add_kind,
    default as default,
    thresholds_for as thresholds_for,
)
from .finding import (
    SEVERITIES as SEVERITIES,
    Case as Case,
    Finding as Finding,
    FindingKind as FindingKind,
    Findings as Findings,
    Threshold as Threshold,
    alike as alike,
    chains as chains,
    counted as counted,
    listed as listed,
    merged as merged,
    nonfinite_words as nonfinite_words,
    numbers_by_severity as numbers_by_severity,
    operations_in_words as operations_in_words,
    percent as percent,
    ranked as ranked,
    severity_counts as severity_counts,
    single as single,
    verdict as verdict,
)
from .rules import Rules as Rules, Thresholds as Thresholds, existing as existing, never_updated as never_updated
