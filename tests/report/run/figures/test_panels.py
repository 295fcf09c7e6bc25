"""Tests of the charts of a run as points."""

import math

from hypothesis import given
from hypothesis import strategies as st

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_run import events_record, run_record
from orchestrator.report.run.figures.panels import (
    MAX_POINTS,
    Panel,
    PanelCurve,
    decimate,
    device_panels,
    smooth,
    training_panels,
)

SERIES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=3000)


def panels_of(tmp_path, run):
    return {panel.title: panel for panel in training_panels(run_record(tmp_path, run))}


def test_a_run_has_these_panels(tmp_path):
    panels = panels_of(tmp_path, FakeRun())
    assert list(panels) == ["Loss", "Accuracy", "Epoch time", "Gradient norm", "Learning rate", "Throughput"]
    assert [curve.look for curve in panels["Loss"].curves] == ["raw", "line", "dots"]
    assert panels["Throughput"].unit == "samples/s"
    assert panels["Epoch time"].curves[0].points[0][0] == 1, "people count epochs from one"


def test_tokens_are_counted_if_a_sample_has_several(tmp_path):
    assert panels_of(tmp_path, FakeRun(experts=4))["Throughput"].unit == "tokens/s"


def test_without_steps_there_are_no_panels(tmp_path):
    assert training_panels(run_record(tmp_path, FakeRun(steps=0, ends="failed"))) == []


def test_a_short_series_is_not_smoothed(tmp_path):
    assert [curve.look for curve in panels_of(tmp_path, FakeRun(steps=8, epochs=1))["Loss"].curves] == [
        "line",
        "dots",
    ]


def test_a_long_run_is_decimated(tmp_path):
    panels = panels_of(tmp_path, FakeRun(steps=5000, epochs=300))
    assert all(len(curve.points) <= MAX_POINTS for panel in panels.values() for curve in panel.curves)
    assert panels["Epoch time"].curves[0].look == "line"


def test_non_finite_values_are_gaps_and_are_marked(tmp_path):
    loss = panels_of(tmp_path, FakeRun(steps=60, broken={10: "nan", 11: "inf", 12: "-inf"}))["Loss"]
    assert loss.non_finite_steps == (10.0, 11.0, 12.0)
    gaps = [x for x, y in loss.curves[1].points if math.isnan(y)]
    assert gaps == [10.0, 11.0, 12.0]
    assert not math.isnan(loss.y_axis.high)


def test_a_loss_that_is_always_nan_still_has_a_panel(tmp_path):
    events = [event for event in run_events(FakeRun(steps=5, epochs=1)) if event["event"] == "step"]
    record = events_record(tmp_path, [event | {"loss": "nan"} for event in events])
    loss = training_panels(record)[0]
    assert (loss.title, loss.curves) == ("Loss", ())
    assert len(loss.non_finite_steps) == 5
    assert loss.x_axis.high == 5


def test_resumes_and_out_of_memory_steps_are_marked(tmp_path):
    marks = panels_of(tmp_path, FakeRun(resume_at=77, ooms=1))["Loss"].marks
    assert {kind for _, kind in marks} == {"resume", "oom"}


def test_devices_and_host_have_curves(tmp_path):
    panels = device_panels(run_record(tmp_path, FakeRun(gpu=True)))
    assert [panel.title for panel in panels] == ["Utilization", "Memory in use", "Power"]
    assert [curve.label for curve in panels[0].curves] == ["gpu 0", "host cpu"]
    assert panels[0].y_axis.high == 100


def test_a_cpu_run_has_no_power_panel(tmp_path):
    panels = device_panels(run_record(tmp_path, FakeRun()))
    assert [panel.title for panel in panels] == ["Utilization", "Memory in use"]


@given(SERIES)
def test_decimation_keeps_order_ends_and_extremes(values):
    points = [(float(index), value) for index, value in enumerate(values)]
    decimated = decimate(points, 100)
    assert len(decimated) <= 160, "a hundred points, and a gap per bucket"
    assert [x for x, _ in decimated] == sorted(x for x, _ in decimated)
    assert (decimated[0][0], decimated[-1][0]) == (0.0, float(len(points) - 1))
    known = [y for y in values if not math.isnan(y)]
    shown = [y for _, y in decimated if not math.isnan(y)]
    if known:
        assert (min(shown), max(shown)) == (min(known), max(known))


@given(st.floats(-1e6, 1e6), st.integers(1, 200))
def test_smoothing_leaves_a_flat_series_flat(level, count):
    flat = smooth([(float(index), level) for index in range(count)])
    assert all(math.isclose(y, level, rel_tol=1e-9, abs_tol=1e-9) for _, y in flat)


def test_a_panel_scales_to_its_curves():
    panel = Panel("x", (PanelCurve("a", [(1.0, 2.0), (9.0, 4.0)]),))
    assert (panel.x_axis.low, panel.x_axis.high) == (1.0, 9.0)
    assert panel.y_axis.low < 2 < 4 < panel.y_axis.high


def test_all_step_charts_of_a_run_share_their_axis(tmp_path):
    record = run_record(tmp_path, FakeRun(gpu=True))
    by_step = [
        panel for panel in (*training_panels(record), *device_panels(record)) if panel.x_label == "step"
    ]
    assert {(panel.x_axis.low, panel.x_axis.high) for panel in by_step} == {(1.0, 120.0)}


def test_a_chart_of_evaluations_needs_a_legend():
    assert Panel("Accuracy", (PanelCurve("validation", [(1.0, 1.0)], "dots", 1),)).needs_legend
    assert not Panel(
        "Loss", (PanelCurve("train, each step", [(1.0, 1.0)], "raw"), PanelCurve("train", [(1.0, 1.0)]))
    ).needs_legend
