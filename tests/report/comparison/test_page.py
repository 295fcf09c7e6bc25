"""Tests of the page and the data of a comparison."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.fake_events import FakeRun
from orchestrator.report.comparison.compare import compare
from orchestrator.report.comparison.curves import panels_by_step, panels_by_time
from orchestrator.report.comparison.page import comparison_page, write_comparison
from tests.report.comparison.helpers import runs_in, write_named
from tests.report.test_escaping import Tags


def test_all_runs_are_on_common_axes(tmp_path: Path) -> None:
    one = write_named(tmp_path / "a", FakeRun(steps=120))
    two = write_named(tmp_path / "b", FakeRun(steps=40, step_s=0.2))
    for panels in (panels_by_step(runs_in(one, two)), panels_by_time(runs_in(one, two))):
        titles = [panel.title for panel in panels]
        assert titles[:3] == ["Training loss", "Validation loss", "Validation accuracy"]
        assert titles[-1] == "Throughput"
        assert len({(panel.x_axis.low, panel.x_axis.high) for panel in panels}) == 1
        assert all([curve.label for curve in panel.curves] == ["a", "b"] for panel in panels)


def test_time_leaves_out_the_pause_between_sessions(tmp_path: Path) -> None:
    run = FakeRun(steps=120, resume_at=77)
    one = write_named(tmp_path / "a", run)
    runs = runs_in(one, write_named(tmp_path / "b", run))
    seconds = runs[0].record.seconds
    assert seconds is not None
    (loss, *_) = panels_by_time(runs)
    xs = [x for x, _ in loss.curves[0].points]
    assert xs == sorted(xs)
    assert xs[-1] <= seconds


def test_the_page_names_differences_verdicts_and_recoveries(tmp_path: Path) -> None:
    one = write_named(tmp_path / "a", FakeRun(workers=3), optim_learning_rate=0.1)
    two = write_named(tmp_path / "b", FakeRun(workers=3, recover_at=60, seed=1), optim_learning_rate=0.2)
    text = comparison_page(compare(runs_in(one, two)))
    assert "optim.learning_rate" in text
    assert text.count("noise is unknown") == 1
    assert text.index("<h2>By step") < text.index("<h2>Verdicts") < text.index("<h2>By time")
    assert ">recovery</span>" in text
    assert "By time" in text


@pytest.mark.parametrize("count", [2, 7, 18])
def test_every_run_has_a_look_of_its_own(tmp_path: Path, count: int) -> None:
    run = FakeRun(steps=10, epochs=1)
    folders = [write_named(tmp_path / f"r{number}", replace(run, seed=number)) for number in range(count)]
    text = comparison_page(compare(runs_in(*folders)))
    looks = set(re.findall(r'<span class="(key(?: dashed)?)" style="([^"]*)"', text))
    assert len(looks) == count


def test_hostile_names_and_settings_stay_text(tmp_path: Path) -> None:
    evil = "</td></script><script>alert(1)</script><img src=//evil.example onerror=alert(1)>"
    folders = [
        write_named(
            tmp_path / str(seed), FakeRun(steps=10, epochs=1, ends="failed"), run_name=f"{evil}{seed}"
        )
        for seed in range(2)
    ]
    tags = Tags(comparison_page(compare(runs_in(*folders))))
    assert (tags.scripts, tags.handlers, tags.addresses) == (1, 0, [])


def test_the_data_is_json_with_the_same_figures(tmp_path: Path) -> None:
    one = write_named(tmp_path / "a", FakeRun(steps=20, epochs=1))
    two = write_named(tmp_path / "b", FakeRun(steps=20, epochs=1, broken={3: "nan"}))
    comparison = compare(runs_in(one, two))
    data, page = write_comparison(comparison, tmp_path / "out")
    content = json.loads(data.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert page.name == "comparison.html"
    assert [run["label"] for run in content["runs"]] == ["a", "b"]
    assert content["losses"][0]["first_difference"] == 3
    assert content["losses"][0]["bitwise"] is False
    values = {result["name"]: result["values"] for result in content["results"]}
    assert values["samples/s"] == list(next(f for f in comparison.figures if f.name == "samples/s").values)


def test_a_run_without_a_step_is_compared(tmp_path: Path) -> None:
    one = write_named(tmp_path / "a", FakeRun(steps=20, epochs=1))
    two = write_named(tmp_path / "b", FakeRun(steps=0, ends="failed"))
    comparison = compare(runs_in(one, two))
    assert comparison.losses[0].text == "have no common step"
    assert "Training loss" in comparison_page(comparison)
