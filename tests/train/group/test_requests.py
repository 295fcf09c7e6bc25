"""Tests of requests: one worker receives them, and all workers follow them at the same step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from harness.hosts.ranks import run_ranks
from harness.runs.loop_runs import SMALL, run_loop
from orchestrator.config.settings import Config
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.train.group.requests import NO_VOTES, Requests, RequestVotes
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world
from orchestrator.train.loop.loop import Loop, Outcome
from orchestrator.train.loop.training import LoopHooks
from orchestrator.train.worker.build import WorkerContext, build_training
from orchestrator.trainer import Trainer

CPU = torch.device("cpu")


def requests_at(asked: dict[int, Requests]) -> Callable[[], Requests]:
    """Return a source that makes each request at its call, from 1."""
    num_calls = 0

    def take() -> Requests:
        nonlocal num_calls
        num_calls += 1
        return asked.get(num_calls, Requests())

    return take


def test_a_single_process_follows_its_requests_at_once() -> None:
    votes = RequestVotes(CPU, 1, requests_at({1: Requests(save=True)}))
    assert votes.cast() == NO_VOTES
    assert votes.agreed() == Requests(save=True)
    assert votes.agreed() == Requests()


def test_several_workers_follow_the_votes_alone() -> None:
    votes = RequestVotes(CPU, 3, requests_at({1: Requests(end="enough"), 2: Requests(interrupt=True)}))
    assert votes.cast() == (0.0, 1.0, 0.0)
    assert votes.agreed() == Requests()
    assert votes.agreed(torch.zeros(3)) == Requests()
    assert votes.agreed(torch.tensor([0.0, 1.0, 2.0])) == Requests(end="enough", save=True)


def test_a_request_to_end_evaluates_and_completes_the_run(tmp_path: Path) -> None:
    hooks = LoopHooks(take_requests=requests_at({5: Requests(end="good enough")}))
    loop, losses = run_loop(tmp_path, hooks=hooks, max_steps=40)
    assert len(losses) == loop.progress.step == 5
    assert loop.progress.validation["step"] == 5


def test_a_requested_checkpoint_is_saved_and_the_run_continues(tmp_path: Path) -> None:
    hooks = LoopHooks(take_requests=requests_at({3: Requests(save=True)}))
    _, losses = run_loop(tmp_path, hooks=hooks, max_steps=6)
    saved = of_kind(read_events(tmp_path / "events.jsonl"), "checkpoint")
    assert [event["step"] for event in saved] == [3, 6]
    assert len(losses) == 6


def outcome_on_rank(rank: int, size: int, store: str, run_dir: Path) -> tuple[Outcome, int]:
    """Train on a rank; the last one asks for a checkpoint at step 2 and for the end at step 4."""
    asked = {2: Requests(save=True), 4: Requests(end="enough")} if rank == size - 1 else {}
    hooks = LoopHooks(take_requests=requests_at(asked))
    config = Config.of(
        **SMALL
        | {"run_dir": run_dir, "parallel_strategy": "data_parallel", "workers": size, "global_batch_size": 16}
    )
    prepared = Trainer(config=config, quiet=True).prepare()
    log: Log = SilentLog()
    if rank == 0:
        run_dir.mkdir()
        log = EventLog(run_dir / "events.jsonl")
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 30) as world:
        training = build_training(WorkerContext(prepared, world, run_dir, log))
        loop = Loop(training, hooks)
        outcome = loop.run()
        training.close()
    log.close()
    return outcome, loop.progress.step


def test_three_workers_follow_one_workers_requests_at_the_same_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ends = run_ranks(outcome_on_rank, 3, run_dir)
    assert [(outcome.status, step) for outcome, step in ends] == [("completed", 4)] * 3
    assert ends[2][0].reason == "enough"
    saved = of_kind(read_events(run_dir / "events.jsonl"), "checkpoint")
    assert [event["step"] for event in saved] == [2, 4]
