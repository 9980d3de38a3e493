from .batches import Batch as Batch, load_batches as load_batches
from .checkpoints import load_content as load_content
from .choices import (
    AUTOCAST as AUTOCAST,
    DTYPES as DTYPES,
    PREPROCESS_WORDS as PREPROCESS_WORDS,
    RESIZE_WORDS as RESIZE_WORDS,
    dtype_words as dtype_words,
    file_dtypes as file_dtypes,
    parse_numbers as parse_numbers,
    parse_preprocess as parse_preprocess,
    parse_range as parse_range,
    parse_resize as parse_resize,
)
from .factories import NUMBERS as NUMBERS, find_in_source as find_in_source
from .given import given_inputs as given_inputs, takes_inputs as takes_inputs
from .load import (
    load_model as load_model,
    parse_dtype as parse_dtype,
    pick_device as pick_device,
)
from .loaded import (
    LoadedModel as LoadedModel,
    as_batch as as_batch,
    as_loaded as as_loaded,
    as_size as as_size,
    check_size as check_size,
    dtype_name as dtype_name,
    example_inputs as example_inputs,
    family_of as family_of,
    first_channels as first_channels,
    is_quantized as is_quantized,
    note_input as note_input,
    outputs_of as outputs_of,
)
from .metadata import ModelInfo as ModelInfo, WeightsMetadata as WeightsMetadata, find_models as find_models
from .model_source import (
    WEIGHTS_WORDS as WEIGHTS_WORDS,
    Detections as Detections,
    ModelSource as ModelSource,
    WeightsChoice as WeightsChoice,
    is_random as is_random,
)
from .names import (
    broken_pair as broken_pair,
    missing_package as missing_package,
    package_versions as package_versions,
    short_name as short_name,
    unreadable_settings as unreadable_settings,
)
from .preprocess import Preprocess as Preprocess
from .run import (
    describe_error as describe_error,
    forward_error as forward_error,
    meta_forward as meta_forward,
    model_errors_as_input_errors as model_errors_as_input_errors,
)
from .sources import (
    class_names_of as class_names_of,
    detections_in as detections_in,
    find_source as find_source,
    model_names as model_names,
)
from .transforms import Resize as Resize
