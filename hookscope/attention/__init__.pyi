from .run import (
    AttentionMap as AttentionMap,
    attention_maps as attention_maps,
    draw_attention as draw_attention,
    map_of as map_of,
    usual_query as usual_query,
)
from .weights import (
    Attention as Attention,
    follow_attention as follow_attention,
    selected_attention as selected_attention,
)
