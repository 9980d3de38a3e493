from .checks import Check as Check, each_check as each_check, verify as verify
from .paired_passes import noise_pictures as noise_pictures
