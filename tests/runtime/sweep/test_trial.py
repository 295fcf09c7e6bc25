"""Tests of a trial's leader and of its workers' checks, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from orchestrator.config.settings import Config
from orchestrator.errors import OutOfMemory, UserError
from orchestrator.measure.trial import TrialResult
from orchestrator.record.files.ledger import TrialRow
from orchestrator.runtime.sweep.trial import SweepTrial, _worker_failure, add_measurement
from orchestrator.runtime.sweep.trial_worker import check_batch


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
