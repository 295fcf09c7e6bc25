"""Runs of ``StreamedDigits`` that are killed and resumed on other numbers of workers, and their checks."""

from __future__ import annotations

import shlex
from pathlib import Path

from harness.faults.fault_schedule import FaultFolder
from harness.faults.run_checks import check_sample_counts, check_steps, samples_by_step
from harness.runs.cli_runs import read_summary
from harness.runs.streamed_task import streamed_steps, write_digits
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import read_events

SAMPLES = 500
GLOBAL_BATCH = 96
_EPOCHS = 4
_STEPS = 24
"""Of which every sixth is short: 20 samples."""


def streamed_flags(file: Path, buffer: int) -> list[str]:
    """Write the data, and return the flags of a run that reads it in order."""
    write_digits(file, SAMPLES)
    return shlex.split(
        f"--task harness.runs.streamed_task:StreamedDigits --data-dir {file} --shuffle-buffer {buffer} "
        f"--epochs {_EPOCHS} --evaluate-every 1000"
    )


def check_streamed(run_dir: Path, file: Path, buffer: int, unrecorded: int = 0) -> list[Event]:
    """Assert that the run saw the samples of one process in each step. Return its events.

    A single process records no samples: there are none of the first ``unrecorded`` steps."""
    events = read_events(run_dir / "events.jsonl")
    assert read_summary(run_dir)["reason"] == f"{_EPOCHS} epochs done"
    assert check_steps(events, _STEPS) == []
    assert check_sample_counts(events, SAMPLES) == []
    expected = streamed_steps(file, GLOBAL_BATCH, _EPOCHS, buffer)
    seen = samples_by_step(events, FaultFolder.of_run(run_dir))
    assert {step: sorted(ids) for step, ids in seen.items()} == {
        number: sorted(ids) for number, ids in enumerate(expected, 1) if number > unrecorded
    }
    return events
