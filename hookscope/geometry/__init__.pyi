from .receptive_field import (
    Box as Box,
    ReceptiveField as ReceptiveField,
    computed_field as computed_field,
    effective_fields as effective_fields,
    receptive_fields as receptive_fields,
)
from .tracker import FieldTracker as FieldTracker
