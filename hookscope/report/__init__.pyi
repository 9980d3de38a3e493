from .comparison import draw_comparison_page as draw_comparison_page
from .exemplars import draw_exemplars_page as draw_exemplars_page
from .inspection import draw_overview as draw_overview, draw_page as draw_page
from .results import (
    diagnose as diagnose,
    draw_gradients_page as draw_gradients_page,
    draw_statistics_page as draw_statistics_page,
    draw_training_page as draw_training_page,
    draw_weights_page as draw_weights_page,
    plot as plot,
    write_page as write_page,
)
