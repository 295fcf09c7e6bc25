"""Tests of ``train --tuned``: the best fitting trial of a sweep, flags that win over it, and
ledgers that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.tuned import tuned
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.files.ledger import Ledger, TrialRow

DEFAULTS = Resolved(Config(), {})
HEADER: dict[str, Any] = {
    "task": "digits",
    "kind": "cpu",
    "cores_per_worker": 1,
    "settings": {"width": 8},
    "objective": "throughput",
}
ROWS = tuple(
    TrialRow(
        number,
        {"batch_size": 8 * number},
        "completed",
        workers=workers,
        samples_per_second=float(workers),
        interval=0.02,
    )
    for number, workers in enumerate((1, 2, 8), 1)
)


def write_ledger(folder: Path, *rows: TrialRow, **header: Any) -> Path:
    folder.mkdir()
    ledger = Ledger(folder)
    ledger.begin(HEADER | header)
    for row in rows:
        ledger.add(row)
    ledger.close()
    return folder


def used(config: Config) -> tuple[Any, Any, Any]:
    return config.parallel.workers, config.batch.batch_size, config.model.width


@pytest.mark.parametrize(("num_devices", "expected"), [(1, (1, 8, 8)), (4, (2, 16, 8)), (8, (8, 24, 8))])
def test_the_best_trial_that_fits_the_devices_is_taken(
    tmp_path: Path, num_devices: int, expected: tuple[int, int, int]
) -> None:
    folder = write_ledger(tmp_path / "s", *ROWS)
    resolved, message = tuned(folder, DEFAULTS, lambda _: ("cpu", num_devices))
    assert used(resolved.config) == expected
    assert "settings of trial" in message


def test_flags_win_over_the_trial(tmp_path: Path) -> None:
    folder = write_ledger(tmp_path / "s", *ROWS)
    flags = Resolved(Config.of(workers=2, width=32), {"workers": "flag --workers", "width": "flag --width"})
    resolved, message = tuned(folder, flags, lambda _: ("cpu", 8))
    assert used(resolved.config) == (2, 16, 32)
    assert resolved.origins["batch_size"] == "sweep s, trial 2"
    assert "passed over trial 3 (8 samples/s): it has 8 workers, and --workers 2 was asked for" in message
    assert "your flags won, so it is not the trial that was measured: --width 32 over 8" in message


def test_the_message_names_better_trials_and_overruled_settings(tmp_path: Path) -> None:
    folder = write_ledger(tmp_path / "s", *ROWS)
    origins = {"batch_size": "file x.yaml:3", "width": "file x.yaml:4"}
    resolved, message = tuned(
        folder, Resolved(Config.of(batch_size=2, width=8), origins), lambda _: ("cpu", 1)
    )
    assert resolved.config.batch.batch_size == 8
    assert message.splitlines()[1:] == [
        "passed over trial 3 (8 samples/s): it has 8 workers, and 1 device is here",
        "settings of your file gave way: batch_size 2 (file x.yaml:3) to 8; give them as flags to keep them",
    ]
    _, message = tuned(folder, DEFAULTS, lambda _: ("cpu", 8))
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("resolved", "devices", "reason"),
    [
        (
            Resolved(Config.of(task="text"), {"task": "file c.yaml:1"}),
            ("cpu", 8),
            "is a sweep of digits, and text is to be trained",
        ),
        (DEFAULTS, ("gpu", 8), "was swept on cpus, and this run has gpus"),
        (Resolved(Config.of(workers=3), {"workers": "flag --workers"}), ("cpu", 8), "none fits --workers 3"),
        (DEFAULTS, ("cpu", 0), "none fits 0 devices"),
    ],
)
def test_a_sweep_that_does_not_compare_is_refused(
    tmp_path: Path, resolved: Resolved, devices: tuple[str, int], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        tuned(write_ledger(tmp_path / "s", *ROWS), resolved, lambda _: devices)


def test_a_sweep_over_a_python_object_is_refused(tmp_path: Path) -> None:
    folder = write_ledger(tmp_path / "own", *ROWS, task="python:Net")
    with pytest.raises(UserError, match="swept in Python"):
        tuned(folder, DEFAULTS, lambda _: ("cpu", 8))


@pytest.mark.parametrize("name", ["data_dir", "placement"])
def test_a_masked_setting_must_be_given_again(tmp_path: Path, name: str) -> None:
    """The first is masked in the settings of the sweep, the second in the point of the trial."""
    if name == "data_dir":
        folder = write_ledger(tmp_path / "s", *ROWS, settings={"data_dir": "/data/***", "width": 8})
    else:
        row = TrialRow(1, {"placement": "***.json"}, "completed", workers=1, samples_per_second=1.0)
        folder = write_ledger(tmp_path / "s", row)
    flag = f"--{name.replace('_', '-')}"
    message = f"keeps {name} without the secret in it; give it again, as {flag} VALUE"
    with pytest.raises(UserError, match=message):
        tuned(folder, DEFAULTS, lambda _: ("cpu", 8))
    given = Resolved(Config.of(**{name: "mine.json"}), {name: f"flag {flag}"})
    resolved, _ = tuned(folder, given, lambda _: ("cpu", 8))
    assert "mine.json" in (str(resolved.config.data.data_dir), resolved.config.parallel.placement)


def trial(number: int, speed: float, interval: float | None, **more: Any) -> TrialRow:
    point = {"batch_size": 8 * number}
    return TrialRow(number, point, "completed", samples_per_second=speed, interval=interval, **more)


def test_a_tie_within_the_interval_is_told(tmp_path: Path) -> None:
    rows = (trial(1, 978.0, 0.27), trial(2, 1309.0, 0.17), trial(3, 300.0, 0.1))
    folder = write_ledger(tmp_path / "s", *rows)
    resolved, message = tuned(folder, DEFAULTS, lambda _: ("cpu", 1))
    assert resolved.config.batch.batch_size == 16
    (note,) = message.splitlines()[1:]
    assert note.startswith(
        "a tie: the intervals of trial 2 (1,309 ± 17.0% samples/s) and of trial 1 (978 ± 27.0%)"
    )
    apart = write_ledger(tmp_path / "apart", trial(1, 978.0, 0.02), trial(2, 1309.0, 0.02))
    assert len(tuned(apart, DEFAULTS, lambda _: ("cpu", 1))[1].splitlines()) == 1


def test_ties_are_those_of_the_trials_that_fit(tmp_path: Path) -> None:
    rows = (trial(1, 100.0, 0.1), trial(2, 105.0, 0.1), trial(3, 900.0, 0.01, workers=8))
    message = tuned(write_ledger(tmp_path / "s", *rows), DEFAULTS, lambda _: ("cpu", 1))[1]
    assert "passed over trial 3" in message
    assert "a tie: the intervals of trial 2" in message


def test_a_sweep_by_a_metric_is_taken_by_its_direction(tmp_path: Path) -> None:
    rows = (trial(1, 9.0, 0.1, metrics={"churn": 0.5}), trial(2, 5.0, 0.1, metrics={"churn": 0.2}))
    folder = write_ledger(tmp_path / "s", *rows, objective="churn:min")
    resolved, message = tuned(folder, DEFAULTS, lambda _: ("cpu", 1))
    assert resolved.config.batch.batch_size == 16
    assert message == f"settings of trial 2 of {folder}: --batch-size 16 (churn 0.2)"
