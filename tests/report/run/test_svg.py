"""Tests of charts as HTML and SVG."""

import base64
import math
import re
import struct
import zlib

from orchestrator.report.draw.markup import esc
from orchestrator.report.run.figures.panels import Panel, PanelCurve
from orchestrator.report.run.svg import chart, heat_image, labelled_bar, stacked_bar


def test_a_chart_has_curves_labels_and_scale():
    text = chart(
        Panel(
            "Loss",
            (
                PanelCurve("train", [(1.0, 2.0), (3.0, 1.0)]),
                PanelCurve("validation", [(3.0, 1.5)], "dots", 1),
            ),
            unit="nats",
        )
    )
    assert 'data-label="train"' in text
    assert 'data-x0="1.0" data-x1="3.0"' in text
    assert text.count('class="key"') == 2
    assert '<span class="unit">nats</span>' in text


def test_a_gap_interrupts_the_line():
    text = chart(
        Panel(
            "x",
            (PanelCurve("a", [(0.0, 1.0), (1.0, math.nan), (2.0, 1.0), (3.0, 2.0)]),),
            non_finite_steps=(1.0,),
        )
    )
    line = re.search(r'class="line"[^>]* d="([^"]*)"', text)
    assert line is not None
    assert line[1].count("M") == 2
    assert "nan" not in line[1]
    assert 'class="broken"' in text


def test_a_panel_without_numbers_is_drawn():
    assert 'class="broken"' in chart(Panel("Loss", (), non_finite_steps=(1.0, 2.0)))


def test_bars_stand_on_the_lower_edge():
    text = chart(Panel("t", (PanelCurve("t", [(1.0, 3.0), (2.0, 4.0)], "bars"),), from_zero=True))
    assert text.count("V1000z") == 2


def test_everything_is_escaped():
    evil = '"><script>alert(1)</script>'
    for text in (
        chart(
            Panel(
                evil,
                (PanelCurve(evil, [(1.0, 1.0)]), PanelCurve(evil, [(1.0, 2.0)])),
                unit=evil,
                x_label=evil,
                marks=((1.0, evil),),
            )
        ),
        stacked_bar({evil: 1.0}, {evil: evil}),
        labelled_bar(evil, [(evil, 1.0, 0)], 2.0, evil),
        heat_image([[1.0]], evil),
    ):
        assert "<script" not in text
    assert esc(evil) == "&quot;&gt;&lt;script&gt;alert(1)&lt;/script&gt;"


def test_parts_are_in_proportion():
    text = stacked_bar({"data": 1.0, "other": 3.0}, {"data": "1 s", "other": "3 s"})
    assert "flex:0.25000" in text
    assert "<b>3 s</b> 75%" in text


def test_the_heat_image_is_a_png_of_one_pixel_per_cell():
    match = re.search(r"base64,([^\"]+)", heat_image([[1.0, 4.0, None], [0.25, 0.0, 2.0]], "layer"))
    assert match is not None
    data = base64.b64decode(match[1])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (3, 2)
    length = struct.unpack(">I", data[33:37])[0]
    pixels = zlib.decompress(data[41 : 41 + length])
    assert pixels[4] == 0, "an even share is transparent"
    assert pixels[8] == 255, "four times the even share is at full strength"
    assert pixels[9:13] == bytes(4), "an expert that did not exist is transparent"


def test_cells_without_a_ratio_are_cut_out_of_the_heat_image():
    assert "mask" not in heat_image([[1.0, 0.0]], "layer")
    text = heat_image([[1.0, None]], "layer")
    assert text.startswith('<div class="gaps"><img')
    mask = re.search(r"mask:url\(data:image/png;base64,([^)]+)\)", text)
    assert mask is not None
    data = base64.b64decode(mask[1])
    pixels = zlib.decompress(data[41 : 41 + struct.unpack(">I", data[33:37])[0]])
    assert (pixels[4], pixels[8]) == (255, 0)
