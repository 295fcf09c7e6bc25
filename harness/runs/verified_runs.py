"""Reproducible runs of a tiny model with planted faults, for ``orchestrator verify`` to find."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from harness.runs.combinations import Validated
from orchestrator.config.settings import Config
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world
from orchestrator.train.optim.exact_sums import ExactSums
from orchestrator.train.stepper import Stepper
from orchestrator.train.worker import manifest
from orchestrator.train.worker.run import Supervision, run_worker
from orchestrator.trainer import Trainer

SETTINGS: Mapping[str, Any] = {
    "reproducible": True,
    "epochs": 100,
    "max_steps": 12,
    "batch_size": 2,
    "global_batch_size": 6,
    "learning_rate": 1e-2,
    "schedule": "constant",
    "checkpoint_every": 4,
    "keep": 50,
    "evaluate_every": 1000,
    "digest_every": 2,
    "trackers": (),
    "monitor_gpu": False,
    "gpu_mode": "cpu",
    "plots": "off",
}
TRAIN_FLAGS = (
    *("--reproducible", "--max-steps", "4", "--checkpoint-every", "2", "--digest-every", "1"),
    *("--task", "synthetic", "--samples", "24", "--sequence-length", "0", "--width", "8", "--layers", "1"),
    *("--experts", "3", "--expert-hidden-size", "4", "--global-batch-size", "6", "--batch-size", "2"),
    *("--gpu-mode", "cpu", "--no-monitor-gpu", "--plots", "off", "--trackers"),
)
"""A short run from the command line."""
FLIPPED = ("blocks.0.ffn.bank.up", 3)
"""The tensor and the expert whose bit ``flipped_bit`` flips."""


def tiny_task(kind: type[Validated] = Validated) -> Validated:
    """Return a task with uneven experts, whose sizes divide nothing."""
    return kind(((3, 5, 3, 4, 3), (4, 2)), samples=16, dtype=torch.float32, tokens=3)


@dataclass(frozen=True)
class WithDropout(Validated):
    """The tiny model with random numbers in each pass."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.add_module("stem", nn.Sequential(model.get_submodule("stem"), nn.Dropout(0.3)))
        return model


@contextmanager
def no_fault() -> Iterator[None]:
    yield


@contextmanager
def flipped_bit(step: int) -> Iterator[None]:
    """Flip the lowest bit of a weight of expert 3 after a step, on the host that has it."""
    run = Stepper.run

    def run_and_flip(self: Stepper, batch: Any, index: int, *more: Any) -> Any:
        totals = run(self, batch, index, *more)
        if index + 1 == step:
            _, layer = moe_layers(self.strategy.model)[0]
            for group, role, stack in layer.bank.stacks():
                if role == "up" and FLIPPED[1] in group.rows:
                    stack.data[group.rows.index(FLIPPED[1])].view(torch.int32).view(-1)[5] ^= 1
        return totals

    with patch.object(Stepper, "run", run_and_flip):
        yield


@contextmanager
def sums_in_order_of_ranks() -> Iterator[None]:
    """Add up the gradients of a worker's micro-batches as floats: then the sums of the workers are added."""

    def add(self: ExactSums, parameter: nn.Parameter, gradient: Tensor) -> None:
        so_far = self._sums.get(parameter)
        total = gradient.detach().clone()
        if so_far is not None:
            total += (so_far.double() * 2.0**self.exponent).to(total.dtype)
        self._largest.append(total.abs().max().double().view(1))
        self._sums[parameter] = total.double().mul_(2.0**-self.exponent).round_().to(torch.int64)

    with patch.object(ExactSums, "add", add):
        yield


@contextmanager
def numbers_by_rank() -> Iterator[None]:
    """Draw the random numbers of a micro-batch by rank."""
    seed = Stepper._seed_micro_batch

    def seed_by_rank(self: Stepper, *arguments: Any) -> None:
        seed(self, *arguments)
        torch.manual_seed(torch.initial_seed() % 2**31 + self.world.rank)

    with patch.object(Stepper, "_seed_micro_batch", seed_by_rank):
        yield


@contextmanager
def a_device_of_its_own() -> Iterator[None]:
    """Let each process have a device of another kind."""
    with patch.object(manifest, "device_kind", lambda _: f"device of process {os.getpid()}"):
        yield


def record_on_hosts(
    rank: int,
    size: int,
    store: str,
    task: Validated,
    settings: Mapping[str, Any],
    run_dir: Path,
    fault: Callable[..., Any] = no_fault,
    arguments: tuple[Any, ...] = (),
) -> None:
    """Train as one host of a group that writes the run folder, with a fault."""
    strategy = {"workers": size, "parallel_strategy": "expert_parallel"}
    config = Config.of(**{**SETTINGS, **strategy, **settings, "run_dir": run_dir})
    prepared = Trainer(task=task, config=config, quiet=True).prepare()
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        log: Log = SilentLog()
        if world.is_main:
            run_dir.mkdir(parents=True, exist_ok=True)
            log = EventLog(run_dir / "events.jsonl")
        with closing(log), fault(*arguments):
            run_worker(prepared, world, run_dir, log, Supervision())


def record_here(run_dir: Path, task: Validated | None = None, **settings: Any) -> Path:
    """Train in this process, and return the run folder."""
    config = Config.of(**{**SETTINGS, **settings, "run_dir": run_dir})
    Trainer(task=task or tiny_task(), config=config, quiet=True).fit()
    return run_dir
