"""Samples that cannot be loaded are left out and counted; all others are trained on once, where they were."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.hosts.ranks import run_ranks
from harness.runs.blob_trainers import blobs, settings, trainer
from harness.runs.records import by_step
from orchestrator import JsonLines, ParquetRows
from orchestrator.errors import OrchestratorError, UserError
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.data.steps import Feed
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.loop.loop import Loop
from orchestrator.train.worker.build import WorkerContext, build_training
from tests.train.data.test_stream import CPU, Lonely, samples_of

BAD_ROWS = {0, 3, 8, 9, 10, 11, 31}
"""Row 3 is not JSON; the transform refuses the others. 8 to 11 are all rows of a worker."""
ROWS = 40


def as_number(row: dict[str, int]) -> int:
    if row["number"] in BAD_ROWS:
        raise KeyError("no label")
    return row["number"]


def write_numbers(file: Path) -> JsonLines:
    lines = [json.dumps({"number": number}) for number in range(ROWS)]
    lines[3] = "{"
    file.write_text("\n".join(lines))
    return JsonLines(file, transform=as_number)


def feed_of(data: Any, world: World | None = None, skip_bad: bool = True, **options: Any) -> Feed:
    return open_feed(
        data,
        world or World.single_process(),
        global_batch=12,
        micro_batch=4,
        seed=0,
        loader=LoaderOptions(skip_bad=skip_bad, **options),
    )


def read(feed: Feed, position: int = 0) -> tuple[list[list[int]], list[str]]:
    """The samples of each step from a position on, and the faults of those that were left out."""
    batches = list(feed.steps(0, position))
    return [samples_of(batch) for batch in batches], [fault for batch in batches for fault in batch.faults]


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_bad_rows_are_left_out_and_keep_their_positions(tmp_path: Path, loader_workers: int) -> None:
    source = write_numbers(tmp_path / "a.jsonl")
    good = [number for number in range(ROWS) if number not in BAD_ROWS]
    feed = feed_of(source, loader_workers=loader_workers)
    steps, faults = read(feed)
    feed.close()
    assert steps == [[number for number in good if number // 12 == step] for step in range(4)]
    assert len(faults) == len(BAD_ROWS)
    assert faults[0] == f"{tmp_path}/a.jsonl, line 1: KeyError: 'no label'"
    assert faults[1].startswith(f"{tmp_path}/a.jsonl, line 4 is not JSON")
    rest, _ = read(feed_of(source), 12)
    assert list(chain.from_iterable(rest)) == [number for number in good if number >= 12]


def test_three_workers_leave_out_what_one_leaves_out(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "a.jsonl")
    feeds = [feed_of(source, Lonely(rank, 3, CPU)) for rank in range(3)]
    results = [read(feed) for feed in feeds]
    seen = chain.from_iterable(chain.from_iterable(steps for steps, _ in results))
    assert sorted(seen) == sorted(set(range(ROWS)) - BAD_ROWS)
    assert sum(len(faults) for _, faults in results) == len(BAD_ROWS)


def test_without_the_setting_a_bad_row_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(OrchestratorError, match="no label"):
        read(feed_of(write_numbers(tmp_path / "a.jsonl"), skip_bad=False))


def test_data_without_a_good_sample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n" * 20)
    with pytest.raises(UserError, match=r"none of the first 20 samples can be used.*line 1 is not JSON"):
        read(feed_of(JsonLines(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_a_first_batch_without_a_good_sample_is_left_out(tmp_path: Path, loader_workers: int) -> None:
    """Samples further on serve as dummy samples, and still count where they are."""
    lines = ["{"] * 30 + [str(number) for number in range(30, ROWS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    feed = feed_of(JsonLines(tmp_path / "a.jsonl"), loader_workers=loader_workers)
    steps, faults = read(feed)
    feed.close()
    assert steps == [[], [], list(range(30, 36)), list(range(36, ROWS))]
    assert len(faults) == 30


def test_data_with_random_access_may_begin_with_bad_samples() -> None:
    class Rows:
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> int:
            if index != ROWS - 1:
                raise KeyError("no label")
            return index

    steps, faults = read(feed_of(Rows()))
    assert sorted(chain.from_iterable(steps)) == [ROWS - 1]
    assert len(faults) == ROWS - 1


def test_rows_of_parquet_are_named_by_file_and_row(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    for name, numbers in (("a", range(20)), ("b", range(20, ROWS))):
        table = pyarrow.table({"number": list(numbers)})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=7)
    feed = feed_of(ParquetRows(tmp_path, transform=as_number))
    steps, _ = read(feed)
    assert sorted(chain.from_iterable(steps)) == sorted(set(range(ROWS)) - BAD_ROWS)
    named = feed_of(ParquetRows(tmp_path)).data.name_of(31)  # pyrefly: ignore[missing-attribute]
    assert named == f"{tmp_path}/b.parquet, row 12"


# Whole runs


def write_blobs(file: Path, bad_rows: set[int]) -> JsonLines:
    inputs, labels = blobs(70)
    rows = [{"x": x.tolist(), "y": int(y)} for x, y in zip(inputs, labels, strict=True)]
    lines = ["bad" if number in bad_rows else json.dumps(row) for number, row in enumerate(rows)]
    file.write_text("\n".join(lines))
    return JsonLines(file, transform=as_sample)


def as_sample(row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return torch.tensor(row["x"]), row["y"]


OPTIONS: dict[str, Any] = {
    "global_batch_size": 16, "skip_bad": True, "schedule": "constant", "warmup_steps": 0, "epochs": 2,
    "checkpoint_every": 2, "resume": "auto",
}  # fmt: skip


def test_a_resumed_run_counts_each_bad_sample_once_and_has_the_same_losses(tmp_path: Path) -> None:
    source = write_blobs(tmp_path / "a.jsonl", {0, 17, 40})

    def run(name: str, **given: Any) -> tuple[list[float], int]:
        torch.manual_seed(0)
        config = settings(tmp_path / name, **OPTIONS, **given)
        result = trainer(config, source, model=nn.Linear(4, 3), validation=source).fit()
        losses = [event["loss"] for event in by_step(read_events(result.run_dir / "events.jsonl"))]
        return losses, result.summary["bad_samples"]

    expected = run("whole")
    assert (len(expected[0]), expected[1]) == (10, 6)
    for steps in (1, 7):
        run("parts", max_steps=steps)
    assert run("parts", max_steps=100) == expected
    events = read_events(tmp_path / "whole" / "run" / "events.jsonl")
    evaluations = of_kind(events, "evaluate")
    assert [(event["samples"], event["bad_samples"]) for event in evaluations] == [(67, 3)] * 2
    messages = [event["message"] for event in of_kind(events, "warning")]
    assert any("2 samples left out by --skip-bad up to step 2: " in message for message in messages)
    assert any("a.jsonl, line 18 is not JSON" in message for message in messages)


def test_a_step_without_a_good_sample_changes_no_loss_of_another_run(tmp_path: Path) -> None:
    """It has no samples that count; the step after it is the first one that learns."""
    source = write_blobs(tmp_path / "a.jsonl", set(range(16)))
    result = trainer(settings(tmp_path, **OPTIONS), source, model=nn.Linear(4, 3)).fit()
    steps = by_step(read_events(result.run_dir / "events.jsonl"))
    assert [event["units"] for event in steps[:5]] == [0, 16, 16, 16, 6]
    assert steps[0]["loss"] == 0.0
    assert result.summary["bad_samples"] == 32


def losses_on_rank(rank: int, size: int, store: str, folder: Path) -> list[float]:
    """Train on a rank. In the second step the third one has no good sample."""
    source = JsonLines(folder.parent / "a.jsonl", transform=as_sample)
    config = settings(folder, **OPTIONS | {"resume": None}, workers=size).but(
        parallel_strategy="data_parallel" if size > 1 else "auto"
    )
    torch.manual_seed(0)
    prepared = trainer(config, source, model=nn.Linear(4, 3)).prepare()
    run_dir = folder / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    log: Log = EventLog(run_dir / "events.jsonl") if rank == 0 else SilentLog()
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 30) as world:
        training = build_training(WorkerContext(prepared, world, run_dir, log))
        Loop(training).run()
        training.close()
    log.close()
    return [event["loss"] for event in by_step(read_events(run_dir / "events.jsonl"))] if rank == 0 else []


def test_three_workers_of_which_one_has_no_good_sample_have_the_losses_of_one(tmp_path: Path) -> None:
    write_blobs(tmp_path / "a.jsonl", {3, *range(27, 32)})
    (expected,) = run_ranks(losses_on_rank, 1, tmp_path / "1")
    found, *_ = run_ranks(losses_on_rank, 3, tmp_path / "3")
    assert len(expected) == 10
    assert found == pytest.approx(expected, rel=1e-5)
    events = read_events(tmp_path / "3" / "run" / "events.jsonl")
    assert sum(event["count"] for event in of_kind(events, "bad_samples")) == 12
