"""Short data-parallel runs: the same training on several workers, as real processes over gloo, and in one
process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.hosts.ranks import run_ranks
from harness.runs.host_runs import step_batches
from harness.runs.steppers import (
    UNEVEN_EXPERTS,
    Events,
    assert_gradients_equal,
    gradients,
    make_stepper,
    mean_loss,
    weights,
)
from orchestrator.config.settings import Config
from orchestrator.tasks.task import TensorData
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.step.totals import Totals
from orchestrator.train.strategies import ddp

CPU = torch.device("cpu")


@dataclass(frozen=True)
class WorkerCase:
    """A run on several workers; ``micro_batch`` is per worker."""

    task: type
    workers: int
    micro_batch: int
    global_batch: int
    samples: int | None = None
    """Samples of the data; None for all of them."""
    shares: tuple[float, ...] = ()
    sharding: str = "none"
    steps: int = 10
    config: Config = UNEVEN_EXPERTS
    steps_before_overlap: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of the run."""

    def make_task(self) -> Any:
        task = self.task(self.config)
        return _FirstSamples(task, self.samples) if self.samples else task

    def __str__(self) -> str:
        size = f"{self.workers}x{self.micro_batch}-of-{self.global_batch}"
        return f"{self.task.__name__}-{size}-{self.sharding}-{self.steps_before_overlap}"


class _FirstSamples:
    """A task with the first samples of another's data."""

    def __init__(self, task: Any, samples: int) -> None:
        self.task = task
        self.samples = samples
        self.units_per_sample = task.units_per_sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["task"], name)

    def train_data(self) -> Any:
        return TensorData(*(tensor[: self.samples] for tensor in self.task.train_data().tensors))


@dataclass(frozen=True)
class WorkerResult:
    losses: list[float]
    norms: list[float]
    samples: list[int]
    loads: list[list[int]]
    first_gradients: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    events: list[dict[str, Any]]


def train(case: WorkerCase, world: World | None = None) -> WorkerResult:
    """Run the steps of a case as one of its workers, or without a world in one process."""
    events = Events()
    stepper, feed = make_stepper(
        case.make_task(),
        case.micro_batch if world else case.global_batch,
        case.global_batch,
        emit=events,
        world=world,
        sharding=case.sharding if world else "none",
        **case.settings,
    )
    model = stepper.strategy.model
    totals: list[Totals] = []
    first_gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(step_batches(feed, case.steps)):
        totals.append(stepper.run(batch, step))
        if step == 0:
            first_gradients = gradients(model)
    return WorkerResult(
        losses=[mean_loss(t) for t in totals],
        norms=[float(t.norm) for t in totals if t.norm is not None],
        samples=[t.samples for t in totals],
        loads=[[int(count) for load in t.loads for count in load] for t in totals],
        first_gradients=first_gradients,
        gradients=gradients(model),
        weights=weights(model),
        events=events.events,
    )


def train_on_rank(rank: int, size: int, store: str, case: WorkerCase) -> WorkerResult:
    with (
        pytest.MonkeyPatch.context() as patch,
        process_group_world(file_store(store, size), rank, size, CPU, "gloo", 30) as world,
    ):
        patch.setattr(ddp, "STEPS_BEFORE_OVERLAP", case.steps_before_overlap)
        return train(case, world.with_shares(case.shares) if case.shares else world)


def assert_workers_equal_one_process(case: WorkerCase) -> None:
    """Assert in fp64 that every worker has the losses, norms, gradients and weights of one process."""
    expected = train(case)
    for rank, result in enumerate(run_ranks(train_on_rank, case.workers, case)):
        assert result.losses == pytest.approx(expected.losses, rel=1e-12), f"rank {rank}"
        assert result.norms == pytest.approx(expected.norms, rel=1e-12), f"rank {rank}"
        assert result.samples == expected.samples
        assert result.loads == expected.loads
        assert_gradients_equal(result.first_gradients, expected.first_gradients, 1e-10, 1e-12)
        assert_gradients_equal(result.gradients, expected.gradients, 1e-10, 1e-12)
        assert_weights_close(result, expected)


def assert_weights_close(result: WorkerResult, expected: WorkerResult) -> None:
    for name, weight in expected.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=1e-9, atol=1e-9)


def assert_workers_follow_one_process_in_fp32(case: WorkerCase) -> None:
    """Assert the first step from equal weights, and the losses of the case's free-running steps."""
    expected = train(case)
    result = run_ranks(train_on_rank, case.workers, case)[0]
    assert result.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    assert result.norms[0] == pytest.approx(expected.norms[0], rel=1e-6)
    assert_gradients_equal(result.first_gradients, expected.first_gradients, 2e-6, 1e-7)
    assert result.losses == pytest.approx(expected.losses, rel=1e-5)
