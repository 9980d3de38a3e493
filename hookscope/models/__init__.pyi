from .batches import Batch as Batch, load_batches as load_batches
from .bundled import BUNDLED as BUNDLED, weights_path as weights_path
from .catalogue import ModelInfo as ModelInfo, find_models as find_models
from .checkpoints import load_content as load_content
from .crops import seen_box as seen_box
from .from_torchvision import build_listed as build_listed, build_real as build_real, listing_size as listing_size
from .inputs import example_inputs as example_inputs, family_of as family_of, native_size as native_size
from .installation import broken_pair as broken_pair, missing_package as missing_package
from .load import LoadedModel as LoadedModel, load_model as load_model
from .meta_device import meta_forward as meta_forward
from .metadata import Description as Description, read_description as read_description
from .names import (
    check_model_name as check_model_name,
    class_names_of as class_names_of,
    model_names as model_names,
    package_versions as package_versions,
)
from .run import model_errors_as_input_errors as model_errors_as_input_errors
