"""Tests of a trial's leader and of its workers' checks, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.config.settings import Config
from orchestrator.config.sweep.space import Point
from orchestrator.errors import OutOfMemory, UserError
from orchestrator.measure.trial import TrialResult
from orchestrator.record.files.ledger import TrialRow
from orchestrator.runtime.sweep.trial import SweepTrial, TrialFailure, _worker_failure, add_measurement
from orchestrator.runtime.sweep.trial_worker import check_batch, trial_threads


def test_workers_are_replaced_after_a_number_of_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that failed or were stopped early have left sockets open too, and count."""
    killed_after: list[int] = []
    trial = object.__new__(SweepTrial)
    group = SimpleNamespace(kill=lambda: killed_after.append(trial._num_trials))
    monkeypatch.setattr(trial, "_num_trials", 0, raising=False)
    monkeypatch.setattr(trial, "_group", group, raising=False)
    for number in range(1, 100):
        assert trial.reset_config({"trial": number, "point": {}, "workers": 1})
    assert killed_after == [40, 80]


class _LosingGroup:
    """Workers of a trial of four slices, of which some calls lose a process."""

    def __init__(self, *lost: int) -> None:
        self._lost = lost
        self._num_calls = 0
        self.is_running = False
        self.opened: list[int] = []
        """Slices that each start of the workers has run."""

    def open(self, point: Point) -> None:
        self.is_running = True
        self.opened.append(0)

    def run_part(self, part: float) -> tuple[TrialResult, dict[str, Any]]:
        self._num_calls += 1
        if self._num_calls in self._lost:
            self.is_running = False
            raise TrialFailure("failed", "worker 1 was lost", is_lost=True)
        self.opened[-1] += 1
        return TrialResult(self.opened[-1] == 4, 100.0, 0.02, 100.0, 0.1, 3, 0.3, 0, {}, 1.0), {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("lost", "opened", "status", "retries"),
    [
        ((), [4], "completed", None),
        ((3,), [2, 4], "completed", 1),
        ((1, 2), [0, 0, 4], "completed", 2),
        ((4, 6, 10), [3, 1, 3], "failed", 2),
    ],
)
def test_a_trial_whose_process_was_lost_is_tried_again(
    lost: tuple[int, ...], opened: list[int], status: str, retries: int | None
) -> None:
    """Slices that were lost are run again, so that ASHA compares trials of the same length."""
    trial = object.__new__(SweepTrial)
    group = _LosingGroup(*lost)
    trial._group = cast(Any, group)
    trial._trial_setup = cast(Any, SimpleNamespace(slices=4, objective="throughput"))
    trial._begin({"trial": 1, "point": {"batch_size": 8}, "workers": 2})
    reports = [trial.step()]
    while not reports[-1]["done"]:
        reports.append(trial.step())
    row = reports[-1]["row"]
    assert (row["status"], row["retries"]) == (status, retries)
    assert group.opened == opened
    if status == "failed":
        assert row["reason"] == "worker 1 was lost (3 tries)"


def test_a_failure_of_the_trial_itself_is_not_repeated() -> None:
    trial = object.__new__(SweepTrial)
    calls: list[Point] = []

    def refuse(point: Point) -> None:
        calls.append(point)
        raise TrialFailure("failed", "ValueError: broken")

    trial._group = cast(Any, SimpleNamespace(open=refuse, is_running=False))
    trial._trial_setup = cast(Any, SimpleNamespace(slices=1, objective="throughput"))
    trial._begin({"trial": 1, "point": {}, "workers": 1})
    row = trial.step()["row"]
    assert (row["status"], row["reason"], row["retries"]) == ("failed", "ValueError: broken", None)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("omp_threads", "threads"), [(None, 4), (1, 1), (3, 3), (64, 4)], ids=["not set", "1", "3", "too many"]
)
def test_trials_have_the_threads_that_the_user_sets(omp_threads: int | None, threads: int) -> None:
    setup = cast(Any, SimpleNamespace(inventory=SimpleNamespace(omp_threads=omp_threads), cores=4))
    chosen = trial_threads(setup)
    assert chosen.value == threads
    assert ("OMP_NUM_THREADS" in chosen.reason) == (threads < 4)


@pytest.mark.parametrize(("interval", "expected"), [(float("inf"), None), (0.02, 0.02)])
def test_a_single_block_of_steps_has_no_interval(interval: float, expected: float | None) -> None:
    result = TrialResult(True, 100.0, interval, 100.0, 0.1, 3, 0.3, 0, {}, 1.0)
    assert add_measurement(TrialRow(1, {}, "completed"), result, {}).interval == expected


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (OutOfMemory("out of memory at batch 8\nmore"), "out_of_memory", "out of memory at batch 8"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "out_of_memory", "CUDA out of memory."),
        (UserError("top_k is 5"), "refused", "top_k is 5"),
        (ValueError("broken\nmore"), "failed", "worker 3: ValueError: broken"),
    ],
)
def test_a_workers_error_becomes_a_status_and_a_line(error: Exception, status: str, reason: str) -> None:
    failure = _worker_failure(3, error)
    assert failure.status == status
    assert failure.reason.startswith(reason)
    assert "\n" not in failure.reason


def test_a_step_of_more_samples_than_the_data_has_is_refused() -> None:
    config = Config.of(batch_size=64, accumulation_steps=4)
    check_batch(config, {"batch_size": 64}, 2, samples=512)
    with pytest.raises(UserError, match=r"a step of 512 samples .* is more than the 511 that the data has"):
        check_batch(config, {"batch_size": 64}, 2, samples=511)
    with pytest.raises(UserError, match=r"1,000 samples \(--global-batch-size\)"):
        check_batch(Config.of(global_batch_size=1000), {"global_batch_size": 1000}, 1, samples=511)


def test_a_step_is_cut_alike_in_all_trials_if_the_sweep_does_not_change_it() -> None:
    config = Config.of(batch_size=64, accumulation_steps=4)
    check_batch(config, {"precision": "fp32"}, 2, samples=511)
