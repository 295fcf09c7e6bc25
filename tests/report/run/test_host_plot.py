"""Tests of the image file of the experts' hosts."""

from itertools import combinations

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_evolution import EVOLVING_HOSTS, evolving_record
from harness.fakes.fake_run import events_record, run_record
from orchestrator.report.run.host_plot import hosts_figure
from orchestrator.report.run.plots import draw_all

RUNS = {
    "few": FakeRun(hosted=True, workers=3, experts=5, layers=2),
    "mixed": FakeRun(hosted=True, workers=3, experts=12, layers=3, speeds=(1.0, 2.0, 4.0), skew=1.5),
    "narrow": FakeRun(hosted=True, workers=2, experts=256, layers=2, steps=20),
    "idle hosts": FakeRun(hosted=True, workers=8, experts=2, layers=1, steps=20),
    "many": FakeRun(hosted=True, workers=8, experts=64, layers=24, steps=40),
    "very many": FakeRun(hosted=True, workers=80, experts=128, layers=50, steps=20, speeds=(1.0, 1.5)),
    "hostile": FakeRun(
        hosted=True, workers=2, experts=4, layers=1, steps=20, name=r"$\frac{ <b>&" + "n" * 200
    ),
}


def figure_of(tmp_path, name):
    figure = hosts_figure(run_record(tmp_path, RUNS[name]))
    assert figure is not None
    return figure


@pytest.mark.parametrize("name", RUNS)
def test_no_label_overlaps_another_or_leaves_the_picture(tmp_path, name):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = figure_of(tmp_path, name)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes in figure.axes:
        written = [
            *axes.texts,
            *axes.get_xticklabels(),
            *axes.get_yticklabels(),
            axes.xaxis.label,
            axes._left_title,  # pyrefly: ignore[missing-attribute]
            axes._right_title,  # pyrefly: ignore[missing-attribute]
        ]
        boxes = [
            (text.get_text(), text.get_window_extent(canvas.get_renderer()))
            for text in written
            if text.get_text()
        ]
        boxes = [(text, box) for text, box in boxes if box.width and box.height]
        touching = [(a, b) for (a, box_a), (b, box_b) in combinations(boxes, 2) if box_a.overlaps(box_b)]
        assert not touching
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for _, box in boxes)


def test_each_expert_is_drawn_on_its_host(tmp_path):
    left, right, *_ = figure_of(tmp_path, "few").axes
    assert [text.get_text() for text in left.texts] == ["4", "0", "3", "1", "2"]
    assert [text.get_text() for text in left.get_yticklabels()] == ["host 0", "host 1", "host 2"]
    assert left.get_title(loc="left") == "Layer 0  blocks.0.ffn"
    times = [text.get_text() for text in right.texts]
    assert [time[-1] for time in times] == ["×"] * 3
    assert right.get_title(loc="left") == f"slowest host {max(times)} the mean, predicted 1.41×", (
        "the title is that of the longest bar"
    )


def test_a_narrow_segment_has_no_number(tmp_path):
    left = figure_of(tmp_path, "narrow").axes[0]
    assert len(left.patches) == 256
    assert len(left.texts) < 100


def test_hosts_without_experts_say_so(tmp_path):
    left = figure_of(tmp_path, "idle hosts").axes[0]
    assert [text.get_text() for text in left.texts].count("no expert") == 6


def test_many_layers_become_a_map(tmp_path):
    cells, totals, *_ = figure_of(tmp_path, "many").axes
    assert cells.get_title(loc="left") == "Hosts and layers  (numbers are experts held)"
    assert len(cells.texts) == 24 * 8
    assert totals.get_title(loc="left") == "All layers"
    assert "numbers" not in figure_of(tmp_path / "b", "very many").axes[0].get_title(loc="left")


def test_the_picture_is_written_with_the_others(tmp_path):
    written = draw_all(run_record(tmp_path, RUNS["few"]), tmp_path)
    assert [path.name for path in written] == [
        "training_metrics.png",
        "expert_activations.png",
        "expert_device_distribution.png",
    ]


def test_one_host_or_no_placement_gives_no_picture(tmp_path):
    assert hosts_figure(run_record(tmp_path / "a", FakeRun(hosted=True, workers=1, experts=4))) is None
    assert hosts_figure(run_record(tmp_path / "b", FakeRun(experts=4))) is None


def test_rows_of_experts_without_a_host_are_shown(tmp_path):
    events = [
        event | {"loads": [[1] * 10] * 2} if event["event"] == "load" else event
        for event in run_events(RUNS["few"])
    ]
    figure = hosts_figure(events_record(tmp_path, events))
    assert figure is not None
    assert figure.axes[-1].get_xlabel().endswith("50.0% of the rows went to experts without a known host")


def test_without_loads_the_prediction_is_drawn(tmp_path):
    for name, title in (("few", "predicted 1.41×"), ("many", "predicted 1.01×")):
        events = [event for event in run_events(RUNS[name]) if event["event"] != "load"]
        figure = hosts_figure(events_record(tmp_path / name, events))
        assert figure is not None
        assert title in [axes.get_title(loc=side) for axes in figure.axes for side in ("left", "right")]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["predicted"]


def test_a_copied_expert_is_drawn_on_each_of_its_hosts(tmp_path):
    figure = hosts_figure(evolving_record(tmp_path, EVOLVING_HOSTS))
    assert figure is not None
    drawn = sorted(text.get_text() for text in figure.axes[0].texts)
    assert drawn == ["2", "2", "4", "5"]
    assert "predicted" not in [text.get_text() for text in figure.legends[0].get_texts()]
