"""Classes and boxes over an image, pixel by pixel."""

import numpy as np
from PIL import Image

from hookscope.drawing import class_colour, draw_boxes, draw_classes


def test_twenty_classes_have_colours_of_their_own() -> None:
    assert len({class_colour(at) for at in range(20)}) == 20 and class_colour(23) == class_colour(3)


def test_a_class_covers_its_pixels_with_its_colour_and_no_class_leaves_the_grey_image() -> None:
    ground = Image.new("RGB", (40, 20), (100, 100, 100))
    drawn = np.asarray(draw_classes(ground, np.array([[0, -1]]))).astype(float)
    np.testing.assert_allclose(
        drawn[:, :20], 100 * 0.4 + np.array(class_colour(0)) * 0.6 + np.zeros((20, 20, 3)), atol=0.5
    )
    np.testing.assert_array_equal(drawn[:, 20:], np.full((20, 20, 3), 100.0))


def test_boxes_are_scaled_and_the_first_lies_on_top() -> None:
    boxes, colours = [(10.0, 10.0, 40.0, 40.0), (10.0, 10.0, 30.0, 40.0)], [(255, 0, 0), (0, 0, 255)]
    drawn = draw_boxes(Image.new("RGB", (100, 100), "white"), boxes, colours, scale=2.0)
    assert drawn.getpixel((80, 60)) == (255, 0, 0) and drawn.getpixel((60, 60)) == (0, 0, 255)
    assert drawn.getpixel((20, 60)) == (255, 0, 0) and drawn.getpixel((50, 50)) == (255, 255, 255)


def test_a_box_beyond_the_image_keeps_its_number_inside() -> None:
    drawn = draw_boxes(Image.new("RGB", (50, 50), "white"), [(-20.0, -20.0, 90.0, 90.0)], [(9, 9, 9)])
    assert (9, 9, 9) in {drawn.getpixel((x, 1)) for x in range(14)}
