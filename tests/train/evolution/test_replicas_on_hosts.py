"""Runs with ``--expert-replicas`` on real processes, in fp64: they equal one process, their checkpoints
resume on any number of hosts, and they go on without a lost one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from experts.balance import gated_layers
from experts.moe.layer import MoELayer
from harness.hosts.ranks import run_ranks
from harness.runs.loop_runs import losses_in
from harness.runs.records import by_step
from harness.runs.tiny_model import Tiny
from harness.storage.snapshots import CopyingSink, CountingSource, HostSnapshots
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.config.settings import Config
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.record.files.reading import read_events
from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
from orchestrator.train.checkpoint.snapshots import SnapshotTarget
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker.resume import ResumeFrom
from orchestrator.train.worker.run import Supervision, WorkerRun, run_worker
from orchestrator.trainer import Trainer

CPU = torch.device("cpu")
STEPS = 10
TASK = Tiny(((3, 5, 2, 4, 6, 7, 4), (4, 9, 4)), samples=46)
"""Seven experts of other sizes, and three that two hosts cannot share evenly. The last batch is short."""
SETTINGS: dict[str, Any] = {
    "global_batch_size": 12,
    "epochs": 9,
    "learning_rate": 1e-2,
    "schedule": "constant",
    "warmup_steps": 0,
    "precision": "fp32",  # no autocast: the model itself is fp64
    "expert_kernel": "loop",
    "log_every": 1,
    "checkpoint_every": 1,
    "keep": 100,
}


def run(run_dir: Path, world: World, **settings: Any) -> list[dict[str, Any]]:
    """Train as one worker. Return the hosts of each layer's experts, and those that this worker holds."""
    batch = {"batch_size": SETTINGS["global_batch_size"] // world.size}
    strategy = {"parallel_strategy": "expert_parallel"} if world.size > 1 else {}
    config = Config.of(**SETTINGS | batch | strategy | settings, run_dir=run_dir, workers=world.size)
    prepared = Trainer(task=TASK, config=config, quiet=True).prepare()
    run_dir.mkdir(parents=True, exist_ok=True)
    log: Log = EventLog(run_dir / "events.jsonl") if world.is_main else SilentLog()
    _, model = run_worker(prepared, world, run_dir, log, Supervision())
    log.close()
    layers: list[MoELayer] = [layer for _, layer in gated_layers(model)]
    return [
        {"hosts": [e.hosts for e in layer.structure.experts], "held": layer.bank.held} for layer in layers
    ]


def run_on_host(rank: int, size: int, store: str, run_dir: Path, settings: dict[str, Any]) -> Any:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        return run(run_dir, world, **settings)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run(run_dir, World.single_process(), max_steps=STEPS)
    return run_dir


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on four hosts in two groups, with a checkpoint of every step."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    layers_of_host = run_ranks(run_on_host, 4, run_dir, {"expert_replicas": 2, "max_steps": STEPS})
    for layers in layers_of_host:
        for layer in layers:
            assert all(second == first + 2 for first, second in layer["hosts"]), "two groups of two hosts"
    # The three experts of the second layer divide a group unevenly.
    assert {len(layers[1]["held"]) for layers in layers_of_host} == {1, 2}
    return run_dir


def final_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's state of the last checkpoint."""
    found, skipped = CheckpointStore(run_dir / "checkpoints").newest_good()
    assert found is not None
    assert not skipped
    assert found.path.name == f"step_{STEPS:08d}"
    return {f"{kind}/{name}": t for kind, ts in found.contents.tensors.items() for name, t in ts.items()}


def assert_equal_to_one_process(run_dir: Path, alone: Path) -> None:
    assert losses_in(run_dir) == pytest.approx(losses_in(alone), rel=1e-9)
    norms = [
        [event["grad_norm"] for event in by_step(read_events(folder / "events.jsonl"))]
        for folder in (run_dir, alone)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    actual = final_tensors(run_dir)
    expected = final_tensors(alone)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.extended
def test_two_replicas_on_four_hosts_equal_one_process(on_four: Path, alone: Path) -> None:
    assert_equal_to_one_process(on_four, alone)


@pytest.mark.extended
def test_two_replicas_on_two_hosts_equal_one_process(alone: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_ranks(run_on_host, 2, run_dir, {"expert_replicas": 2, "max_steps": STEPS})
    assert_equal_to_one_process(run_dir, alone)


@pytest.mark.extended
@pytest.mark.parametrize(("hosts", "replicas"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (4, 1)])
def test_a_checkpoint_of_replicas_resumes_on_other_hosts(
    hosts: int, replicas: int, on_four: Path, alone: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    # As if the run had ended after four steps.
    later = [f"step_{step:08d}" for step in range(5, STEPS + 1)]
    shutil.copytree(on_four, run_dir, ignore=shutil.ignore_patterns(*later))
    settings = {"resume": "auto", "expert_replicas": replicas, "max_steps": STEPS}
    if hosts == 1:
        run(run_dir, World.single_process(), **settings)
    else:
        layers_of_host = run_ranks(run_on_host, hosts, run_dir, settings)
        for layers in layers_of_host:
            assert all(len(hosts) == replicas for layer in layers for hosts in layer["hosts"])
        assert all(any(layer["held"] for layer in layers) for layers in layers_of_host), "an idle host"
    assert_equal_to_one_process(run_dir, alone)


def go_on(
    rank: int, size: int, store: str, run_dir: Path, end: int, snapshots: HostSnapshots | None
) -> dict[str, Any]:
    """Join a run of four hosts in two groups as a host of a recovery does, and train up to step ``end``.

    Return the hosts of the experts, and this host's snapshot of the last step."""
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        batch = {"batch_size": 3, "workers": 4, "expert_replicas": 2, "max_steps": STEPS}
        config = Config.of(**SETTINGS | batch, parallel_strategy="expert_parallel", run_dir=run_dir)
        prepared = Trainer(task=TASK, config=config, quiet=True).prepare()
        run_dir.mkdir(parents=True, exist_ok=True)
        log: Log = EventLog(run_dir / "events.jsonl") if world.is_main else SilentLog()
        sink = CopyingSink()
        supervision = Supervision(snapshots=SnapshotTarget(sink, PinnedBuffers(CPU), 0))
        resume = ResumeFrom(CountingSource(snapshots)) if snapshots is not None else None
        with WorkerRun(prepared, world, run_dir, log, supervision, resume) as run:
            layers: list[MoELayer] = [layer for _, layer in gated_layers(run.loop.stepper.strategy.model)]
            hosts = [[expert.hosts for expert in layer.structure.experts] for layer in layers]
            run.run_steps(end - run.loop.progress.step, take_snapshot=True)
        log.close()
        return {"hosts": hosts, "snapshot": sink.snapshots[-1]}


def test_the_run_goes_on_in_other_groups_when_a_host_is_lost_and_when_it_is_back(
    alone: Path, tmp_path: Path
) -> None:
    """Three hosts make one group, and four make two groups again."""
    run_dir = tmp_path / "run"
    snapshots = None
    for hosts, groups, end in ((4, 2, 3), (3, 1, 6), (4, 2, STEPS)):
        results = run_ranks(go_on, hosts, run_dir, end, snapshots)
        snapshots = [result["snapshot"] for result in results]
        for result in results:
            assert all(len(copies) == groups for layer in result["hosts"] for copies in layer)
            held = {host for layer in result["hosts"] for copies in layer for host in copies}
            assert held == set(range(hosts)), "a host without experts"
    assert_equal_to_one_process(run_dir, alone)
