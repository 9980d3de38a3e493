from .figure import draw_attention as draw_attention
from .run import (
    AttentionMap as AttentionMap,
    attention_maps as attention_maps,
    map_of as map_of,
    usual_query as usual_query,
)
from .weights import (
    Attention as Attention,
    follow_attention as follow_attention,
    selected_attention as selected_attention,
)
