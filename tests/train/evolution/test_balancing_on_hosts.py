"""Moves and copies that the balancer decides on real processes: they happen, and change no result."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.hosts.ranks import run_ranks
from harness.runs.loop_runs import losses_in
from harness.runs.tiny_model import Tiny
from orchestrator.config.settings import Config
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.tasks.task import TensorData
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world
from orchestrator.train.worker import build_evolution
from orchestrator.train.worker.run import Supervision, run_worker
from orchestrator.trainer import Trainer

STEPS = 100
HOSTS = (2, 3)
GLOBAL_BATCH = 90


@dataclass(frozen=True)
class Skewed(Tiny):
    """Samples that have much in common, so that the gates choose a few experts for most of them."""

    def train_data(self) -> TensorData:
        x, labels = super().train_data().tensors
        common = torch.linspace(-4, 4, x.shape[-1], dtype=x.dtype)
        return TensorData(x + common, labels)


TASK = Skewed(((8, 8, 12, 8, 12, 8, 8), (8, 12, 8)), top_k=1, samples=600, dtype=torch.float32)
"""One of the three experts gets most tokens: it needs a copy."""
SETTINGS: dict[str, Any] = {
    "parallel_strategy": "expert_parallel",
    "global_batch_size": GLOBAL_BATCH,
    "epochs": 100,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "schedule": "constant",
    "precision": "fp32",
    "deterministic": True,  # measures no speeds, so that the decisions are the same in each run
    "log_every": 1,
    "checkpoint_every": 50,
    "keep": 100,
}


def run_on_host(rank: int, size: int, store: str, run_dir: Path, settings: dict[str, Any]) -> None:
    # Experts this small would win less than a change takes. The process ends with the run.
    build_evolution.CHANGE_SECONDS = 0.0
    batch = {"workers": size, "batch_size": GLOBAL_BATCH // size}
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        config = Config.of(**SETTINGS | batch | settings, run_dir=run_dir)
        prepared = Trainer(task=TASK, config=config, quiet=True).prepare()
        run_dir.mkdir(parents=True, exist_ok=True)
        log: Log = EventLog(run_dir / "events.jsonl") if world.is_main else SilentLog()
        run_worker(prepared, world, run_dir, log, Supervision())
        log.close()


@pytest.fixture(scope="module", params=HOSTS, ids=lambda hosts: f"{hosts} hosts")
def balanced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose experts move and are copied."""
    run_dir = tmp_path_factory.mktemp("balanced") / str(request.param)
    run_ranks(run_on_host, request.param, run_dir, {"rebalance": "on"})
    return run_dir


def changes_in(run_dir: Path) -> list[dict[str, Any]]:
    return of_kind(read_events(run_dir / "events.jsonl"), "expert")


@pytest.mark.extended(but_first=1)
def test_experts_move_and_are_copied_and_the_losses_stay(balanced: Path, tmp_path: Path) -> None:
    assert {change["change"] for change in changes_in(balanced)} == {"moved", "copied"}
    run_ranks(run_on_host, int(balanced.name), tmp_path / "run", {"rebalance": "off"})
    assert not changes_in(tmp_path / "run")
    assert len(losses_in(balanced)) == STEPS
    assert losses_in(balanced) == pytest.approx(losses_in(tmp_path / "run"), rel=1e-5)


@pytest.mark.extended
def test_a_deterministic_run_is_the_same_to_the_bit(balanced: Path, tmp_path: Path) -> None:
    again = tmp_path / "run"
    run_ranks(run_on_host, int(balanced.name), again, {"rebalance": "on"})
    assert losses_in(again) == losses_in(balanced)
    assert [_without_times(c) for c in changes_in(again)] == [_without_times(c) for c in changes_in(balanced)]
    name = f"step_{STEPS:08d}"
    for file in (balanced / "checkpoints" / name).glob("*.safetensors"):
        assert file.read_bytes() == (again / "checkpoints" / name / file.name).read_bytes(), file.name


@pytest.mark.extended
def test_a_run_with_copies_is_resumed_to_the_bit(balanced: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(balanced, run_dir, ignore=shutil.ignore_patterns(f"step_{STEPS:08d}", "events.jsonl"))
    run_ranks(run_on_host, int(balanced.name), run_dir, {"rebalance": "on", "resume": "auto"})
    assert losses_in(run_dir) == losses_in(balanced)[STEPS // 2 :]
    later = [change for change in changes_in(balanced) if change["step"] > STEPS // 2]
    assert [_without_times(c) for c in changes_in(run_dir)] == [_without_times(c) for c in later]


def _without_times(change: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in change.items() if name not in ("time", "seconds")}
