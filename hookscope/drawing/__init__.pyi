from . import colours as colours
from .colours import colour_map_names as colour_map_names, palette as palette
from .curves import CURVE_COLOURS as CURVE_COLOURS, Chart as Chart, ChartAxis as ChartAxis, Curve as Curve
from .difference import (
    BOLD as BOLD,
    DifferencePage as DifferencePage,
    DrawnDifference as DrawnDifference,
    MapDifference as MapDifference,
    compare_maps as compare_maps,
    draw_difference as draw_difference,
)
from .files import (
    ANIMATIONS as ANIMATIONS,
    LEAST_WIDTH as LEAST_WIDTH,
    MARGIN as MARGIN,
    SheetPage as SheetPage,
    colour_bar as colour_bar,
    encode_png as encode_png,
    finite_or_none as finite_or_none,
    image_bytes as image_bytes,
    map_png as map_png,
    placed as placed,
    read_provenance as read_provenance,
    read_sheet as read_sheet,
    values_of_levels as values_of_levels,
    with_provenance as with_provenance,
    write_animation as write_animation,
    write_png as write_png,
)
from .grid import (
    MOST_PIXELS as MOST_PIXELS,
    Grid as Grid,
    draw_grids as draw_grids,
    lay_out as lay_out,
    to_image as to_image,
)
from .heat import (
    ALARM as ALARM,
    DARK as DARK,
    FAINT as FAINT,
    INK as INK,
    LIGHT as LIGHT,
    PALE as PALE,
    Ground as Ground,
    Heading as Heading,
    Heat as Heat,
    HeatPanel as HeatPanel,
    HeatRow as HeatRow,
    class_colour as class_colour,
    draw_boxes as draw_boxes,
    draw_classes as draw_classes,
    draw_heat as draw_heat,
    draw_heat_page as draw_heat_page,
    seen_part as seen_part,
)
from .panels import (
    Colour as Colour,
    DrawnPanel as DrawnPanel,
    Mark as Mark,
    Panel as Panel,
    RowPlot as RowPlot,
    decades as decades,
    plain_ticks as plain_ticks,
    row_plot as row_plot,
    tick_label as tick_label,
)
from .plot import (
    DPI as DPI,
    SMALL as SMALL,
    TITLE as TITLE,
    add_panel as add_panel,
    draw_chart as draw_chart,
    draw_rows as draw_rows,
    figure_bytes as figure_bytes,
    finding_lines as finding_lines,
    layer_label as layer_label,
    plain_settings as plain_settings,
    plot_suffix as plot_suffix,
    short_label as short_label,
    with_types as with_types,
    write as write,
    write_at as write_at,
)
from .scale import (
    ALPHA as ALPHA,
    Scale as Scale,
    SymmetricScale as SymmetricScale,
    scale_examples as scale_examples,
    scale_notations as scale_notations,
)
from .sheet import (
    ALL_CHANNELS as ALL_CHANNELS,
    Origin as Origin,
    Style as Style,
    draw_call as draw_call,
    draw_overlay as draw_overlay,
    draw_sheet as draw_sheet,
    shape_text as shape_text,
)
from .text import (
    Pixels as Pixels,
    fitting as fitting,
    font as font,
    inches as inches,
    stamp as stamp,
    text_pixels as text_pixels,
    wrapped as wrapped,
)
from .tiles import (
    ChannelChoice as ChannelChoice,
    Tiles as Tiles,
    channel_numbers as channel_numbers,
    input_frames as input_frames,
    input_size_of as input_size_of,
    layers_of_classes as layers_of_classes,
    names_of_channels as names_of_channels,
    reduce_maps as reduce_maps,
    run_and_reduce as run_and_reduce,
)
