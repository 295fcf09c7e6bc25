"""Whole runs on several workers, as real processes over gloo."""

from __future__ import annotations

import json
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.hosts.ranks import RanksFailed, run_ranks
from harness.runs.records import by_step
from orchestrator.checkpoint.files import load
from orchestrator.config.settings import Config
from orchestrator.live.callbacks.callback_values import EndInfo, FailureInfo
from orchestrator.live.callbacks.callbacks import Callback, CallbackRunner, Request
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.event_log import DriverLog, EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.train.group.requests import Requests
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker.resume import ResumeFrom
from orchestrator.train.worker.run import Supervision, record_failure, run_worker
from orchestrator.trainer import Trainer

SMALL: dict[str, Any] = {
    "experts": 3,
    "expert_hidden_size": (4, 8, 4),
    "width": 8,
    "layers": 2,
    "evolution": "off",
    "global_batch_size": 50,
    "learning_rate": 1e-3,
    "epochs": 1,
    "max_steps": 29,
    "log_every": 3,
    "trackers": (),
    "monitor_gpu": False,
    "warmup_steps": 2,
}


def config_of(run_dir: Path, workers: int, **settings: Any) -> Config:
    parallel = {
        "run_dir": run_dir,
        "parallel_strategy": "data_parallel",
        "workers": workers,
    }
    return Config.of(**SMALL | parallel | settings)


def run_rank(
    rank: int,
    size: int,
    store: str,
    config: Config,
    stop_at: int | None = None,
    resume_from: ResumeFrom | None = None,
) -> str:
    """Run one worker.

    The last rank requests to stop at step ``stop_at``. Return the status of the run."""
    prepared = Trainer(config=config, quiet=True).prepare()
    run_dir = config.run.run_dir
    assert run_dir is not None
    log: Log = SilentLog()
    if rank == 0:
        run_dir.mkdir(exist_ok=True)
        log = EventLog(run_dir / "events.jsonl")
    num_steps = 0

    def take_requests() -> Requests:
        nonlocal num_steps
        num_steps += 1
        return Requests(stop_at is not None and rank == size - 1 and num_steps >= stop_at)

    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        outcome, _ = run_worker(prepared, world, run_dir, log, Supervision(take_requests), resume_from)
    log.close()
    return outcome.status


def train(
    run_dir: Path,
    workers: int,
    stop_at: int | None = None,
    resume_from: ResumeFrom | None = None,
    **settings: Any,
) -> list[Event]:
    """Train on so many workers, as real processes; a single worker is this process.

    Return all events."""
    config = config_of(run_dir, workers, **settings)
    if workers == 1:
        run_dir.mkdir(exist_ok=True)
        log = EventLog(run_dir / "events.jsonl")
        prepared = Trainer(config=config.but(parallel_strategy="auto"), quiet=True).prepare()
        run_worker(prepared, World.single_process(), run_dir, log, Supervision(), resume_from)
        log.close()
    else:
        statuses = run_ranks(run_rank, workers, config, stop_at, resume_from)
        assert len(set(statuses)) == 1
    return read_events(run_dir / "events.jsonl")


def losses(events: list[Event]) -> list[float]:
    return [event["loss"] for event in by_step(events)]


def read_plan(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "plan.json").read_text())


@pytest.fixture(scope="module")
def single_worker(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """The reference: the events of the run in one process."""
    return train(tmp_path_factory.mktemp("single") / "run", 1, max_steps=24)


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize(
    ("workers", "settings"), [(2, {}), (3, {"batch_size": 7}), (2, {"sharding": "zero2"})]
)
def test_a_run_on_several_workers_equals_one_on_a_single_worker(
    tmp_path: Path, single_worker: list[Event], workers: int, settings: dict[str, Any]
) -> None:
    events = train(tmp_path / "run", workers, max_steps=24, **settings)
    assert losses(events) == pytest.approx(losses(single_worker), rel=1e-5)
    actual = of_kind(events, "evaluate")[-1]
    expected = of_kind(single_worker, "evaluate")[-1]
    assert actual["samples"] == expected["samples"] == 359
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert actual["metrics"]["accuracy"] == pytest.approx(expected["metrics"]["accuracy"], abs=0.003)
    start = of_kind(events, "start")[0]
    assert (start["strategy"], start["workers"], start["global_batch_size"]) == (
        "data_parallel",
        workers,
        50,
    )
    assert [event["samples"] for event in by_step(events)] == [50] * 24


def test_a_run_saved_on_three_workers_resumes_in_shards_on_two_and_then_on_one(
    tmp_path: Path,
) -> None:
    """DDP on three, ZeRO-3 on two, then one process: the losses are those of an undisturbed run."""
    run_dir = tmp_path / "run"
    schedule: dict[str, Any] = {"schedule": "constant"}
    expected = losses(train(tmp_path / "undisturbed", 1, max_steps=24, **schedule))
    train(run_dir, 3, max_steps=8, **schedule)
    train(run_dir, 2, max_steps=16, resume="auto", sharding="zero3", **schedule)
    events = train(run_dir, 1, max_steps=24, resume="auto", **schedule)
    assert losses(events) == pytest.approx(expected, rel=1e-5)
    assert [event["step"] for event in of_kind(events, "resume")] == [8, 16]


@pytest.mark.extended
def test_a_sharded_run_writes_the_same_checkpoint(tmp_path: Path) -> None:
    variants: dict[str, dict[str, Any]] = {"plain": {}, "zero3": {"sharding": "zero3"}}
    for name, settings in variants.items():
        train(tmp_path / name, 2, max_steps=3, **settings)
    plain = load(tmp_path / "plain" / "checkpoints" / "step_00000003")
    sharded = load(tmp_path / "zero3" / "checkpoints" / "step_00000003")
    for kind in ("model", "optimizer"):
        assert plain.tensors[kind].keys() == sharded.tensors[kind].keys()
        for name, tensor in plain.tensors[kind].items():
            torch.testing.assert_close(sharded.tensors[kind][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.extended
def test_the_global_batch_stays_when_the_number_of_workers_changes(
    tmp_path: Path,
) -> None:
    """The plan chose it at the first start; the resumed run keeps it."""
    unset = {"global_batch_size": None}
    train(tmp_path / "run", 2, max_steps=4, **unset)
    events = train(tmp_path / "run", 3, max_steps=8, resume="auto", **unset)
    starts = of_kind(events, "start")
    assert [start["workers"] for start in starts] == [2, 3]
    assert starts[0]["global_batch_size"] == starts[1]["global_batch_size"] == 128


def test_a_stop_request_of_one_worker_ends_all_at_the_same_step(tmp_path: Path) -> None:
    events = train(tmp_path / "run", 3, stop_at=5)
    assert of_kind(events, "end")[0]["status"] == "stopped"
    assert len(by_step(events)) == 5
    assert of_kind(events, "checkpoint")[-1]["step"] == 5
    resumed = train(tmp_path / "run", 2, max_steps=12, resume="auto")
    assert len(by_step(resumed)) == 12


def test_a_checkpoint_event_means_that_it_is_on_disk(tmp_path: Path) -> None:
    events = train(tmp_path / "run", 2, max_steps=12, checkpoint_every=4)
    checkpoints = of_kind(events, "checkpoint")
    # The last step is saved again once it is evaluated.
    assert [event["step"] for event in checkpoints] == [4, 8, 12, 12]
    for event in checkpoints:
        assert 0 < event["stall"] <= event["seconds"]
        assert (tmp_path / "run" / event["path"] / "manifest.json").exists()


@pytest.mark.extended
def test_a_restarted_worker_reports_where_it_resumed_and_how_long_that_took(
    tmp_path: Path,
) -> None:
    """The driver computes the cost of a recovery from these fields and writes the event."""
    train(tmp_path / "run", 2, max_steps=6, checkpoint_every=2)
    events = train(tmp_path / "run", 2, resume_from=ResumeFrom(), max_steps=9, resume="auto")
    assert of_kind(events, "recovery") == []
    start = of_kind(events, "start")[-1]
    assert (start["step"], start["workers"]) == (6, 2)
    assert start["build_seconds"] > 0
    first_step = next(event for event in events[events.index(start) :] if event["event"] == "step")
    assert first_step["step"] == 7
    assert first_step["time"] >= start["time"]


@pytest.mark.extended
def test_a_restart_without_a_checkpoint_starts_where_the_user_asked(
    tmp_path: Path,
) -> None:
    """A worker lost in the first epoch does not make the run forget the weights of --init-from."""
    train(tmp_path / "first", 1, max_steps=6)
    settings: dict[str, Any] = {
        "init_from": tmp_path / "first" / "checkpoints" / "step_00000006",
        "max_steps": 3,
        "checkpoint_every": 2,
    }
    expected = losses(train(tmp_path / "undisturbed", 2, **settings))
    restarted = train(tmp_path / "run", 2, resume_from=ResumeFrom(), **settings)
    assert losses(restarted) == expected
    longer = train(tmp_path / "run", 2, resume_from=ResumeFrom(), **settings | {"max_steps": 6})
    assert losses(longer)[:3] == expected
    assert len(losses(longer)) == 6


@pytest.mark.extended
def test_halved_micro_batches_do_not_change_the_losses(tmp_path: Path, single_worker: list[Event]) -> None:
    halved = ResumeFrom(halvings=2)
    events = train(tmp_path / "run", 2, resume_from=halved, max_steps=24, batch_size=16)
    assert losses(events) == pytest.approx(losses(single_worker), rel=1e-5)
    assert read_plan(tmp_path / "run")["choices"]["batch_size"]["value"] == 16, "the plan keeps the whole one"


def dying_rank(rank: int, size: int, store: str, config: Config) -> str:
    """Rank 1 dies after a few steps; the others find the connection closed."""
    if rank == 1:
        threading.Timer(3.0, lambda: os._exit(7)).start()
    return run_rank(rank, size, store, config)


def test_a_lost_worker_is_an_error_of_the_others_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1"):
        run_ranks(dying_rank, 3, config_of(tmp_path / "run", 3, epochs=100_000, max_steps=None))


@pytest.mark.extended
def test_workers_agree_on_an_automatic_batch_size(tmp_path: Path) -> None:
    automatic = {
        "batch_size": "auto",
        "global_batch_size": None,
        "accumulation_steps": None,
    }
    train(tmp_path / "run", 2, max_steps=2, **automatic)
    choices = read_plan(tmp_path / "run")["choices"]
    assert "throughput" in choices["batch_size"]["reason"]
    assert choices["global_batch_size"]["value"] == 2 * choices["batch_size"]["value"]


@pytest.mark.extended
def test_the_speeds_behind_shares_are_recorded(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, max_steps=2, share_by_speed="on")
    speeds = read_plan(tmp_path / "run")["measured"]["device_speeds"]
    assert all(speed > 1e8 for speed in speeds.values())


class LogsAndFails(Callback):
    def on_failure(self, failure: FailureInfo) -> Request:
        return Request(log={"failures": 1.0})

    def on_end(self, end: EndInfo) -> None:
        raise RuntimeError("no connection")


def test_callbacks_at_the_end_of_a_failed_run_do_not_cost_its_record(tmp_path: Path) -> None:
    """The driver's log of the run is closed by then: they write to the one that records the failure."""
    callbacks = CallbackRunner([LogsAndFails()])
    with closing(DriverLog(tmp_path / "events.jsonl")) as closed:
        callbacks.bind(tmp_path, Config(), closed.write)
    record_failure(tmp_path, RuntimeError("a worker was lost"), 1.0, 0, None, callbacks)
    events = read_events(tmp_path / "events.jsonl")
    assert [event["event"] for event in events] == ["failure", "log", "end", "warning"]
    assert "no connection" in of_kind(events, "warning")[0]["message"]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
