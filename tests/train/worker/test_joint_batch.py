"""``--batch-size auto`` of workers that divide the model: they measure in steps of all of them together."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.hosts.ranks import run_ranks
from harness.runs.combinations import Case, Validated, run_in_one_process
from harness.runs.records import by_step
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.record.files.reading import read_events
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world
from orchestrator.train.worker import batch_probe
from orchestrator.train.worker.resume import ResumeFrom
from orchestrator.train.worker.run import Supervision, WorkerRun
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.trainer import Trainer

TASK = Validated(((8, 12, 8, 16, 4, 8, 20),), top_k=2, samples=101, dtype=torch.float32)
"""Seven experts of five sizes, and a last batch that is short."""
BASE: dict[str, Any] = {
    "batch_size": "auto",
    "learning_rate": 1e-3,
    "schedule": "constant",
    "precision": "fp32",
    "deterministic": True,
    "log_every": 1,
    "trackers": (),
    "monitor_gpu": False,
    "gpu_mode": "cpu",
}
DIVIDED: dict[str, dict[str, Any]] = {
    "hosts": {"parallel_strategy": "expert_parallel"},
    "hosts and shards": {"parallel_strategy": "expert_parallel", "sharding": "zero3"},
    "primary gate": {"parallel_strategy": "expert_parallel", "gate": "primary"},
    "zero2": {"parallel_strategy": "data_parallel", "sharding": "zero2"},
    "zero3": {"parallel_strategy": "data_parallel", "sharding": "zero3"},
}


def train(
    rank: int, size: int, store: str, folder: Path, settings: dict[str, Any], halvings: int = 0
) -> list[tuple[int, int, str, int]]:
    """Train an epoch in two starts; return the batch sizes with their reason, and the probes, of each."""
    batch_probe._CPU_SECONDS = 0.02
    probes: list[int] = []
    probe = batch_probe.probe

    def counted(probed: batch_probe.Probed, batch: int, passes: int = 1) -> Any:
        assert probed.world.size == size
        probes.append(batch)
        return probe(probed, batch, passes)

    batch_probe.probe = counted
    found: list[tuple[int, int, str, int]] = []
    for steps in (2, 1000):
        more: dict[str, Any] = {"max_steps": steps, "epochs": 1, "run_dir": folder, "checkpoint_every": 2}
        more |= {"resume": "auto"} if steps > 2 else {}
        prepared = Trainer(task=TASK, config=Config.of(**settings | more), quiet=True).prepare()
        folder.mkdir(exist_ok=True)
        log: Log = EventLog(folder / "events.jsonl") if rank == 0 else SilentLog()
        resume = ResumeFrom(halvings=halvings) if halvings else None
        stores = file_store(f"{store}-{steps}", size)
        with closing(log), process_group_world(stores, rank, size, torch.device("cpu"), "gloo", 60) as world:
            settings_of_torch = torch_settings(prepared.resolved.config, prepared.plan, world.device)
            with (
                settings_of_torch,
                WorkerRun(prepared, world, folder, log, Supervision(), resume) as run,
            ):
                plan = run.prepared.plan
                chosen = plan.batch_size
                found.append((chosen.value, plan.global_batch_size.value, chosen.reason, len(probes)))
                while run.run_steps(1000) is None:
                    pass
    return found


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("hosts", [3, 2])
@pytest.mark.parametrize("divided", DIVIDED)
def test_workers_that_divide_a_model_find_one_size_and_train_as_one_process(
    divided: str, hosts: int, tmp_path: Path
) -> None:
    settings = BASE | DIVIDED[divided] | {"workers": hosts}
    found = run_ranks(train, hosts, tmp_path / "hosts", settings)
    assert all(each == found[0] for each in found), "all workers go on with one size"
    first, resumed = found[0]
    size, global_batch, reason, probes = first
    ranks = 1 if divided == "primary gate" else hosts
    assert 1 <= size <= 101 // 8 // ranks
    assert global_batch == size * ranks
    assert "measured throughput" in reason
    assert probes >= 1
    assert resumed[:2] == first[:2]
    assert "first started" in resumed[2]
    assert resumed[3] == probes, "a resumed run measures nothing"
    written = json.loads((tmp_path / "hosts/plan.json").read_text())["choices"]["batch_size"]
    assert written["value"] == size
    events = read_events(tmp_path / "hosts/events.jsonl")
    losses = [event["loss"] for event in by_step(events)]
    alone = BASE | {"batch_size": global_batch, "workers": 1, "epochs": 1}
    steps = -(-101 // global_batch)
    assert len(losses) == steps
    expected = run_in_one_process(Case("one", TASK, alone, steps), tmp_path / "one")
    assert losses == pytest.approx(expected.losses, rel=2e-6)


def test_a_start_that_ran_out_of_memory_measures_again_below_that_size(tmp_path: Path) -> None:
    """A later start of the same run, after a lost worker for one, keeps that size and halves it no more."""
    settings = BASE | DIVIDED["hosts"] | {"workers": 2}
    found = run_ranks(train, 2, tmp_path / "hosts", settings, 1)
    assert found[0] == found[1]
    measured, later = found[0]
    assert measured[0] <= 101 // 8 // 2 // 2
    assert later[0] == measured[0]


def test_the_api_does_not_measure_a_divided_model_in_one_process() -> None:
    settings = BASE | DIVIDED["hosts"] | {"workers": 2}
    with pytest.raises(UserError, match="2 workers divide the model"):
        Trainer(task=TASK, config=Config.of(**settings), quiet=True).find_batch_size()
