from .comparison import draw_comparison_page as draw_comparison_page
from .exemplars import draw_exemplars_page as draw_exemplars_page
from .inspection import draw_overview as draw_overview, draw_page as draw_page
from .results import (
    draw_gradients_page as draw_gradients_page,
    draw_statistics_page as draw_statistics_page,
    draw_training_page as draw_training_page,
    draw_weights_page as draw_weights_page,
)
from .row import (
    GRADIENT_FIELDS as GRADIENT_FIELDS,
    NESTED_STATISTICS_FIELDS as NESTED_STATISTICS_FIELDS,
    NESTED_WEIGHTS_FIELDS as NESTED_WEIGHTS_FIELDS,
    PARAMETER_GRADIENT_FIELDS as PARAMETER_GRADIENT_FIELDS,
    STATISTICS_FIELDS as STATISTICS_FIELDS,
    WEIGHTS_FIELDS as WEIGHTS_FIELDS,
    Row as Row,
    call_row as call_row,
    last_rows as last_rows,
    row_of as row_of,
)
from .rows import (
    layer_gradient_row as layer_gradient_row,
    parameter_gradient_row as parameter_gradient_row,
    statistics_rows as statistics_rows,
    weights_row as weights_row,
)
