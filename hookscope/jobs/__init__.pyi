from .engines import TorchrunEngine as TorchrunEngine
from .memory import (
    Images as Images,
    MemoryEngine as MemoryEngine,
    memory_batches as memory_batches,
    paths_or_items as paths_or_items,
)
from .ray_engine import RayEngine as RayEngine
from .run import (
    AGAIN as AGAIN,
    Engine as Engine,
    Job as Job,
    LocalEngine as LocalEngine,
    Part as Part,
    Progress as Progress,
    RunIdentity as RunIdentity,
    RunSettings as RunSettings,
    SavedRun as SavedRun,
    SkippedImage as SkippedImage,
    fingerprint_of as fingerprint_of,
    hash_of_names as hash_of_names,
    layers_in_words as layers_in_words,
    picture_of as picture_of,
    pictures_in as pictures_in,
)
from .state_file import (
    StateKind as StateKind,
    is_state_file as is_state_file,
    read_state as read_state,
    write_state as write_state,
)
