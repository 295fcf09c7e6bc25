"""Tests of verdicts: a difference counts only beyond the noise of repeated seeds."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
from scipy import stats

from harness.fakes.fake_events import FakeRun
from orchestrator.report.comparison.compare import compare
from orchestrator.report.comparison.figures import Figure
from orchestrator.report.comparison.runs import ComparedRun
from orchestrator.report.comparison.verdicts import Verdict, groups
from orchestrator.types import bytes_text
from tests.report.comparison.helpers import runs_in, set_accuracy, write_named


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
    assert verdict.outcome == "ahead"
    assert verdict.best == "0.1-0"
    assert "noise" not in verdict.text, "the comparison says once that it is unknown"


def test_one_seed_repeated_says_nothing_about_the_noise_of_quality(tmp_path: Path) -> None:
    runs = runs_with(tmp_path, {0.1: [0.9, 0.9], 0.2: [0.8, 0.8]}, seeds=False)
    assert accuracy_verdict(runs).outcome == "ahead"


def test_equal_results_are_equal(tmp_path: Path) -> None:
    assert accuracy_verdict(runs_with(tmp_path, {0.1: [0.9], 0.2: [0.9]})).outcome == "equal"


def test_results_that_are_shown_alike_are_equal(tmp_path: Path) -> None:
    runs = runs_with(tmp_path, {0.1: [0.900001], 0.2: [0.900002], 0.3: [0.9]})
    verdict = accuracy_verdict(runs)
    assert (verdict.outcome, verdict.best) == ("equal", "")
    assert verdict.text == "equal in all runs: 0.9"


@pytest.mark.parametrize(
    ("other", "best"),
    [
        (340.61, None),  # of as many MiB: the same text, and less than 0.05 % away
        (341.0, 340.6),
        (340.648, None),
    ],
)
def test_memory_that_is_shown_alike_has_no_best_run(other: float, best: float | None) -> None:
    figure = Figure("peak memory", (340.6 * 2**20, other * 2**20), "min", bytes_text)
    assert figure.best == (None if best is None else best * 2**20)


def test_values_that_only_their_text_makes_equal_are_compared() -> None:
    """1.46 and 1.54 GiB are both shown as 1.5 GiB, and are 5 % apart."""
    figure = Figure("peak memory", (1.46 * 2**30, 1.54 * 2**30), "min", bytes_text)
    assert figure.best == 1.46 * 2**30


def test_seeds_of_one_setting_have_mean_and_deviation(tmp_path: Path) -> None:
    values = [0.90, 0.91, 0.95]
    verdict = accuracy_verdict(runs_with(tmp_path, {0.1: values}))
    assert verdict.outcome == "one setting"
    assert f"{statistics.stdev(values):.4g}" in verdict.text


@pytest.mark.parametrize("gap", [0.01, 0.02, 0.025, 0.03, 0.05])
def test_two_groups_are_judged_like_students_t_test(tmp_path: Path, gap: float) -> None:
    one = [0.90, 0.91, 0.92]
    two = [value - gap for value in (0.895, 0.92, 0.91, 0.905)]
    _, probability = tuple(stats.ttest_ind(one, two))
    expected = float(probability) < 0.05
    assert (accuracy_verdict(runs_with(tmp_path, {0.1: one, 0.2: two})).outcome == "better") == expected


@pytest.mark.parametrize("num_groups", [2, 3, 5])
def test_the_margin_is_students_divided_among_all_pairs_of_settings(tmp_path: Path, num_groups: int) -> None:
    """The best of many settings looks good by chance, so that a larger field needs a larger difference."""
    values = {0.1 + number: [0.5 - 0.1 * number, 0.52 - 0.1 * number] for number in range(num_groups)}
    verdict = accuracy_verdict(runs_with(tmp_path, values))
    deviation = statistics.stdev([0.5, 0.52])
    num_pairs = num_groups * (num_groups - 1) // 2
    quantile = float(stats.t.ppf(1 - 0.05 / 2 / num_pairs, df=num_groups))
    expected = quantile * deviation * (1 / 2 + 1 / 2) ** 0.5
    (shown,) = re.findall(r"± ([\d.]+),", verdict.text)
    assert float(shown) == pytest.approx(expected, rel=1e-3)
