"""Tests of the image file of the experts' hosts."""

import pytest

from harness.fakes.fake_events import FakeRun, run_events
from harness.fakes.fake_evolution import EVOLVING_HOSTS, evolving_record
from harness.fakes.fake_run import events_record, run_record
from orchestrator.report.draw.marks import Group, Text, flat
from orchestrator.report.run.hosts_plot import hosts_picture
from orchestrator.report.run.page import draw_all
from tests.report.run.helpers import check_labels

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


def plots_of(tmp_path, name):
    picture = hosts_picture(run_record(tmp_path, RUNS[name]))
    assert picture is not None
    return [plot for plot in picture.plots if plot is not None]


def texts(plot):
    return [mark.text for mark in flat(plot.marks) if isinstance(mark, Text)]


@pytest.mark.extended
@pytest.mark.parametrize("name", RUNS)
def test_no_label_overlaps_another_or_leaves_the_picture(tmp_path, name):
    check_labels(hosts_picture(run_record(tmp_path, RUNS[name])))


def test_each_expert_is_drawn_on_its_host(tmp_path):
    plot, _ = plots_of(tmp_path, "few")
    assert texts(plot)[:5] == ["4", "0", "3", "1", "2"]
    assert [name for _, name in plot.y_ticks] == ["host 0", "host 1", "host 2"]
    assert (plot.title, plot.unit) == ("Layer 0", "blocks.0.ffn")
    times = texts(plot)[5:]
    assert [time[-1] for time in times] == ["×"] * 3
    assert plot.remark == f"slowest host {max(times)} the mean, predicted 1.41×", (
        "the remark is that of the longest bar"
    )


def test_a_narrow_segment_has_no_number(tmp_path):
    plot = plots_of(tmp_path, "narrow")[0]
    assert sum(isinstance(mark, Group) for mark in plot.marks) == 256
    assert len(texts(plot)) < 110


def test_hosts_without_experts_say_so(tmp_path):
    assert texts(plots_of(tmp_path, "idle hosts")[0]).count("no expert") == 6


def test_many_layers_become_a_map(tmp_path):
    (plot,) = plots_of(tmp_path, "many")
    assert plot.title == "Hosts by layer"
    assert len(texts(plot)) == 24 * 8 + 8
    assert "numbers" in plot.unit
    (plot,) = plots_of(tmp_path / "b", "very many")
    assert "numbers" not in plot.unit


def test_the_picture_is_written_with_the_others(tmp_path):
    written = draw_all(run_record(tmp_path, RUNS["few"]), tmp_path)
    assert [path.name for path in written] == [
        "training_metrics.png",
        "expert_activations.png",
        "expert_device_distribution.png",
    ]


def test_one_host_or_no_placement_gives_no_picture(tmp_path):
    assert hosts_picture(run_record(tmp_path / "a", FakeRun(hosted=True, workers=1, experts=4))) is None
    assert hosts_picture(run_record(tmp_path / "b", FakeRun(experts=4))) is None


def test_rows_of_experts_without_a_host_are_shown(tmp_path):
    events = [
        event | {"loads": [[1] * 10] * 2} if event["event"] == "load" else event
        for event in run_events(RUNS["few"])
    ]
    picture = hosts_picture(events_record(tmp_path, events))
    assert picture is not None
    assert picture.keys[-1].text == "50.0% of the rows went to experts without a known host"


def test_without_loads_the_prediction_is_drawn(tmp_path):
    for name, text in (("few", "predicted 1.41×"), ("many", "predicted 1.01×")):
        events = [event for event in run_events(RUNS[name]) if event["event"] != "load"]
        picture = hosts_picture(events_record(tmp_path / name, events))
        assert picture is not None
        assert text in [plot.remark for plot in picture.plots if plot is not None]
        assert [key.text for key in picture.keys if key.color is not None] == ["predicted"]


def test_a_copied_expert_is_drawn_on_each_of_its_hosts(tmp_path):
    picture = hosts_picture(evolving_record(tmp_path, EVOLVING_HOSTS))
    assert picture is not None
    drawn = [text for text in texts(picture.plots[0]) if "×" not in text]
    assert sorted(drawn) == ["2", "2", "4", "5"]
    assert "predicted" not in [key.text for key in picture.keys]
