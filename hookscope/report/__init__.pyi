from .page import draw_page as draw_page
