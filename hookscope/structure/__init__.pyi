from .files import check_graph_file as check_graph_file, dot_text as dot_text, write_graph as write_graph
from .graph import (
    GraphEdge as GraphEdge,
    GraphNode as GraphNode,
    NetworkGraph as NetworkGraph,
    network_graph as network_graph,
)
from .picture import Marks as Marks, draw_graph as draw_graph
from .run import layer_graph as layer_graph, layer_tree as layer_tree
from .tree import (
    Structure as Structure,
    TreeRow as TreeRow,
    folded_name as folded_name,
    module_tree as module_tree,
    size_of as size_of,
)
