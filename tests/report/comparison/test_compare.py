"""Tests of comparisons: which runs are accepted, what differs, and what is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.fake_events import FakeRun
from harness.fakes.fake_run import write_events
from harness.fakes.fake_sweep import write_sweep
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.report.comparison.compare import NOISE_UNKNOWN, compare, loss_agreements
from orchestrator.report.comparison.differences import environment_differences, setting_differences
from orchestrator.report.comparison.runs import MAX_RUNS, read_runs
from orchestrator.types import GIB
from tests.report.comparison.helpers import runs_in, write_named


def test_equal_runs_are_equal_to_the_bit(tmp_path: Path) -> None:
    folders = [write_named(tmp_path / name, FakeRun(steps=40)) for name in ("a", "b")]
    (agreement,) = loss_agreements(runs_in(*folders))
    assert agreement.is_bitwise
    assert agreement.text == "are equal to the bit in all 40 common steps"


def test_the_first_step_that_differs_is_named(tmp_path: Path) -> None:
    folders = [write_named(tmp_path / name, FakeRun(steps=40)) for name in ("a", "b")]
    lines = [json.loads(line) for line in (folders[1] / "events.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    loss = steps[16]["loss"]
    for step in steps[16:]:
        step["loss"] *= 1 + 2e-16 * 4
    (folders[1] / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (agreement,) = loss_agreements(runs_in(*folders))
    assert agreement.first_difference == 17
    assert agreement.losses is not None
    assert agreement.losses[0] == loss != agreement.losses[1]
    assert not agreement.is_bitwise
    assert 0 < agreement.largest < 1e-14


def test_a_loss_that_is_nan_in_both_runs_is_equal(tmp_path: Path) -> None:
    run = FakeRun(steps=20, broken={5: "nan", 7: "inf"})
    folders = [write_named(tmp_path / name, run) for name in ("a", "b")]
    third = write_named(tmp_path / "c", replace(run, broken={7: "inf"}))
    same, other = loss_agreements(runs_in(*folders, third))
    assert same.is_bitwise
    assert other.first_difference == 5
    comparison = compare(runs_in(*folders, third))
    assert "NaN" not in json.dumps(comparison.to_json()["runs"])


def test_a_replayed_step_counts_by_its_last_line(tmp_path: Path) -> None:
    straight = write_named(tmp_path / "a", FakeRun(steps=120))
    resumed = write_named(tmp_path / "b", FakeRun(steps=120, resume_at=77))
    (agreement,) = loss_agreements(runs_in(straight, resumed))
    assert agreement.num_steps == 120


def test_settings_that_differ_are_listed_without_names_and_folders(tmp_path: Path) -> None:
    one = write_named(tmp_path / "a", FakeRun(), optim_learning_rate=0.001, run_seed=0)
    two = write_named(tmp_path / "b", FakeRun(), optim_learning_rate=0.01, run_seed=0)
    (difference,) = setting_differences(runs_in(one, two))
    assert difference.name == "optim.learning_rate"
    assert difference.texts == ("0.001", "0.01")


def test_a_setting_that_one_run_lacks_is_at_its_default(tmp_path: Path) -> None:
    default = Config().optim.weight_decay
    one = write_named(tmp_path / "a", FakeRun())
    two = write_named(tmp_path / "b", FakeRun(), optim_weight_decay=default)
    three = write_named(tmp_path / "c", FakeRun(), optim_weight_decay=0.75)
    assert setting_differences(runs_in(one, two)) == []
    (difference,) = setting_differences(runs_in(one, three))
    assert difference.values == (default, 0.75)


def test_a_choice_of_the_plan_differs_where_the_setting_is_equal(tmp_path: Path) -> None:
    one = write_named(tmp_path / "a", FakeRun())
    two = write_named(tmp_path / "b", FakeRun())
    plan = json.loads((two / "plan.json").read_text())
    plan["choices"]["precision"]["value"] = "fp16"
    (two / "plan.json").write_text(json.dumps(plan))
    assert [difference.name for difference in setting_differences(runs_in(one, two))] == ["plan: precision"]


def test_hardware_versions_and_commits_that_differ_are_listed(tmp_path: Path) -> None:
    folders = [write_named(tmp_path / name, FakeRun()) for name in ("a", "b")]
    plan = json.loads((folders[1] / "plan.json").read_text())
    plan["hardware"] |= {"torch": "2.14.0", "ram": 16 * GIB}
    plan["hardware"]["commit"] = "f00d"
    (folders[1] / "plan.json").write_text(json.dumps(plan))
    found = {difference.name: difference.texts for difference in environment_differences(runs_in(*folders))}
    assert found == {
        "memory": ("8.0 GiB", "16.0 GiB"),
        "torch": ("2.13.0", "2.14.0"),
        "commit": ("–", "f00d"),
    }


def test_a_run_that_goes_on_is_judged_at_the_last_common_evaluation(tmp_path: Path) -> None:
    done = write_named(tmp_path / "a", FakeRun(steps=120, epochs=4))
    going = write_named(tmp_path / "b", FakeRun(steps=60, epochs=2, ends="killed"))
    comparison = compare(runs_in(done, going))
    assert comparison.judged_at == "step 60"
    losses = next(figure for figure in comparison.figures if figure.name == "validation loss")
    record = comparison.runs[0].record
    (evaluation,) = [event for event in record.evaluations if event.step == 60]
    assert losses.values[0] == evaluation.loss != record.evaluations[-1].loss
    assert comparison.notes[0].startswith("b: unfinished")


def test_complete_runs_are_judged_by_their_final_weights(tmp_path: Path) -> None:
    folders = [write_named(tmp_path / name, FakeRun(steps=steps)) for name, steps in (("a", 40), ("b", 80))]
    comparison = compare(runs_in(*folders))
    assert comparison.judged_at == "final weights"
    assert comparison.notes == ["The runs trained different numbers of steps: a 40, b 80."]


@pytest.mark.parametrize(
    ("losses", "outcome", "headline"),
    [
        ((4.7, 1.0), "far ahead", "b is far ahead in validation loss"),
        ((1.04, 1.0), "ahead", "b is ahead in validation loss, perhaps by chance"),
        # Both learnt nearly all there is to learn.
        ((0.09, 0.04), "ahead", "b is ahead in validation loss, perhaps by chance"),
        ((1.0, 1.0), "equal", "The same validation loss in all runs"),
    ],
)
def test_a_plain_word_tells_far_from_near(
    tmp_path: Path, losses: tuple[float, float], outcome: str, headline: str
) -> None:
    folders = []
    for name, loss in zip("ab", losses, strict=True):
        folder = write_named(tmp_path / name, FakeRun(steps=40), optim_schedule=name)
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        for event in events:
            if event["event"] == "evaluate":
                event["loss"] = loss
            if event["event"] == "step" and event["step"] == 1:
                event["loss"] = 6.0
        write_events(folder, events)
        folders.append(folder)
    comparison = compare(runs_in(*folders))
    assert comparison.verdicts[0].outcome == outcome
    assert comparison.headline == headline
    assert comparison.notes.count(NOISE_UNKNOWN) == (len({*losses}) > 1)


def test_runs_of_different_tasks_are_refused(tmp_path: Path) -> None:
    one = write_named(tmp_path / "a", FakeRun())
    two = write_named(tmp_path / "b", FakeRun())
    text = (two / "events.jsonl").read_text().replace('"task": "digits"', '"task": "text"')
    (two / "events.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"a trains digits, .*b trains text: losses and metrics of different"):
        runs_in(one, two)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    run = write_named(tmp_path / "a", FakeRun())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty holds no events\.jsonl"):
        runs_in(run, tmp_path / "empty")
    with pytest.raises(UserError, match="none does not exist"):
        runs_in(run, tmp_path / "none")
    with pytest.raises(UserError, match="sweep is the folder of a sweep"):
        runs_in(run, write_sweep(tmp_path / "sweep"))


def test_a_run_given_twice_and_too_many_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a was given twice"):
        runs_in(tmp_path / "a", tmp_path / "a")
    with pytest.raises(UserError, match=f"at most {MAX_RUNS}"):
        runs_in(*(tmp_path / str(number) for number in range(MAX_RUNS + 1)))


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    one = write_named(tmp_path / "x" / "same", FakeRun())
    two = write_named(tmp_path / "y" / "same", FakeRun())
    assert [run.label for run in runs_in(one, two)] == [str(one), str(two)]


def test_a_remote_run_without_a_name_is_called_by_its_address(tmp_path: Path) -> None:
    local = write_named(tmp_path / "copy", FakeRun(), run_name=None)
    other = write_named(tmp_path / "b", FakeRun())
    runs = read_runs([("s3://bucket/runs/far", local), (other, other)])
    assert [run.label for run in runs] == ["far", "b"]
