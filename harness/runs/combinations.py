"""Combinations of settings that cover each pair of values, and short runs of them on hosts and in one
process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from harness.hosts.gpu_ranks import rank_device
from harness.runs.records import by_step
from harness.runs.tiny_model import Tiny
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.tasks.task import Task, TensorData
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker.run import Supervision, run_worker
from orchestrator.trainer import Trainer

Combination = Mapping[str, Any]
"""A value of each axis."""
Pair = tuple[str, Any, str, Any]

_CANDIDATES = 400  # combinations drawn for each one that is taken


def covering(
    axes: Mapping[str, Sequence[Any]], is_allowed: Callable[[Combination], bool]
) -> list[Combination]:
    """Return few combinations that have each pair of values of two axes, where that is allowed.

    Greedy: of some random combinations around a pair that is missing, the one with most missing pairs."""
    draw = random.Random(0)
    missing = {
        (first, a, second, b)
        for first, second in combinations(axes, 2)
        for a in axes[first]
        for b in axes[second]
    }
    chosen: list[Combination] = []
    for pair in sorted(missing, key=str):
        if pair not in missing:
            continue
        first, a, second, b = pair
        found = [c for c in _drawn(axes, {first: a, second: b}, draw) if is_allowed(c)]
        if not found:
            missing.discard(pair)
            continue
        best = max(found, key=lambda combination: len(missing & pairs_of(combination)))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def _drawn(
    axes: Mapping[str, Sequence[Any]], fixed: Combination, draw: random.Random
) -> Iterator[Combination]:
    for _ in range(_CANDIDATES):
        yield {axis: fixed.get(axis, draw.choice(values)) for axis, values in axes.items()}


def pairs_of(combination: Combination) -> set[Pair]:
    return {
        (first, combination[first], second, combination[second])
        for first, second in combinations(combination, 2)
    }


@dataclass(frozen=True)
class Validated(Tiny):
    """The tiny model with validation data."""

    def validation_data(self) -> TensorData:
        return self.train_data()


@dataclass(frozen=True)
class Outcome:
    """The losses of a run's steps and evaluations, or why it was refused or failed."""

    losses: tuple[float, ...] = ()
    evaluated: tuple[float, ...] = ()
    changes: tuple[str, ...] = ()
    """Changes of experts, in order."""
    refused: str = ""
    failed: str = ""


@dataclass(frozen=True)
class Case:
    """A run in two parts: ``steps`` in all, the last of them resumed from a checkpoint."""

    name: str
    task: Task | None
    settings: Mapping[str, Any]
    steps: int = 3


class _SharedGpu(Trainer):
    """Plans for as many GPUs as workers: those of a test share one."""

    def _take_inventory(self) -> Inventory:
        found = super()._take_inventory()
        workers = self.resolved.config.parallel.workers
        return replace(found, gpus=found.gpus[:1] * (workers if isinstance(workers, int) else 1))


def run_in_one_process(case: Case, run_dir: Path, device: str = "cpu") -> Outcome:
    return _run(case, run_dir, lambda part: nullcontext(World.single_process(device)))


def run_on_host(
    rank: int, size: int, store: str, cases: Sequence[Case], folder: Path, backend: str = "gloo"
) -> dict[str, Outcome]:
    """Run cases one after another, each part in a group of its own: on the CPU, or with nccl on a GPU."""
    device = torch.device("cpu") if backend == "gloo" else rank_device(rank, size)
    outcomes: dict[str, Outcome] = {}
    for number, case in enumerate(cases):

        def open_world(part: int, number: int = number) -> AbstractContextManager[World]:
            path = f"{store}-{number}-{part}"
            return process_group_world(file_store(path, size), rank, size, device, backend, 60)

        outcomes[case.name] = _run(case, folder / f"hosts-{number}", open_world)
    return outcomes


def _run(case: Case, run_dir: Path, open_world: Callable[[int], AbstractContextManager[World]]) -> Outcome:
    """Run this process's part of a case."""
    for steps in (case.steps - 1, case.steps):
        settings = {**case.settings, "max_steps": steps, "run_dir": run_dir}
        settings |= {"resume": "auto"} if steps == case.steps else {}
        try:
            prepared = _SharedGpu(task=case.task, config=Config.of(**settings), quiet=True).prepare()
        except (UserError, ResourceError) as error:
            return Outcome(refused=str(error))
        try:
            with open_world(steps) as world:
                run_part(prepared, world, run_dir)
        except Exception as error:
            return Outcome(failed=f"until step {steps}: {type(error).__name__}: {error}"[:400])
    if not world.is_main:
        return Outcome()
    events = read_events(run_dir / "events.jsonl")
    return Outcome(
        tuple(event["loss"] for event in by_step(events)),
        tuple(event["loss"] for event in of_kind(events, "evaluate")),
        tuple(event["change"] for event in of_kind(events, "expert")),
    )


def run_part(prepared: PreparedRun, world: World, run_dir: Path) -> None:
    log: Log = SilentLog()
    if world.is_main:
        run_dir.mkdir(parents=True, exist_ok=True)
        log = EventLog(run_dir / "events.jsonl")
    with closing(log):
        run_worker(prepared, world, run_dir, log, Supervision())
