from .overview import draw_overview as draw_overview
from .page import draw_page as draw_page
from .reader import read_page as read_page
