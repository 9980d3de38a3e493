from .checks import Check as Check, verify as verify
from .paired_passes import noise_pictures as noise_pictures
