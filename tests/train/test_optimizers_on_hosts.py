"""Optimizers and averages of weights where hosts hold shards, other experts, or nothing that is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experts.moe.bank import ExpertBank
from harness.hosts.ranks import run_ranks
from harness.runs.loop_runs import losses_in
from harness.runs.tiny_model import Tiny
from orchestrator.checkpoint.files import load
from orchestrator.config.settings import Config
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.tasks.task import Loss, TensorData
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker import build_evolution
from orchestrator.train.worker.run import Supervision, run_worker
from orchestrator.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "epochs": 100,
    "learning_rate": 1e-2,
    "schedule": "constant",
    "warmup_steps": 0,
    "deterministic": True,  # measures no speeds, so that the balancer decides the same in each run
    "precision": "fp32",  # of products under autocast: the model is in fp64
    "log_every": 1,
    "global_batch_size": 12,
    "early_stopping_metric": "accuracy:max",
    "evaluate_every": 1,
}


@dataclass(frozen=True)
class Judged(Tiny):
    """A task with validation data, and a metric that is tried before the state is restored."""

    def validation_data(self) -> TensorData:
        return TensorData(*(tensor[:10] for tensor in self.train_data().tensors))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = super().loss(model, batch)
        logits, _ = model(batch[0])
        right = (logits.argmax(-1) == batch[1]).sum()
        return Loss(found.sum, found.count, {"accuracy": right}, found.loads)


@dataclass(frozen=True)
class FusedAdamW(Judged):
    """A task whose own optimizer updates all parameters in one group together."""

    settings_read = ("learning_rate",)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=SETTINGS["learning_rate"], fused=True)


@dataclass(frozen=True)
class Skewed(Judged):
    """Samples that have much in common: one of two experts gets most of them, and so gets copies."""

    def train_data(self) -> TensorData:
        x, labels = super().train_data().tensors
        return TensorData(x + torch.linspace(-4, 4, x.shape[-1], dtype=x.dtype), labels)


@dataclass(frozen=True)
class OnlyExperts(Skewed):
    """A task that trains its experts alone: a host without experts trains nothing."""

    def build_model(self) -> nn.Module:
        model = super().build_model().requires_grad_(False)
        for module in model.modules():
            if isinstance(module, ExpertBank):
                module.requires_grad_(True)
        return model


@dataclass(frozen=True)
class OwnAdagrad(OnlyExperts):
    """The same with an optimizer that has state before the first step."""

    settings_read = ("learning_rate",)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=SETTINGS["learning_rate"])


@dataclass(frozen=True)
class Case:
    """A run: its task, and the settings of its strategy and its optimizer."""

    task: Tiny
    strategy: Mapping[str, Any]
    settings: Mapping[str, Any]


def run_on_hosts(
    rank: int, size: int, store: str, case: Case, run_dir: Path, changed: Mapping[str, Any]
) -> None:
    # Experts this small would win less than a change takes. The process ends with the run.
    build_evolution.CHANGE_SECONDS = 0.0
    settings: dict[str, Any] = {**SETTINGS, **case.strategy, **case.settings, **changed}
    settings |= {"workers": size, "batch_size": -(-settings["global_batch_size"] // size)}
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        run(world, case.task, run_dir, settings)


def run(world: World, task: Tiny, run_dir: Path, settings: Mapping[str, Any]) -> None:
    config = Config.of(**settings, run_dir=run_dir)
    prepared = Trainer(task=task, config=config, quiet=True).prepare()
    run_dir.mkdir(parents=True, exist_ok=True)
    log: Log = EventLog(run_dir / "events.jsonl") if world.is_main else SilentLog()
    run_worker(prepared, world, run_dir, log, Supervision())
    log.close()


def evaluated_in(run_dir: Path) -> list[float]:
    return [event["loss"] for event in of_kind(read_events(run_dir / "events.jsonl"), "evaluate")]


def assert_as_in_one_process(case: Case, run_dir: Path, tmp_path: Path, steps: int) -> None:
    """Losses of training and evaluation, weights, averages and all other state are those of one process."""
    expected = tmp_path / "one"
    run(World.single_process(), case.task, expected, {**SETTINGS, **case.settings, "max_steps": steps})
    assert losses_in(run_dir) == pytest.approx(losses_in(expected), rel=1e-9)
    assert evaluated_in(run_dir) == pytest.approx(evaluated_in(expected), rel=1e-9)
    found, wanted = (load(path / "checkpoints" / f"step_{steps:08d}") for path in (run_dir, expected))
    for kind in ("model", "optimizer"):
        assert found.tensors[kind].keys() == wanted.tensors[kind].keys()
        for key, tensor in wanted.tensors[kind].items():
            torch.testing.assert_close(found.tensors[kind][key], tensor, rtol=1e-7, atol=1e-9)
    is_averaged = any(key.startswith("ema/") for key in wanted.tensors["optimizer"])
    assert is_averaged == ("ema_decay" in case.settings)


def run_in_two_parts(case: Case, run_dir: Path, parts: Mapping[int, int]) -> None:
    """Run a case on some hosts, and further on another number: ``parts`` are the last steps by hosts."""
    for hosts, last_step in parts.items():
        run_ranks(run_on_hosts, hosts, case, run_dir, {"max_steps": last_step, "resume": "auto"})


SIZES = ((8, 8, 12, 8), (8, 12, 8))
AVERAGED = {"ema_decay": 0.8, "evaluate_ema": True}
SHARDED = {
    "sgd of shards": Case(
        Judged(SIZES),
        {"parallel_strategy": "data_parallel", "sharding": "zero2"},
        {"optimizer": "sgd", **AVERAGED},
    ),
    "sgd of a sharded dense part": Case(
        Judged(SIZES),
        {"parallel_strategy": "expert_parallel", "sharding": "zero3"},
        {"optimizer": "sgd", **AVERAGED},
    ),
    "adamw of a sharded dense part": Case(
        Judged(SIZES),
        {"parallel_strategy": "expert_parallel", "sharding": "zero2"},
        {"optimizer": "adamw", **AVERAGED},
    ),
    "a fused optimizer of the task": Case(
        FusedAdamW(SIZES), {"parallel_strategy": "expert_parallel", "sharding": "zero3"}, AVERAGED
    ),
}


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("name", SHARDED)
def test_a_run_with_shards_and_an_average_equals_one_process(name: str, tmp_path: Path) -> None:
    on_hosts = tmp_path / "hosts"
    run_in_two_parts(SHARDED[name], on_hosts, {2: 3, 3: 5})
    assert_as_in_one_process(SHARDED[name], on_hosts, tmp_path, steps=5)


ONE_LAYER: dict[str, Any] = {"top_k": 1, "samples": 600}
BALANCED = {"parallel_strategy": "expert_parallel", "rebalance": "on", "sharding": "zero3"}
TWO_EXPERTS = {
    "adamw of a sharded dense part": Case(
        Skewed(((8, 8),), **ONE_LAYER), BALANCED, {"global_batch_size": 90, **AVERAGED}
    ),
    "sgd of experts alone": Case(
        OnlyExperts(((8, 8),), **ONE_LAYER),
        {"parallel_strategy": "expert_parallel"},
        {"optimizer": "sgd", "global_batch_size": 90, **AVERAGED},
    ),
    "sgd of experts alone, which are copied": Case(
        OnlyExperts(((8, 8),), **ONE_LAYER),
        BALANCED,
        {"optimizer": "sgd", "global_batch_size": 90, **AVERAGED},
    ),
    "adagrad of the task": Case(
        OwnAdagrad(((8, 8),), **ONE_LAYER),
        {"parallel_strategy": "expert_parallel"},
        {"global_batch_size": 90, **AVERAGED},
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", TWO_EXPERTS)
def test_a_run_with_a_host_without_experts_equals_one_process(name: str, tmp_path: Path) -> None:
    """The third of three hosts has none at first, and a copy later where experts are balanced."""
    case = TWO_EXPERTS[name]
    on_hosts = tmp_path / "hosts"
    run_in_two_parts(case, on_hosts, {3: 10, 2: 12})
    assert_as_in_one_process(case, on_hosts, tmp_path, steps=12)
    changes = of_kind(read_events(on_hosts / "events.jsonl"), "expert")
    is_copied = any(2 in hosts for change in changes for hosts in change["hosts"])
    assert is_copied == ("rebalance" in case.strategy)
