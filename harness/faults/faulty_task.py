"""The tasks digits and text with faults at exact moments inside a step, and a record of the samples that
each rank saw.

They are named on the command line as ``harness.faults.faulty_task:FaultyDigits``. The faults are those
of the schedule in the folder next to the run's. A process finds its rank by the pid file that holds
its number. It learns the step from the learning-rate schedule, which the loop calls at the
beginning of each step."""

from __future__ import annotations

import ctypes
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
from torch import nn

from experts.balance import moe_layers
from harness.faults.fault_schedule import Fault, FaultFolder, Phase
from orchestrator.config.settings import Config
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss, Task, TensorData
from orchestrator.tasks.text import Text

_FOR_EVER_S = 3600.0
_MAX_QUEUED_KERNELS = 600
"""Launching more than about a thousand would block the host, too."""
SAMPLES = 7190
"""Training samples of the digits: 1,438 images, each there five times."""
MESSAGE = "a fault of the schedule"
_ENGINE = "orchestrator.train.evolution.engine"
_EXECUTION = "orchestrator.train.evolution.execution"
_SURGERY = "experts.surgery.surgery"
_BUILD_EVOLUTION = "orchestrator.train.worker.build_evolution"
_ROW_EXCHANGE = 2
"""The exchange of a step that sends rows; the one before sends counts."""


@dataclass
class FaultAgent:
    """Carries out the faults of one process and records its samples."""

    run_dir: Path
    folder: FaultFolder
    waiting: list[tuple[int, Fault]]
    """Faults that have not happened yet, with their numbers."""
    pace_s: float = 0.0
    step: int = 0
    attempt: int = 0
    exchanges: int = 0
    is_validating: bool = False
    """Whether a change of experts is being judged."""
    _rank: int | None = None
    _record: TextIO | None = None
    _hooks: list[Any] = field(default_factory=list)

    @classmethod
    def of_run(cls, run_dir: Path) -> FaultAgent:
        folder = FaultFolder.of_run(run_dir)
        faults = enumerate(folder.schedule().faults)
        waiting = [(number, fault) for number, fault in faults if fault.moment.inside]
        return cls(run_dir, folder, waiting, folder.pace_s())

    def begin_step(self, step: int) -> None:
        """Begin a step.

        The loop asks for the learning rate twice: before the step, and before the weights change."""
        self.step = step
        self.attempt += 1
        self.exchanges = 0
        self.is_validating = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def rank(self) -> int | None:
        """Return the rank of this process in the current group; None in the driver and in a spare."""
        if self._rank is None or not self._is_own(self._pid_file(self._rank)):
            paths = self.run_dir.glob("logs/worker_*.pid")
            path = next((path for path in paths if self._is_own(path)), None)
            self._rank = int(path.stem.removeprefix("worker_")) if path else None
        return self._rank

    def _pid_file(self, rank: int) -> Path:
        return self.run_dir / "logs" / f"worker_{rank}.pid"

    def _is_own(self, pid_file: Path) -> bool:
        with suppress(OSError):
            return pid_file.read_text(encoding="utf-8").strip() == str(os.getpid())
        return False

    def has_fault(self, phase: Phase) -> bool:
        return any(self._is_due(fault, phase) for _, fault in self.waiting)

    def _is_due(self, fault: Fault, phase: Phase) -> bool:
        return fault.moment.phase == phase and fault.moment.step <= self.step

    def enter_phase(self, phase: Phase) -> None:
        """Carry out the faults that are due in this phase."""
        if not self.step or not self.has_fault(phase):
            return
        rank = self.rank()
        if rank is None:
            return
        for number, fault in list(self.waiting):
            if self._is_due(fault, phase) and rank in fault.victim.ranks:
                self.waiting.remove((number, fault))
                if self.folder.claim(number, fault, rank, os.getpid(), self.step):
                    carry_out(fault)

    def watch_backward(self, parameter: torch.Tensor) -> None:
        """Enter the backward phase when the gradient of a parameter in the middle of the model is
        ready."""
        if self.has_fault("backward"):
            self._hooks.append(parameter.register_hook(lambda _: self.enter_phase("backward")))

    def watch_pass(self, model: Any, ids: torch.Tensor | None) -> None:
        """Record the samples of a forward pass, and carry out what is due in it."""
        if not model.training:
            self.enter_phase("validate" if self.is_validating else "evaluate")
            return
        if ids is None or self.rank() is None:
            return
        layers = moe_layers(model)
        # A dummy pass computes samples that count nowhere. Jobs of dense models have none.
        if not (layers and layers[0][1].context.step.dummy):
            self.record_samples(ids.tolist())
        self.enter_phase("forward")
        sleep(self.pace_s)
        self.watch_backward(next(model.blocks[-1].parameters()))
        if not layers:
            # A dense model exchanges no rows: all-reduces after its pass sum gradients.
            self.exchanges = _ROW_EXCHANGE

    def record_samples(self, ids: list[int]) -> None:
        rank = self.rank()
        if rank is None or not self.step:
            return
        if self._record is None:
            self._record = (self.folder.folder / "seen" / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")
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


def carry_out(fault: Fault) -> None:
    match fault.kind:
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exception":
            raise RuntimeError(MESSAGE)
        case "oom":
            raise torch.OutOfMemoryError(MESSAGE)
        case "delay":
            sleep(_seconds(fault))
        case "gil":
            # ctypes releases the lock in calls of a CDLL, and holds it in those of a PyDLL.
            ctypes.PyDLL(None).sleep(round(_seconds(fault)))
        case "kernel":
            hang_kernel(_seconds(fault))
        case "compile":
            compile_slowly(_seconds(fault))
        case "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case _:
            raise ValueError(f"{fault.kind} cannot happen inside a process")


def _seconds(fault: Fault) -> float:
    return _FOR_EVER_S if fault.wakes_after_s is None else fault.wakes_after_s


def hang_kernel(seconds: float) -> None:
    """Queue kernels that occupy the device's stream for a time."""
    cycles_per_second = 2_000_000_000
    for _ in range(min(_MAX_QUEUED_KERNELS, round(seconds))):
        torch.cuda._sleep(cycles_per_second)


def compile_slowly(seconds: float) -> None:
    """Let torch compile a function with a backend that takes its time."""

    def compile_graph(graph: Any, _: Any) -> Any:
        sleep(seconds)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=compile_graph)(torch.zeros(2))


# Phases that a task does not see: functions of the product are wrapped.


AGENTS: list[FaultAgent] = []
"""The agent of this process. A process may load its task more than once; the last agent counts."""


def _enter_exchange(agent: FaultAgent) -> None:
    agent.exchanges += 1
    agent.enter_phase("exchange" if agent.exchanges >= _ROW_EXCHANGE else "counts")


def _enter_gradients(agent: FaultAgent) -> None:
    """In a step, an all-reduce after the exchanges sums gradients."""
    if agent.exchanges >= _ROW_EXCHANGE:
        agent.enter_phase("gradients")


def _enter_checkpoint(agent: FaultAgent) -> None:
    # Rank 0 is hit later, in the middle of writing.
    if agent.rank() != 0:
        agent.enter_phase("checkpoint")


def _begin_validation(agent: FaultAgent) -> None:
    agent.is_validating = True


def _end_validation(agent: FaultAgent) -> None:
    agent.is_validating = False


@dataclass(frozen=True)
class WrappedFunction:
    """A function whose call marks a phase."""

    module: str
    name: str
    enter: Callable[[FaultAgent], None]
    after_call: bool
    """Whether the phase is entered after the call, when the work that it starts is under way."""


WRAPPED = (
    WrappedFunction(
        "orchestrator.train.data.indexed",
        "_GatherRows.__call__",
        lambda agent: agent.enter_phase("data"),
        False,
    ),
    WrappedFunction("experts.hosts.group", "Group.all_to_all", _enter_exchange, True),
    WrappedFunction("experts.hosts.group", "Group.all_reduce", _enter_gradients, True),
    WrappedFunction(
        "orchestrator.train.checkpoint.snapshot_format",
        "CollectedPart.copy_into",
        lambda agent: agent.enter_phase("snapshot"),
        True,
    ),
    WrappedFunction("orchestrator.train.checkpoint.writer", "capture", _enter_checkpoint, False),
    WrappedFunction(
        "orchestrator.checkpoint.files",
        "_write_json",
        lambda agent: agent.enter_phase("checkpoint"),
        False,
    ),
    WrappedFunction(_ENGINE, "measure_layers", lambda agent: agent.enter_phase("measure"), False),
    WrappedFunction(_SURGERY, "exchange_experts", lambda agent: agent.enter_phase("before move"), False),
    WrappedFunction(_SURGERY, "exchange_experts", lambda agent: agent.enter_phase("after move"), True),
    WrappedFunction(_SURGERY, "change_gate", lambda agent: agent.enter_phase("gate"), False),
    WrappedFunction(_EXECUTION, "change_layer", _begin_validation, True),
    WrappedFunction(_EXECUTION, "Execution._record", _end_validation, False),
    WrappedFunction(_SURGERY, "LayerBackup.restore", lambda agent: agent.enter_phase("undo"), False),
)


def wrap_functions() -> None:
    """Wrap the functions, once per process.

    A missing name is an error: a phase that never comes would pass any test."""
    if AGENTS:
        return
    for function in WRAPPED:
        owner, name = find_owner(function)
        setattr(owner, name, _wrap(getattr(owner, name), function))
    # The experts are so small that few moves would win the time that a change takes.
    build_evolution: Any = importlib.import_module(_BUILD_EVOLUTION)
    build_evolution.CHANGE_SECONDS = 0.0


def find_owner(function: WrappedFunction) -> tuple[Any, str]:
    """Return the module or class that a function belongs to, and its name there."""
    *owners, name = function.name.split(".")
    owner: Any = importlib.import_module(function.module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, name


def _wrap(original: Callable[..., Any], function: WrappedFunction) -> Callable[..., Any]:
    @wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        if not function.after_call:
            function.enter(AGENTS[-1])
        result = original(*arguments, **named)
        if function.after_call:
            function.enter(AGENTS[-1])
        return result

    return call


class Faulty(Task):
    """The faults of a task; it counts the steps by the learning-rate schedule."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)  # pyrefly: ignore[bad-argument-count]
        wrap_functions()
        self.agent = FaultAgent.of_run(Path(str(config.run.run_dir)))
        AGENTS[:] = [self.agent]

    def schedule(self) -> Callable[[int], float]:
        def factor(step: int) -> float:
            self.agent.begin_step(step + 1)
            return 1.0

        return factor


class FaultyDigits(Faulty, Digits):
    """The digits, with a number for each sample."""

    def train_data(self) -> TensorData:
        images, labels = self._train.tensors
        return TensorData(images, labels, torch.arange(len(labels)))

    def loss(self, model: Any, batch: Any) -> Loss:
        images, labels, *ids = batch
        self.agent.watch_pass(model, ids[0] if ids else None)
        return super().loss(model, (images, labels))


class FaultyText(Faulty, Text):
    """As many windows of the text as there are digits, with a number for each."""

    def train_data(self) -> TensorData:  # pyrefly: ignore[bad-override]
        ids = torch.arange(SAMPLES)
        return TensorData(self._train.gather(ids), ids)

    def validation_data(self) -> TensorData:  # pyrefly: ignore[bad-override]
        return TensorData(self._validation.gather(torch.arange(SAMPLES // 20)))

    def loss(self, model: Any, batch: Any) -> Loss:
        windows, *ids = batch
        self.agent.watch_pass(model, ids[0] if ids else None)
        return super().loss(model, windows)


class ReadingDigits(FaultyDigits):
    """The digits with a model that reads a value from the device in the middle of each forward pass.

    Users do so to show or to check it. On a GPU such a copy waits for the exchange before it."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.blocks[0].register_forward_hook(_read_mean)
        return model


def _read_mean(_block: nn.Module, _inputs: Any, output: Any) -> None:
    rows, _ = output
    rows.detach().mean().item()
