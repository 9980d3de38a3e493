from .checks import Check as Check
from .paired_passes import noise_pictures as noise_pictures
from .run import verify as verify
