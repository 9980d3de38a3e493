from . import cache as cache
from .atomic_files import (
    StrPath as StrPath,
    check_folder as check_folder,
    check_writable as check_writable,
    is_locked_by_another as is_locked_by_another,
    make_folder as make_folder,
    remove_unfinished as remove_unfinished,
    replacement as replacement,
    write_atomically as write_atomically,
    write_errors as write_errors,
)
from .processes import (
    InChildren as InChildren,
    Script as Script,
    after_import as after_import,
    before_termination as before_termination,
    find_script as find_script,
    import_extra as import_extra,
    missing_extra as missing_extra,
    signals_held as signals_held,
)
