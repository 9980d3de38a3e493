from .facts import Box as Box, ReceptiveField as ReceptiveField
from .receptive_field import receptive_fields as receptive_fields
