"""Hosts that save checkpoints together: threads of one process, with a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from experts.hosts.membership import GroupMembership
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.record.events.kinds import Checkpoint, Event, Warned
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.writer import CheckpointWriter
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.world import World

CPU = torch.device("cpu")


def make_state() -> TrainState:
    """Return the state of a small model after a step, with something to write for three hosts."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return TrainState(model, optimizer, Precision("fp32", CPU))


class RecordingLog:
    """Keeps the events of one host."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self.events: list[Event] = []
        self._on_event = on_event

    def write(self, *events: Event) -> None:
        for event in events:
            self.events.append(event)
            if self._on_event is not None:
                self._on_event(event)

    def close(self) -> None: ...

    @property
    def saved_steps(self) -> list[int]:
        return [event.step or 0 for event in self.events if isinstance(event, Checkpoint)]

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warned)]


class SaveHost:
    """One of several hosts that share a store and a folder."""

    def __init__(self, rank: int, size: int, store: Any, folder: Path, keep: int = 2) -> None:
        self.membership = GroupMembership()
        factory: Any = SimpleNamespace(membership=self.membership)
        self.world = World(rank, size, CPU, store=store, group_factory=factory)
        self.log = RecordingLog()
        self.num_signs = 0
        self.checkpoints = CheckpointStore(folder, keep, repair=rank == 0)
        self.state = make_state()

    def open_writer(self) -> CheckpointWriter:
        return CheckpointWriter(self.checkpoints, self.state, self.world, self.log, self.count_sign)

    def count_sign(self) -> None:
        self.num_signs += 1


def make_hosts(size: int, folder: Path, keep: int = 2) -> list[SaveHost]:
    store = HashStore()
    return [SaveHost(rank, size, store, folder, keep) for rank in range(size)]


def run_hosts(hosts: Sequence[SaveHost], action: Callable[[SaveHost], None]) -> list[BaseException | None]:
    """Run an action on all hosts at once. Return the error of each, or None."""
    errors: list[BaseException | None] = [None] * len(hosts)

    def run(index: int) -> None:
        try:
            action(hosts[index])
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def save_steps(*steps: int) -> Callable[[SaveHost], None]:
    """Return an action that saves these steps and waits for the last one."""

    def save(host: SaveHost) -> None:
        writer = host.open_writer()
        try:
            for step in steps:
                writer.save(Progress(step=step))
            writer.finish()
        finally:
            writer.close()

    return save
