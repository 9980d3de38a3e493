from .overview import draw_overview as draw_overview
from .page import draw_page as draw_page
