from .blocks import Structure as Structure, folded_name as folded_name
from .run import layer_tree as layer_tree
from .tree import TreeRow as TreeRow, module_tree as module_tree
