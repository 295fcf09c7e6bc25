"""Runs on any number of hosts over gloo, and the first bit in which two of them differ.

A run is a list of legs: each continues from the newest checkpoint, on hosts of its own number."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from harness.hosts.ranks import run_ranks
from harness.runs.combinations import run_part
from harness.runs.records import by_step
from orchestrator.checkpoint.files import load
from orchestrator.config.settings import Config
from orchestrator.record.events.kinds import JsonEvent
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.tasks.task import Task
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker import build_evolution
from orchestrator.trainer import Trainer

ON_HOSTS_ALONE = ("parallel_strategy", "recovery", "expert_replicas", "rebalance", "placement")
"""Settings that one process has no use for."""
_OF_STEP = ("loss", "grad_norm", "metrics", "lr", "samples")
_OF_LOAD = ("loads", "ids")
_OF_EVALUATION = ("loss", "metrics")
_OF_CHANGE = ("step", "change", "layer", "ids", "parents", "loss_before", "loss_after", "output_change")
_ON_HOSTS = ("moved", "copied")
"""Changes of the place of experts, which one process does not make."""

State = Mapping[str, bytes]
"""The content of each tensor of a checkpoint."""


@dataclass(frozen=True)
class Leg:
    """A part of a run, until a step."""

    hosts: int
    last_step: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A run with its task, its settings, and its legs one after another."""

    folder: Path
    task: Task | None
    settings: Mapping[str, Any]
    legs: Sequence[Leg]
    plant: Callable[[int], AbstractContextManager[Any]] | None = None
    """Plants an error in the process of a rank, for a block."""


def run_all(runs: Sequence[Run], timeout: float = 850.0) -> None:
    """Run all of these, one after another, in as many processes as the largest of them needs."""
    most_hosts = max(leg.hosts for run in runs for leg in run.legs)
    run_ranks(_run_on_rank, most_hosts, runs, timeout=timeout)


def _run_on_rank(rank: int, size: int, store: str, runs: Sequence[Run]) -> None:
    # Experts this small would win less than a move takes. The process ends with the runs.
    build_evolution.CHANGE_SECONDS = 0.0
    for number, run in enumerate(runs):
        with run.plant(rank) if run.plant else nullcontext():
            _run_legs(run, rank, Path(f"{store}-{number}"))


def _run_legs(run: Run, rank: int, store: Path) -> None:
    for number, leg in enumerate(run.legs):
        end_of_leg = store.with_name(f"{store.name}-{number}.end")
        if rank < leg.hosts:
            with _world(rank, leg.hosts, f"{store}-{number}") as world:
                run_part(_prepare(run, leg), world, run.folder)
            if rank == 0:
                end_of_leg.touch()
        _wait_for(end_of_leg)


def _world(rank: int, hosts: int, store: str) -> AbstractContextManager[World]:
    if hosts == 1:
        return nullcontext(World.single_process())
    return process_group_world(file_store(store, hosts), rank, hosts, torch.device("cpu"), "gloo", 30)


def _prepare(run: Run, leg: Leg) -> Any:
    settings = {**run.settings, **leg.settings}
    if leg.hosts == 1:
        settings = {name: value for name, value in settings.items() if name not in ON_HOSTS_ALONE}
    settings |= {"workers": leg.hosts, "max_steps": leg.last_step, "run_dir": run.folder, "resume": "auto"}
    return Trainer(task=run.task, config=Config.of(**settings), quiet=True).prepare()


def _wait_for(path: Path) -> None:
    """Wait until the main host has ended its leg: the next one needs its checkpoint.

    The limit is that of ``run_all``, which ends all ranks."""
    while not path.exists():
        time.sleep(0.01)


# What a run has come to


def state_of(checkpoint: Path) -> State:
    """Return the weights, buffers and optimizer state of a checkpoint."""
    tensors = load(checkpoint).tensors
    return {
        f"{kind}/{name}": _content(tensor)
        for kind in ("model", "optimizer")
        for name, tensor in tensors[kind].items()
    }


def _content(tensor: torch.Tensor) -> bytes:
    form = f"{tensor.dtype} {tuple(tensor.shape)} "
    # As bytes, so that NaN equals itself, and -0 differs from 0.
    return form.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def checkpoints_of(run_dir: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their step."""
    found = sorted((run_dir / "checkpoints").glob("step_*"))
    return {int(path.name.removeprefix("step_")): path for path in found}


def newest_state(run_dir: Path) -> State:
    return state_of(checkpoints_of(run_dir)[max(checkpoints_of(run_dir))])


def sha256_of(state: State) -> str:
    """Return one hash of all tensors of a state."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + b"\0" + state[name] + b"\0")
    return digest.hexdigest()


def changes_of(run_dir: Path) -> list[str]:
    """Return the changes of experts of a run, in order."""
    return [event["change"] for event in of_kind(read_events(run_dir / "events.jsonl"), "expert")]


def own_changes_of(run_dir: Path) -> list[JsonEvent]:
    """Return the changes of experts without those of their places, which follow the hosts."""
    events = of_kind(read_events(run_dir / "events.jsonl"), "expert")
    return [event for event in events if event["change"] not in _ON_HOSTS]


# The first difference


def first_difference(run_dir: Path, other: Path) -> str | None:
    """Return the first thing in which two runs differ, with its step; None if they are equal to the bit."""
    return next(differences(run_dir, other), None)


def differences(run_dir: Path, other: Path) -> Iterator[str]:
    """Yield the differences of two runs: of steps, evaluations, changes of experts, and checkpoints."""
    events, others = (read_events(path / "events.jsonl") for path in (run_dir, other))
    for kind, names in (("step", _OF_STEP), ("load", _OF_LOAD)):
        yield from _of_events(by_step(events, kind), by_step(others, kind), kind, names)
    found, wanted = _in_both(by_step(events, "evaluate"), by_step(others, "evaluate"))
    yield from _of_events(found, wanted, "evaluate", _OF_EVALUATION)
    yield from _of_events(own_changes_of(run_dir), own_changes_of(other), "expert", _OF_CHANGE)
    yield from _of_checkpoints(checkpoints_of(run_dir), checkpoints_of(other))


def _of_events(
    events: Sequence[JsonEvent], others: Sequence[JsonEvent], kind: str, names: Sequence[str]
) -> Iterator[str]:
    for event, other in zip_longest(events, others):
        if event is None or other is None:
            alone = event or other or {}
            yield f"step {alone['step']}: {kind} of one run alone"
            continue
        for name in names:
            # As text, so that NaN equals itself.
            if repr(event.get(name)) != repr(other.get(name)):
                yield f"step {event['step']}: {kind}: {name} {event.get(name)!r} and {other.get(name)!r}"


def _in_both(events: Sequence[JsonEvent], others: Sequence[JsonEvent]) -> tuple[list[JsonEvent], ...]:
    """Return the events of the steps that both have: an interrupted run evaluates at the end of each leg."""
    both = {event["step"] for event in events} & {event["step"] for event in others}
    return tuple([event for event in each if event["step"] in both] for each in (events, others))


def _of_checkpoints(paths: Mapping[int, Path], others: Mapping[int, Path]) -> Iterator[str]:
    for step in sorted(paths.keys() & others.keys()):
        found = differing_tensors(state_of(paths[step]), state_of(others[step]))
        yield from (f"step {step}: {each}" for each in found)
    if max(paths) != max(others):
        yield f"step {max(paths)}: the newest checkpoint, {max(others)} in the other run"


def differing_tensors(state: State, other: State) -> Iterator[str]:
    """Yield the names of tensors that differ. The name of a weight of an expert has its layer and its id."""
    for name in sorted(state.keys() | other.keys()):
        if name not in state or name not in other:
            yield f"{name} of one run alone"
        elif state[name] != other[name]:
            yield f"{name} differs in {_num_differing(state[name], other[name])} bytes"


def _num_differing(content: bytes, other: bytes) -> int:
    return sum(a != b for a, b in zip(content, other, strict=False)) + abs(len(content) - len(other))
