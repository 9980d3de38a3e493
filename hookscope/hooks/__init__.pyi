from .activations import (
    Activations as Activations,
    SaveOutput as SaveOutput,
    capture as capture,
    keep_and_hand_on as keep_and_hand_on,
)
from .calls import (
    ACTIVATION_FUNCTIONS as ACTIVATION_FUNCTIONS,
    EVERY_OPERATION as EVERY_OPERATION,
    MODEL as MODEL,
    OPERATION as OPERATION,
    Call as Call,
    LayerCall as LayerCall,
    Pixels as Pixels,
    Shape as Shape,
    activation_class as activation_class,
    call_key as call_key,
    enclosing as enclosing,
    key_of as key_of,
    matches_type as matches_type,
    no_such_type as no_such_type,
    passes_values_on as passes_values_on,
    select_types as select_types,
    usual_types as usual_types,
)
from .maps import (
    InputSize as InputSize,
    Maps as Maps,
    by_channel as by_channel,
    channel_axis as channel_axis,
    feature_maps as feature_maps,
    maps_or_vectors as maps_or_vectors,
    token_grid as token_grid,
)
from .model_state import (
    ModelSnapshot as ModelSnapshot,
    StateChange as StateChange,
    buffers_kept as buffers_kept,
    differentiable as differentiable,
    largest_difference as largest_difference,
    largest_value as largest_value,
    leaf_tensors as leaf_tensors,
    leaves_of as leaves_of,
    one_thread as one_thread,
    passed_on as passed_on,
    random_states as random_states,
    random_states_kept as random_states_kept,
    same_bits as same_bits,
)
from .moments import (
    GradientSize as GradientSize,
    merge_moments as merge_moments,
    norm_and_nonfinite as norm_and_nonfinite,
    size_of as size_of,
    total_norm as total_norm,
    value_numbers as value_numbers,
)
from .non_finite import (
    UNKNOWN as UNKNOWN,
    Anomaly as Anomaly,
    NonFiniteSearch as NonFiniteSearch,
    WatchedPass as WatchedPass,
    kinds_of as kinds_of,
    may_write as may_write,
    operation_name as operation_name,
    place_of_code as place_of_code,
    word_of as word_of,
)
from .observer import Observer as Observer, is_recomputing as is_recomputing
from .operations import (
    Operation as Operation,
    OperationCounter as OperationCounter,
    Operations as Operations,
    class_names as class_names,
    holder_of as holder_of,
    is_closed as is_closed,
    is_leaf as is_leaf,
    is_single as is_single,
    layers_with_weights as layers_with_weights,
    types_in as types_in,
    types_of as types_of,
    was_trained as was_trained,
    was_updated as was_updated,
    without_check as without_check,
)
from .registration import (
    HookHandles as HookHandles,
    check_hookable as check_hookable,
    hook_tensor as hook_tensor,
    other_hooks_set_aside as other_hooks_set_aside,
)
from .selection import Layers as Layers, Selection as Selection, layer_text as layer_text
from .tensors import (
    as_float as as_float,
    as_plain as as_plain,
    finite_values as finite_values,
    joined_inputs as joined_inputs,
    map_tensors as map_tensors,
    named_inputs as named_inputs,
    shape_of as shape_of,
    split_inputs as split_inputs,
    storage_key as storage_key,
    tensors_in as tensors_in,
)
