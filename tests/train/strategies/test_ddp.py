"""Tests of replicated data parallel: the same run on several workers and in one process, with sizes that
divide nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.hosts.ranks import RanksFailed, run_ranks
from harness.runs.steppers import (
    UNEVEN_EXPERTS,
    DoubleDigits,
    DoubleText,
    assert_gradients_equal,
    make_stepper,
    mean_loss,
    run_steps,
)
from harness.runs.worker_runs import (
    CPU,
    WorkerCase,
    assert_weights_close,
    assert_workers_equal_one_process,
    assert_workers_follow_one_process_in_fp32,
    train,
    train_on_rank,
)
from orchestrator.config.settings import Config
from orchestrator.errors import OutOfMemory
from orchestrator.record.files.reading import of_kind
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss, Task, TensorData
from orchestrator.tasks.text import Text
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world

CUSTOM_DDP: dict[str, Any] = {"bucket_cap_mb": 1, "static_graph": True, "gradient_as_bucket_view": False}


@pytest.mark.extended(but_first=4)
@pytest.mark.parametrize(
    "case",
    [
        WorkerCase(DoubleDigits, 2, 32, 64),
        WorkerCase(DoubleDigits, 3, 22, 64),
        WorkerCase(DoubleDigits, 4, 5, 50, samples=110),  # accumulation; a last batch of 10
        WorkerCase(DoubleDigits, 2, 16, 48, shares=(3.0, 1.0)),
        WorkerCase(DoubleDigits, 3, 7, 50, samples=101),  # a last batch of one sample: two workers have none
        WorkerCase(DoubleDigits, 3, 4, 30, samples=94, shares=(1.0, 0.35, 0.01)),
        WorkerCase(DoubleText, 3, 3, 16, steps=6),
        WorkerCase(DoubleDigits, 2, 32, 64, steps_before_overlap=100),  # reduced after the backward pass only
        WorkerCase(DoubleDigits, 3, 8, 48, steps_before_overlap=0, settings=CUSTOM_DDP),
    ],
    ids=str,
)
def test_workers_are_exact_in_fp64(case: WorkerCase) -> None:
    assert_workers_equal_one_process(case)


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize(
    ("task", "workers", "micro_batch", "global_batch"),
    [(Digits, 2, 32, 64), (Digits, 3, 8, 64), (Text, 4, 4, 16)],
)
def test_workers_are_exact_in_fp32(task: type, workers: int, micro_batch: int, global_batch: int) -> None:
    config = UNEVEN_EXPERTS.but(balance_loss=0.01)
    case = WorkerCase(task, workers, micro_batch, global_batch, steps=50, config=config)
    assert_workers_follow_one_process_in_fp32(case)


def test_two_workers_give_the_same_bits_each_time() -> None:
    case = WorkerCase(Digits, 2, 16, 64, steps=12)
    first = run_ranks(train_on_rank, 2, case)[0]
    second = run_ranks(train_on_rank, 2, case)[0]
    assert first.losses == second.losses
    assert first.norms == second.norms


def test_a_mean_of_the_workers_means_would_be_found() -> None:
    """Averaging the workers' means is not the mean of the batch if their shares differ."""
    case = WorkerCase(DoubleDigits, 2, 16, 48, shares=(3.0, 1.0), steps=1)
    means = [own_mean_loss(rank, case) for rank in range(2)]
    assert sum(means) / 2 != pytest.approx(train(case).losses[0], rel=1e-4)


def own_mean_loss(rank: int, case: WorkerCase) -> float:
    """The mean loss over one worker's own samples."""
    stepper, feed = make_stepper(case.make_task(), case.micro_batch, case.global_batch)
    feed.world = World(rank, case.workers, CPU, shares=case.shares)
    return mean_loss(run_steps(stepper, feed, 1)[0])


# --- parameters without a gradient


class PartlyUsed(Task):
    """A model with a part that only one sample uses, and a part that none uses."""

    def __init__(self, config: Config) -> None:
        del config

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({name: nn.Linear(4, 1).double() for name in ("always", "sometimes", "never")})

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        return TensorData(torch.randn(30, 4, dtype=torch.float64, generator=generator), torch.arange(30))

    def loss(self, model: Any, batch: Any) -> Loss:
        x, number = batch
        total = model["always"](x).square().sum()
        if bool((number == 7).any()):
            total = total + model["sometimes"](x[number == 7]).square().sum()
        return Loss(total, len(x))


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_gradient_that_only_some_workers_have_is_zero_on_the_others(find_unused: bool) -> None:
    """One that no worker has does not exist, as in one process."""
    settings = {"find_unused_parameters": find_unused}
    case = WorkerCase(PartlyUsed, 3, 2, 12, steps_before_overlap=2, settings=settings)
    expected = train(case)
    for result in run_ranks(train_on_rank, 3, case):
        assert result.losses == pytest.approx(expected.losses, rel=1e-12)
        assert_gradients_equal(result.gradients, expected.gradients, 1e-10, 1e-12)
        assert not any(name.startswith("never") for name in result.gradients)
        assert_weights_close(result, expected)
        warnings = [event["message"] for event in of_kind(result.events, "warning")]
        assert bool(warnings) is not find_unused


class UsedAtFirst(PartlyUsed):
    """A model with a part that every sample uses in the first calls, and only one sample later."""

    num_calls = 0

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        del model["never"]
        return model

    def loss(self, model: Any, batch: Any) -> Loss:
        type(self).num_calls += 1
        x, number = batch
        total = model["always"](x).square().sum()
        if type(self).num_calls <= 4 or bool((number == 7).any()):
            total = total + model["sometimes"](x).square().sum()
        return Loss(total, len(x))


def test_a_parameter_that_becomes_unused_ends_the_run_before_an_update() -> None:
    """DDP would leave other gradients of its bucket unreduced for a step, and then raise another error."""
    case = WorkerCase(UsedAtFirst, 3, 4, 12, steps_before_overlap=2)
    message = r"TrainingFailed: a parameter got no gradient in this step.*--find-unused-parameters"
    with pytest.raises(RanksFailed, match=message):
        run_ranks(train_on_rank, 3, case, timeout=60)


def test_find_unused_parameters_allows_a_parameter_that_becomes_unused() -> None:
    settings = {"find_unused_parameters": True}
    case = WorkerCase(UsedAtFirst, 3, 4, 12, steps_before_overlap=2, settings=settings)
    assert len(run_ranks(train_on_rank, 3, case)) == 3


# --- out of memory


class ShortOfMemory(DoubleDigits):
    """Runs out of memory on rank 1 with more than nine samples, at given calls of its loss."""

    failing_calls: tuple[int, ...] = ()

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.num_calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.num_calls += 1
        on_rank_1 = dist.is_initialized() and dist.get_rank() == 1
        if on_rank_1 and len(batch[0]) > 9 and self.num_calls in self.failing_calls:
            raise torch.OutOfMemoryError("injected")
        return super().loss(model, batch)


class ShortEarly(ShortOfMemory):
    failing_calls = (5, 6, 7)


class ShortLate(ShortOfMemory):
    failing_calls = (16,)


def test_all_workers_halve_when_one_runs_out_of_memory() -> None:
    """While the micro-batch is new the workers vote, and all take the smaller one."""
    expected = train(WorkerCase(DoubleDigits, 2, 16, 64))
    for result in run_ranks(train_on_rank, 2, WorkerCase(ShortEarly, 2, 16, 64, steps_before_overlap=20)):
        assert result.losses == pytest.approx(expected.losses, rel=1e-12)
        halvings = of_kind(result.events, "oom")
        assert [(fields["micro_batch"], fields["next_micro_batch"]) for fields in halvings] == [(16, 8)]


def test_running_out_of_memory_later_ends_the_run_with_its_micro_batch() -> None:
    """Once reductions overlap with the backward pass no vote is possible: the run restarts with half."""
    message = r"OutOfMemory.*worker 1 ran out of memory at step 8 with a micro-batch of 16"
    with pytest.raises(RanksFailed, match=message):
        run_ranks(train_on_rank, 2, WorkerCase(ShortLate, 2, 16, 64, steps_before_overlap=3))
    error = OutOfMemory("worker 1 ran out", 16)
    assert (str(error), error.micro_batch, error.exit_code) == ("worker 1 ran out", 16, 3)


# --- buffers


class Normed(DoubleDigits):
    """A model with batch norm, whose statistics are each worker's own."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def running_mean_on_rank(rank: int, size: int, store: str, broadcast: bool) -> list[float]:
    """The running mean at the beginning of the fourth step."""
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 30) as world:
        buffers = "auto" if broadcast else "off"
        stepper, feed = make_stepper(Normed(UNEVEN_EXPERTS), 8, 16, world=world, broadcast_buffers=buffers)
        strategy: Any = stepper.strategy
        run_steps(stepper, feed, 3)
        strategy.begin_step(all_have_samples=True)
        return strategy.model[2].running_mean.tolist()


def test_running_statistics_are_the_main_workers_if_broadcast() -> None:
    main, other = run_ranks(running_mean_on_rank, 2, True)
    assert main == other
    main, other = run_ranks(running_mean_on_rank, 2, False)
    assert main != other
