from .graph import (
    GraphEdge as GraphEdge,
    GraphNode as GraphNode,
    NetworkGraph as NetworkGraph,
    layer_graph as layer_graph,
    network_graph as network_graph,
)
from .picture import (
    Marks as Marks,
    check_graph_file as check_graph_file,
    dot_text as dot_text,
    draw_graph as draw_graph,
    write_graph as write_graph,
)
from .tree import (
    Structure as Structure,
    TreeRow as TreeRow,
    folded_name as folded_name,
    layer_tree as layer_tree,
    module_tree as module_tree,
    size_of as size_of,
)
