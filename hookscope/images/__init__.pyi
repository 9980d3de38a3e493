from .find import (
    PROVENANCE as PROVENANCE,
    ImageWarning as ImageWarning,
    Listener as Listener,
    find_pictures as find_pictures,
    is_picture_suffix as is_picture_suffix,
    is_remote as is_remote,
    label_of as label_of,
    read_names as read_names,
    spread as spread,
    warn_of_image as warn_of_image,
)
from .reader import (
    MAX_BYTES as MAX_BYTES,
    AnyImage as AnyImage,
    InputImage as InputImage,
    as_picture as as_picture,
    is_picture as is_picture,
    list_pictures as list_pictures,
    open_image as open_image,
    read_mask as read_mask,
    read_picture as read_picture,
    read_pipe as read_pipe,
)
