"""Tests of plots as HTML and SVG."""

import base64
import json
import re
import struct
import zlib
from html import unescape

from orchestrator.report.draw.marks import (
    Cells,
    Color,
    Disc,
    Dots,
    Group,
    Hatch,
    Key,
    Plot,
    Scale,
    Text,
    Values,
    area,
    line,
    series_color,
)
from orchestrator.report.draw.page_plot import card, shapes

EVIL = '"><script>alert(1)</script>'


def plot_of(*marks, **look):
    return Plot("title", marks, "description", **look)


def test_marks_lie_in_a_square_of_a_thousand_with_y_upwards():
    text = shapes([line((0.0, 0.0), (0.5, 0.25), stroke=Color("c1"), width=2.0, dash=(3.0, 4.0))])
    assert 'd="M0 1000L500 750"' in text
    assert "stroke:var(--c1);stroke-width:2;stroke-dasharray:3 4" in text
    assert "fill:color-mix(in srgb,var(--c0) 40%,var(--fill))" in shapes(
        [area((0, 0, 1, 1), Color("c0", 0.4))]
    )


def test_parts_of_discs_are_arcs():
    assert "<circle" in shapes([Disc((0.5, 0.5), 0.1, Color("c0"))])
    quarter = shapes([Disc((0.5, 0.5), 0.1, Color("c0"), end=0.25)])
    assert 'd="M500 400A100.0 100.0 0 0 1 600 500L500 500Z"' in quarter
    ring = shapes([Disc((0.5, 0.5), 0.1, Color("c0"), end=0.75, hole=0.08)])
    assert "stroke-width:20.0" in ring
    assert " 0 1 1 " in ring


def test_texts_of_a_stretched_plot_are_html_beside_the_drawing():
    text = card(plot_of(Text((0.25, 0.5), "label", "right", room=0.1)))
    assert "<text" not in text
    assert "left:25.0%;bottom:50.0%;transform:translate(-100%,50%);max-width:10.0%" in text
    assert "<text" in shapes([Text((0.5, 0.5), "4", size=0.03)], is_square=True)


def test_groups_have_a_title_and_lines_that_are_easy_to_point_at():
    text = shapes([Group((line((0, 0), (1, 1), stroke=Color("c0")),), "trial 3")])
    assert text.count("<path") == 2
    assert "<title>trial 3</title>" in text


def test_values_under_the_pointer_need_the_scale():
    scale = Scale((1.0, 8.0), (0.0, 2.0), x_is_log=True, name="devices")
    text = card(plot_of(Values("train", ((0.0, 0.5),)), scale=scale))
    assert 'data-label="train" data-at="0,500"' in text
    data = re.search(r'data-scale="([^"]*)"', text)
    assert data is not None
    assert json.loads(unescape(data[1]))["x_is_log"]


def test_cells_are_an_image_of_one_pixel_each():
    colors = ((Color("warm", 0.5), Color("cold", 0.0)), (Color("warm"), Color("fill")))
    match = re.search(r"base64,([^\"]+)", card(plot_of(Cells((0, 0, 1, 1), colors))))
    assert match is not None
    data = base64.b64decode(match[1])
    assert struct.unpack(">II", data[16:24]) == (2, 2)
    length = struct.unpack(">I", data[33:37])[0]
    pixels = zlib.decompress(data[41 : 41 + length])
    assert pixels[1:5] == bytes.fromhex("d9480f80")
    assert pixels[8] == 0, "the ground of the page shows"
    assert 'class="hatch" style="left:50.00%' in card(plot_of(Hatch((0.5, 0, 1, 1))))


def test_everything_is_escaped():
    marks = (Text((0, 0), EVIL), Group((Text((0, 0), EVIL),), EVIL), Values(EVIL, ()))
    ticks = ((0.5, EVIL),)
    text = card(
        Plot(
            EVIL,
            (*marks, Dots(((0, 0),), Color("c0"))),
            EVIL,
            unit=EVIL,
            remark=EVIL,
            keys=(Key(EVIL), Key(EVIL, series_color(1))),
            x_label=EVIL,
            y_label=EVIL,
            x_ticks=ticks,
            y_ticks=ticks,
            scale=Scale((0, 1), (0, 1), name=EVIL),
        )
    )
    assert "<script" not in text
