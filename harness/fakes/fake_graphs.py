"""Graphs on a CPU: a recorded function runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from orchestrator.train.step_graph.graphs import StepGraphs
from orchestrator.train.step_graph.recorder import CaptureFailed
from orchestrator.train.stepper import Stepper

T = TypeVar("T")


class FakeRecorder:
    """Counts what happens. ``failure`` is the reason why the next capture fails."""

    def __init__(self, failure: str | None = None) -> None:
        self.failure = failure
        self.num_warm_ups = 0
        self.num_records = 0
        self.num_replays = 0
        self.num_forgotten = 0

    def warm_up(self, function: Callable[[], T]) -> T:
        self.num_warm_ups += 1
        return function()

    def record(self, function: Callable[[], T]) -> Callable[[], T]:
        if self.failure is not None:
            raise CaptureFailed(self.failure)
        self.num_records += 1

        def replay() -> T:
            self.num_replays += 1
            return function()

        return replay

    def forget(self) -> None:
        self.num_forgotten += 1


def with_graphs(stepper: Stepper, recorder: FakeRecorder, required: bool = False) -> Stepper:
    """Let a stepper use graphs of this recorder."""
    device = stepper.world.device
    stepper.graphs = StepGraphs(recorder, stepper.strategy, stepper.optimizer, device, stepper.emit, required)
    return stepper
