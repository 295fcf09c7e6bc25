"""Tests of verdicts: a difference counts only beyond the noise of repeated seeds."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from scipy import stats

from orchestrator.report.comparison.compare import compare
from orchestrator.report.comparison.runs import ComparedRun
from orchestrator.report.comparison.verdicts import Verdict, groups
from tests.report.comparison.helpers import runs_in, set_accuracy, write_named
from tests.support.fake_events import FakeRun


def runs_with(folder: Path, accuracies: dict[float, list[float]], seeds: bool = True) -> list[ComparedRun]:
    """Return runs by learning rate, one for each accuracy, each with a seed of its own or all with 0."""
    folders = []
    for rate, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            run = write_named(
                folder / f"{rate}-{seed}",
                FakeRun(steps=20, epochs=1),
                optim_learning_rate=rate,
                run_seed=seed if seeds else 0,
            )
            set_accuracy(run, accuracy)
            folders.append(run)
    return runs_in(*folders)


def accuracy_verdict(runs: list[ComparedRun]) -> Verdict:
    found = [verdict for verdict in compare(runs).verdicts if verdict.figure == "validation accuracy"]
    return found[0]


def test_runs_that_differ_in_their_seed_form_a_group(tmp_path: Path) -> None:
    runs = runs_with(tmp_path, {0.1: [0.5, 0.6], 0.2: [0.7]})
    assert [group.places for group in groups(runs)] == [(0, 1), (2,)]
    assert [group.label for group in groups(runs)] == ["0.1-0 (2 runs)", "0.2-0"]


def test_a_large_difference_is_beyond_the_noise(tmp_path: Path) -> None:
    verdict = accuracy_verdict(runs_with(tmp_path, {0.1: [0.90, 0.91, 0.92], 0.2: [0.70, 0.71, 0.72]}))
    assert (verdict.outcome, verdict.best) == ("better", "0.1-0 (3 runs)")
    assert "0.91 against 0.71" in verdict.text


def test_a_small_difference_is_within_the_noise(tmp_path: Path) -> None:
    verdict = accuracy_verdict(runs_with(tmp_path, {0.1: [0.90, 0.95, 0.85], 0.2: [0.91, 0.86, 0.94]}))
    assert verdict.outcome == "within noise"


def test_without_repeats_the_noise_is_unknown(tmp_path: Path) -> None:
    verdict = accuracy_verdict(runs_with(tmp_path, {0.1: [0.9], 0.2: [0.8]}))
    assert verdict.outcome == "noise unknown"
    assert verdict.best == "0.1-0"


def test_one_seed_repeated_says_nothing_about_the_noise_of_quality(tmp_path: Path) -> None:
    runs = runs_with(tmp_path, {0.1: [0.9, 0.9], 0.2: [0.8, 0.8]}, seeds=False)
    assert accuracy_verdict(runs).outcome == "noise unknown"


def test_equal_results_are_equal(tmp_path: Path) -> None:
    assert accuracy_verdict(runs_with(tmp_path, {0.1: [0.9], 0.2: [0.9]})).outcome == "equal"


def test_seeds_of_one_setting_have_mean_and_deviation(tmp_path: Path) -> None:
    values = [0.90, 0.91, 0.95]
    verdict = accuracy_verdict(runs_with(tmp_path, {0.1: values}))
    assert verdict.outcome == "one setting"
    assert f"{statistics.stdev(values):.4g}" in verdict.text


@pytest.mark.parametrize("gap", [0.01, 0.02, 0.025, 0.03, 0.05])
def test_two_groups_are_judged_like_students_t_test(tmp_path: Path, gap: float) -> None:
    one = [0.90, 0.91, 0.92]
    two = [value - gap for value in (0.895, 0.92, 0.91, 0.905)]
    expected = stats.ttest_ind(one, two)[1] < 0.05
    assert (accuracy_verdict(runs_with(tmp_path, {0.1: one, 0.2: two})).outcome == "better") == expected


def test_a_larger_field_needs_a_larger_difference(tmp_path: Path) -> None:
    """The best of many settings looks good by chance: 0.2 beats 0.1 alone, not among eight."""
    two = {0.1: [0.90, 0.91], 0.2: [0.945, 0.95]}
    many = two | {0.3 + number: [0.90 + 0.002 * number, 0.895] for number in range(6)}
    alone = accuracy_verdict(runs_with(tmp_path / "two", two))
    among = accuracy_verdict(runs_with(tmp_path / "many", many))
    assert alone.outcome == "better"
    assert "first of 8 settings" in among.text
