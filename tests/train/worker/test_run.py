"""Whole runs on several workers, real processes over gloo: saved on some, resumed on others, stopped by one, all the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.config.settings import Config
from orchestrator.record.events import EventLog, by_step, of_kind, read_events
from orchestrator.record.log import SilentLog
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world
from orchestrator.train.worker.resume import ResumeFrom
from orchestrator.train.worker.run import Supervision, run_worker
from orchestrator.trainer import Trainer
from tests.support.ranks import RanksFailed, run_ranks

SMALL: dict[str, Any] = {
    "experts": 3,
    "expert_hidden_size": (4, 8, 4),
    "width": 8,
    "layers": 2,
    "global_batch_size": 50,
    "learning_rate": 1e-3,
    "epochs": 1,
    "log_every": 3,
    "trackers": (),
    "monitor_gpu": False,
    "warmup_steps": 2,
}


def config_of(run_dir: Path, workers: int, **settings: Any) -> Config:
    return Config.of(
        **SMALL | {"run_dir": run_dir, "parallel_strategy": "data_parallel", "workers": workers} | settings
    )


def run_rank(
    rank: int,
    size: int,
    store: str,
    config: Config,
    stop_at: int | None = None,
    resume_from: ResumeFrom | None = None,
) -> str:
    prepared = Trainer(config=config, quiet=True).prepare()
    run_dir = config.run.run_dir
    assert run_dir is not None
    log: Any = SilentLog()
    if rank == 0:
        run_dir.mkdir(exist_ok=True)
        log = EventLog(run_dir / "events.jsonl")
    asked = 0

    def wish() -> bool:
        nonlocal asked
        asked += 1
        return stop_at is not None and rank == size - 1 and asked >= stop_at

    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        outcome, _ = run_worker(prepared, world, run_dir, log, Supervision(wish), resume_from)
    log.close()
    return outcome.status


def trained(
    run_dir: Path,
    workers: int,
    stop_at: int | None = None,
    resume_from: ResumeFrom | None = None,
    **settings: Any,
) -> list[Any]:
    """The events of a run on so many workers, as real processes; one worker is this process."""
    config = config_of(run_dir, workers, **settings)
    if workers == 1:
        run_dir.mkdir(exist_ok=True)
        log = EventLog(run_dir / "events.jsonl")
        prepared = Trainer(config=config.but(parallel_strategy="auto"), quiet=True).prepare()
        run_worker(prepared, World.single_process(), run_dir, log, Supervision(), resume_from)
        log.close()
    else:
        assert len(set(run_ranks(run_rank, workers, config, stop_at, resume_from))) == 1
    return read_events(run_dir / "events.jsonl")


def losses(events: list[Any]) -> list[float]:
    return [event["loss"] for event in by_step(events)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The run that the others are held against: one process."""
    return trained(tmp_path_factory.mktemp("whole") / "run", 1, max_steps=24)


@pytest.mark.parametrize(
    ("workers", "settings"), [(2, {}), (3, {"batch_size": 7}), (2, {"sharding": "zero2"})]
)
def test_a_whole_run_is_the_same_on_several_workers(
    tmp_path: Path, whole: list[Any], workers: int, settings: dict[str, Any]
) -> None:
    events = trained(tmp_path / "run", workers, max_steps=24, **settings)
    assert losses(events) == pytest.approx(losses(whole), rel=1e-5)
    ours, theirs = of_kind(events, "evaluate")[-1], of_kind(whole, "evaluate")[-1]
    assert ours["samples"] == theirs["samples"] == 359
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert ours["metrics"]["accuracy"] == pytest.approx(theirs["metrics"]["accuracy"], abs=0.003)
    start = of_kind(events, "start")[0]
    assert (start["strategy"], start["workers"], start["global_batch_size"]) == ("data_parallel", workers, 50)
    assert [event["samples"] for event in by_step(events)] == [50] * 24


def test_saved_on_three_resumed_on_two_in_shards_and_on_one(tmp_path: Path) -> None:
    """ddp on three, then zero3 on two, then one process: the losses go on as if nothing had happened."""
    run = tmp_path / "run"
    schedule: dict[str, Any] = {"schedule": "constant"}
    expected = losses(trained(tmp_path / "whole", 1, max_steps=24, **schedule))
    trained(run, 3, max_steps=8, **schedule)
    trained(run, 2, max_steps=16, resume="auto", sharding="zero3", **schedule)
    events = trained(run, 1, max_steps=24, resume="auto", **schedule)
    assert losses(events) == pytest.approx(expected, rel=1e-5)
    assert [event["step"] for event in of_kind(events, "resume")] == [8, 16]


def test_saved_in_shards_is_what_is_saved_whole(tmp_path: Path) -> None:
    """The same steps with and without sharding leave the same checkpoint, by the same names."""
    from orchestrator.train.checkpoint.files import load

    for name, settings in {"plain": {}, "zero3": {"sharding": "zero3"}}.items():
        trained(tmp_path / name, 2, max_steps=3, **settings)
    plain, sharded = (load(tmp_path / name / "checkpoints" / "step_00000003") for name in ("plain", "zero3"))
    for file in ("model", "optimizer"):
        assert plain.tensors[file].keys() == sharded.tensors[file].keys()
        for name, tensor in plain.tensors[file].items():
            torch.testing.assert_close(sharded.tensors[file][name], tensor, rtol=1e-4, atol=1e-6)


def test_the_global_batch_stays_when_the_workers_change(tmp_path: Path) -> None:
    """Nothing was said about the batch: the run keeps the one it began with, on whatever it goes on."""
    open_ = {"global_batch_size": None}
    trained(tmp_path / "run", 2, max_steps=4, **open_)
    events = trained(tmp_path / "run", 3, max_steps=8, resume="auto", **open_)
    starts = of_kind(events, "start")
    assert [start["workers"] for start in starts] == [2, 3]
    assert starts[0]["global_batch_size"] == starts[1]["global_batch_size"] == 128


def test_one_workers_wish_to_stop_ends_all_at_the_same_step(tmp_path: Path) -> None:
    events = trained(tmp_path / "run", 3, stop_at=5)
    assert of_kind(events, "end")[0]["status"] == "stopped"
    assert len(by_step(events)) == 5
    assert of_kind(events, "checkpoint")[-1]["step"] == 5
    resumed = trained(tmp_path / "run", 2, max_steps=12, resume="auto")
    assert len(by_step(resumed)) == 12


def test_a_checkpoint_is_told_of_when_it_is_on_disk(tmp_path: Path) -> None:
    events = trained(tmp_path / "run", 2, max_steps=12, checkpoint_every=4)
    saved = of_kind(events, "checkpoint")
    assert [event["step"] for event in saved] == [4, 8, 12]
    for event in saved:
        assert 0 < event["stall"] <= event["seconds"]
        assert (tmp_path / "run" / event["path"] / "manifest.json").exists()


def test_a_restarted_worker_reports_where_it_resumed_and_how_long_that_took(tmp_path: Path) -> None:
    """The driver computes the cost of the recovery from these fields; the worker writes no ``recovery`` event."""
    trained(tmp_path / "run", 2, max_steps=6, checkpoint_every=2)
    events = trained(tmp_path / "run", 2, resume_from=ResumeFrom(), max_steps=9, resume="auto")
    assert of_kind(events, "recovery") == []
    start = of_kind(events, "start")[-1]
    assert (start["step"], start["workers"]) == (6, 2)
    assert start["build_seconds"] > 0
    first_step = next(event for event in events[events.index(start) :] if event["event"] == "step")
    assert first_step["step"] == 7
    assert first_step["time"] >= start["time"]


def test_a_restart_without_a_checkpoint_begins_where_it_was_asked_to(tmp_path: Path) -> None:
    """The weights of --init-from are not forgotten because a worker was lost in the first epoch."""
    trained(tmp_path / "first", 1, max_steps=6)
    given = {
        "init_from": tmp_path / "first" / "checkpoints" / "step_00000006",
        "max_steps": 3,
        "checkpoint_every": 2,
    }
    expected = losses(trained(tmp_path / "calm", 2, **given))
    again = ResumeFrom()
    assert losses(trained(tmp_path / "run", 2, resume_from=again, **given)) == expected
    later = losses(trained(tmp_path / "run", 2, resume_from=again, **given | {"max_steps": 6}))
    assert later[:3] == expected
    assert len(later) == 6


def test_a_halved_micro_batch_changes_nothing_but_the_portions(tmp_path: Path, whole: list[Any]) -> None:
    halved = ResumeFrom(halvings=2)
    events = trained(tmp_path / "run", 2, resume_from=halved, max_steps=24, batch_size=16)
    assert losses(events) == pytest.approx(losses(whole), rel=1e-5)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["choices"]["batch_size"]["value"] == 16


def failing_rank(rank: int, size: int, store: str, config: Config) -> str:
    """Rank 1 is gone after a few steps; the others find that the connection is closed."""
    if rank == 1:
        import threading

        threading.Timer(3.0, lambda: os._exit(7)).start()
    return run_rank(rank, size, store, config)


def test_a_lost_worker_is_an_error_of_the_others_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1"):
        run_ranks(failing_rank, 3, config_of(tmp_path / "run", 3, epochs=100_000))


def test_batch_size_auto_is_agreed_on(tmp_path: Path) -> None:
    trained(
        tmp_path / "run", 2, max_steps=2, batch_size="auto", global_batch_size=None, accumulation_steps=None
    )
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    chosen = plan["choices"]["batch_size"]
    assert "throughput" in chosen["reason"]
    assert plan["choices"]["global_batch_size"]["value"] == 2 * chosen["value"]


def test_asked_for_shares_are_recorded(tmp_path: Path) -> None:
    trained(tmp_path / "run", 2, max_steps=2, share_by_speed="on")
    speeds = json.loads((tmp_path / "run" / "plan.json").read_text())["measured"]["device_speeds"]
    assert all(speed > 1e8 for speed in speeds.values())
