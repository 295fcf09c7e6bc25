"""Tests of parts of pages as HTML."""

from orchestrator.report.draw.html import labelled_bar, stacked_bar


def test_parts_are_in_proportion():
    text = stacked_bar({"data": 1.0, "other": 3.0}, {"data": "1 s", "other": "3 s"})
    assert "flex:0.25000" in text
    assert "<b>3 s</b> 75%" in text


def test_everything_is_escaped():
    evil = '"><script>alert(1)</script>'
    assert "<script" not in stacked_bar({evil: 1.0}, {evil: evil})
    assert "<script" not in labelled_bar(evil, evil, 1.0, 0, 2.0, evil)
