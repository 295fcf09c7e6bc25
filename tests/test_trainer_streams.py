"""Tests of runs over data that is read in order, through the Python API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from harness.runs.blob_trainers import blobs, events_of, settings, trainer
from harness.runs.records import by_step
from orchestrator import JsonLines
from orchestrator.errors import TrainingFailed, UserError
from orchestrator.record.files.reading import of_kind


def write_rows(file: Path, count: int, bad_row: int | None = None) -> JsonLines:
    """Write rows, of which one may have NaN. Return them as a source."""
    inputs, labels = blobs(count)
    rows = [{"x": x.tolist(), "y": int(y)} for x, y in zip(inputs, labels, strict=True)]
    if bad_row is not None:
        rows[bad_row]["x"][2] = float("nan")
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return JsonLines(file, transform=as_sample)


def as_sample(row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return torch.tensor(row["x"]), row["y"]


@pytest.mark.parametrize("buffer", [0, 24])
def test_a_stream_resumes_at_the_exact_sample_with_the_same_losses(tmp_path: Path, buffer: int) -> None:
    """Inside an epoch whose length is not known, with a short last batch."""
    source = write_rows(tmp_path / "rows.jsonl", 70)
    options: dict[str, Any] = {
        "global_batch_size": 16,
        "checkpoint_every": 1,
        "shuffle_buffer": buffer,
        "schedule": "constant",
        "resume": "auto",
        "warmup_steps": 0,
    }

    def run(name: str, **given: Any) -> list[float]:
        torch.manual_seed(0)
        config = settings(tmp_path / name, **options, **given)
        trainer(config, source, model=nn.Linear(4, 3), validation=source).fit()
        return [event["loss"] for event in by_step(events_of(tmp_path / name))]

    expected = run("whole")
    assert len(expected) == 15
    for steps in (3, 5, 7):
        run("parts", max_steps=steps)
    assert run("parts", max_steps=100) == expected


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_of_torch_trains_and_resumes_at_the_exact_sample(tmp_path: Path, shuffle: bool) -> None:
    """Its batch size is the default, and its shuffling is that of the run."""
    data = TensorDataset(*blobs(70))

    def run(name: str, **given: Any) -> list[float]:
        torch.manual_seed(0)
        loader = DataLoader(data, batch_size=20, shuffle=shuffle, drop_last=True)
        next(iter(loader))
        options = {"checkpoint_every": 1, "resume": "auto", "schedule": "constant", "warmup_steps": 0}
        config = settings(tmp_path / name, batch_size=None, **options, **given)
        trainer(config, loader, model=nn.Linear(4, 3), validation=DataLoader(data, batch_size=9)).fit()
        return [event["loss"] for event in by_step(events_of(tmp_path / name))]

    expected = run("whole")
    assert len(expected) == 12
    events = events_of(tmp_path / "whole")
    notes = [event["message"] for event in of_kind(events, "warning") if event["kind"] == "data"]
    assert len(notes) == 1
    assert "in spite of drop_last" in notes[0]
    assert ("its shuffling is replaced" in notes[0]) == shuffle
    assert {event["samples"] for event in of_kind(events, "evaluate")} == {70}
    for steps in (3, 5):
        run("parts", max_steps=steps)
    assert run("parts", max_steps=100) == expected


def test_an_empty_stream_and_a_bad_line_are_the_users_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n")
    with pytest.raises(UserError, match="data is empty"):
        trainer(settings(tmp_path), JsonLines(file)).fit()
    source = write_rows(file, 70)
    file.write_text(file.read_text() + '{"x": [0.0\n')
    with pytest.raises(UserError, match=r"rows.jsonl, line 71 is not JSON"):
        trainer(settings(tmp_path), source).fit()


def test_a_bad_number_in_a_stream_is_named_by_its_line(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 70, bad_row=40)
    with pytest.raises(TrainingFailed, match=r"rows.jsonl, line 41, has NaN in field 0"):
        trainer(settings(tmp_path, log_every=2, shuffle_buffer=32), source).fit()


@pytest.mark.extended
def test_batches_of_a_stream_are_measured_and_timed(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 7)
    assert trainer(settings(tmp_path), source).bench(iterations=2)[0].batch_size == 16
    assert trainer(settings(tmp_path, batch_size="auto"), source).find_batch_size().batch_size >= 1
