"""The digits, with faults at exact moments inside a step, and a record of which samples each rank saw at which step. Named on the
command line as ``tests.support.faulty_task:Faulty``; the faults are those of the schedule that lies beside the run's folder.

A process knows its rank by the run's own record: the pid file that has its number. The step is told by the schedule of the learning
rate, which the loop asks at the beginning of each."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from time import sleep, time
from typing import Any, TextIO

import torch

from experts.balance import moe_layers
from orchestrator.config.settings import Config
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss, TensorData
from tests.support.faults import Fault, Phase, Post

MESSAGE = "a fault of the schedule"
_ROWS_TRAVEL = 2  # the exchange of a step that carries rows: counts go first


@dataclass
class Agent:
    """Carries out the faults of one process, and keeps its record."""

    run_dir: Path
    post: Post
    waiting: list[tuple[int, Fault]]
    pace: float = 0.0
    step: int = 0
    attempt: int = 0
    exchanges: int = 0
    _rank: int | None = None
    _record: TextIO | None = None
    _hooks: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, run_dir: Path) -> Agent:
        post = Post.beside(run_dir)
        inside = [(number, fault) for number, fault in enumerate(post.schedule().faults) if fault.when.inside]
        return cls(run_dir, post, inside, post.pace())

    def begins(self, step: int) -> None:
        """Of a step the loop asks twice: before it, and before the weights change."""
        self.step, self.attempt, self.exchanges = step, self.attempt + 1, 0
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def rank(self) -> int | None:
        """This process's place among those that train now; None in the driver, and in a spare."""
        if self._rank is None or not self._is_mine(self._file(self._rank)):
            mine = (path for path in self.run_dir.glob("logs/worker_*.pid") if self._is_mine(path))
            found = next(mine, None)
            self._rank = int(found.stem.removeprefix("worker_")) if found else None
        return self._rank

    def _file(self, rank: int) -> Path:
        return self.run_dir / "logs" / f"worker_{rank}.pid"

    def _is_mine(self, path: Path) -> bool:
        with suppress(OSError):
            return path.read_text(encoding="utf-8").strip() == str(os.getpid())
        return False

    def due(self, phase: Phase) -> bool:
        return any(fault.when.phase == phase and fault.when.step <= self.step for _, fault in self.waiting)

    def at(self, phase: Phase) -> None:
        """This process has come to a phase: what is due happens."""
        if not self.step or not self.due(phase) or (rank := self.rank()) is None:
            return
        for number, fault in list(self.waiting):
            if fault.when.phase == phase and fault.when.step <= self.step and rank in fault.whom.ranks:
                self.waiting.remove((number, fault))
                if self.post.claim(number, fault, rank, os.getpid(), self.step):
                    happen(fault)

    def watch_backward(self, parameter: torch.Tensor) -> None:
        """Of a parameter in the middle of the model: its gradient is there when half the pass is over."""
        if self.due("backward"):
            self._hooks.append(parameter.register_hook(lambda _: self.at("backward")))

    def saw(self, ids: list[int]) -> None:
        rank = self.rank()
        if rank is None or not self.step:
            return
        if self._record is None:
            self._record = (self.post.folder / "seen" / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")
        line = {
            "time": time(),
            "rank": rank,
            "step": self.step,
            "attempt": self.attempt,
            "pid": os.getpid(),
            "ids": ids,
        }
        self._record.write(json.dumps(line) + "\n")
        self._record.flush()


def happen(fault: Fault) -> None:
    match fault.what:
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exception":
            raise RuntimeError(MESSAGE)
        case "oom":
            raise torch.OutOfMemoryError(MESSAGE)
        case "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case _:
            raise ValueError(f"{fault.what} is not to be had inside a process")


# --- moments that no task sees


AGENTS: list[Agent] = []  # the one of this process; a process may load its task more than once


def _in_exchange(agent: Agent) -> None:
    agent.exchanges += 1
    if agent.exchanges >= _ROWS_TRAVEL:
        agent.at("exchange")


def _gathering(agent: Agent) -> None:
    if agent.rank() != 0:  # the main one is hit in the middle of writing
        agent.at("checkpoint")


MOMENTS: tuple[tuple[str, str, Callable[[Agent], None], bool], ...] = (
    ("experts.group", "Group.all_to_all", _in_exchange, True),
    ("orchestrator.train.checkpoint.snapshots", "_fill", lambda agent: agent.at("snapshot"), True),
    ("orchestrator.train.checkpoint.writer", "capture", _gathering, False),
    ("orchestrator.train.checkpoint.store", "_write_json", lambda agent: agent.at("checkpoint"), False),
)
"""Module and name of a function, what to do when it is called, and whether that is after it has begun its work."""


def listen() -> None:
    """Once in a process: be told of the moments. A name that is gone is an error: a phase that never comes would pass every test."""
    if not AGENTS:
        for module, name, tell, after in MOMENTS:
            *owners, last = name.split(".")
            owner: Any = importlib.import_module(module)
            for part in owners:
                owner = getattr(owner, part)
            setattr(owner, last, _told(getattr(owner, last), tell, after))


def _told(real: Callable[..., Any], tell: Callable[[Agent], None], after: bool) -> Callable[..., Any]:
    @wraps(real)
    def call(*arguments: Any, **named: Any) -> Any:
        if not after:
            tell(AGENTS[-1])
        result = real(*arguments, **named)
        if after:
            tell(AGENTS[-1])
        return result

    return call


class Faulty(Digits):
    """Digits whose samples have numbers."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        listen()
        self.agent = Agent.of(Path(str(config.run.run_dir)))
        AGENTS[:] = [self.agent]

    def schedule(self) -> Callable[[int], float]:
        def factor(step: int) -> float:
            self.agent.begins(step + 1)
            return 1.0

        return factor

    def train_data(self) -> TensorData:
        images, labels = self._train.tensors
        return TensorData(images, labels, torch.arange(len(labels)))

    def loss(self, model: Any, batch: Any) -> Loss:
        images, labels, *ids = batch
        if model.training and ids and self.agent.rank() is not None:
            if not moe_layers(model)[0][
                1
            ].context.step.dummy:  # samples that stand in for none count for nothing
                self.agent.saw(ids[0].tolist())
            self.agent.at("forward")
            sleep(self.agent.pace)
            self.agent.watch_backward(model.blocks[-1].norm.weight)
        return super().loss(model, (images, labels))
