from .facts import Box as Box, ReceptiveField as ReceptiveField
from .receptive_field import (
    FieldTracker as FieldTracker,
    computed_field as computed_field,
    effective_fields as effective_fields,
    receptive_fields as receptive_fields,
)
