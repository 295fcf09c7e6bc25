"""Two workers on one GPU, over gloo (NCCL refuses two ranks on a device): what torch does on no CPU, and what no CPU shows."""

from __future__ import annotations

import gc
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from experts.group import GroupFactory
from experts.membership import GroupLeft, GroupMembership
from orchestrator.config.settings import Config
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss
from orchestrator.train.parts.memory import peak_memory, reset_peak
from orchestrator.train.parts.precision import Precision
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world, recoverable_world
from orchestrator.train.strategies import ddp as replicate
from orchestrator.train.strategies.buffers import convert_sync_batchnorm, running_statistics
from tests.support.ranks import run_ranks
from tests.support.steppers import (
    DoubleDigits,
    assert_gradients_equal,
    gradients,
    make_stepper,
    mean_loss,
    run_steps,
    weights,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CONFIG = Config.of(
    expert_hidden_size=(8, 16, 8, 24, 16), experts=5, width=16, balance_loss=0.05, context_length=24, layers=2
)
GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def _room() -> None:
    """What earlier tests of this process have cached is room that the ranks need."""
    gc.collect()
    torch.cuda.empty_cache()


class Normed(DoubleDigits):
    """With batch norm, over the micro-batch of all workers where it is synchronized."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()
        return convert_sync_batchnorm(model) if torch.distributed.is_initialized() else model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def steps(task: Any, whole: int, micro: int, count: int, world: World, **settings: Any) -> dict[str, Any]:
    replicate.STEPS_BEFORE_OVERLAP = 3
    stepper, feed = make_stepper(task, micro, whole, world=world, **settings)
    done = run_steps(stepper, feed, count)
    model = stepper.strategy.model
    return {
        "losses": [mean_loss(t) for t in done],
        "norms": [float(t.norm) for t in done],  # pyright: ignore[reportArgumentType]
        "gradients": {name: g.cpu() for name, g in gradients(model).items()},
        "weights": {name: w.cpu() for name, w in weights(model).items()},
        "statistics": [b.cpu() for b in running_statistics(model)],
    }


def rank_steps(
    rank: int, size: int, store: str, task: type, whole: int, micro: int, count: int, settings: dict[str, Any]
) -> dict[str, Any]:
    with process_group_world(file_store(store, size), rank, size, GPU, "gloo", 60) as world:
        return steps(task(CONFIG), whole, micro, count, world, **settings)


def same(ours: dict[str, Any], theirs: dict[str, Any], rel: float) -> None:
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=rel)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=rel)


def test_synchronized_batch_norm_is_that_of_one_process() -> None:
    """Equal at an equal global micro-batch: 2 × 16 against 32, in fp64, statistics included."""
    one = steps(Normed(CONFIG), 64, 32, 8, World.single_process(GPU))
    for many in run_ranks(rank_steps, 2, Normed, 64, 16, 8, {}):
        same(many, one, 1e-12)
        assert_gradients_equal(many["gradients"], one["gradients"], 1e-10, 1e-12)
        for mine, theirs in zip(many["statistics"], one["statistics"], strict=True):
            torch.testing.assert_close(
                mine, theirs, rtol=1e-8, atol=1e-9
            )  # torch counts its samples in fp32 here


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sharding": "zero2"},
        {"sharding": "zero3"},
        {"sharding": "zero2", "offload": True},
        {"sharding": "zero3", "offload": True},
    ],
    ids=str,
)
def test_two_ranks_on_a_gpu_are_exact_in_fp64(settings: dict[str, Any]) -> None:
    one = steps(DoubleDigits(CONFIG), 50, 50, 8, World.single_process(GPU))
    for many in run_ranks(rank_steps, 2, DoubleDigits, 50, 10, 8, settings):
        same(many, one, 1e-12)
        assert_gradients_equal(many["gradients"], one["gradients"], 1e-10, 1e-12)
        for name, weight in one["weights"].items():
            torch.testing.assert_close(many["weights"][name], weight, rtol=1e-9, atol=1e-9)


class Wide(Digits):
    """Nearly all of its memory is parameters."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        blocks = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(24))
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), _Run(blocks), nn.Linear(2048, 10))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


class _Run(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def rank_memory(rank: int, size: int, store: str, settings: dict[str, Any]) -> float:
    with process_group_world(file_store(store, size), rank, size, GPU, "gloo", 60) as world:
        stepper, feed = make_stepper(Wide(CONFIG), 8, 32, world=world, **settings)
        run_steps(stepper, feed, 2)
        reset_peak(GPU)
        run_steps(stepper, feed, 2)
        return peak_memory(GPU)["allocated"] / 2**20


def test_sharding_saves_memory() -> None:
    """400 MiB of parameters, twice that of optimizer state: each form needs less than the one before it."""
    forms: dict[str, dict[str, Any]] = {
        "ddp": {},
        "zero2": {"sharding": "zero2"},
        "zero3": {"sharding": "zero3"},
        "zero3, offload": {"sharding": "zero3", "offload": True},
    }
    peaks = {name: max(run_ranks(rank_memory, 2, settings)) for name, settings in forms.items()}
    print("peak MiB per worker:", {name: round(value) for name, value in peaks.items()})  # noqa: T201
    values = list(peaks.values())
    assert all(later < 0.95 * earlier for earlier, later in pairwise(values)), peaks


FIVE = Config.of(expert_hidden_size=(32, 64, 64, 128, 256), experts=5, width=64, layers=2)
PLACED = ((0, 1, 1, 0, 1), (1, 0, 1, 1, 0))


def hosted_losses(rank: int, size: int, store: str, kind: str, chunks: int) -> list[float]:
    """In a group that can be left, as expert hosts are."""
    with recoverable_world(
        GroupFactory(file_store(store, size), "epoch", rank, size, GroupMembership()), GPU, "gloo"
    ) as world:
        return digit_losses(world, 24, kind, chunks)


def left_alone(rank: int, size: int, store: str) -> tuple[str, float]:
    """The second host comes no more; the first leaves, and goes on by itself."""
    life = GroupMembership()
    with recoverable_world(
        GroupFactory(file_store(store, size), "first", rank, size, life), GPU, "gloo"
    ) as world:
        world.all_reduce(torch.ones(4, device=GPU))
        if rank == 0:
            threading.Timer(1.0, life.leave).start()
            try:
                world.all_reduce(torch.ones(2**20, device=GPU))
            except GroupLeft as error:
                torch.cuda.synchronize()
                return str(error), float(torch.ones(3, device=GPU).sum())
        else:
            time.sleep(3.0)
        return "", 0.0


def test_a_host_on_a_gpu_can_leave_its_group() -> None:
    told = run_ranks(left_alone, 2)
    assert told == [("the group was left", 3.0), ("", 0.0)]


def digit_losses(world: World, micro: int, kind: str, chunks: int = 1) -> list[float]:
    stepper, feed = make_stepper(Digits(FIVE), micro, 96, world=world, host_of=PLACED, chunks=chunks)
    stepper.precision = Precision(kind, GPU)  # pyright: ignore[reportArgumentType]
    return [mean_loss(totals) for totals in run_steps(stepper, feed, 50)]


@pytest.mark.parametrize(("kind", "rel", "absolute"), [("fp32", 1e-5, 0.0), ("bf16", 2e-2, 2e-2)])
@pytest.mark.parametrize("chunks", [1, 2])
def test_two_hosts_on_a_gpu_have_the_losses_of_one(
    kind: str, rel: float, absolute: float, chunks: int
) -> None:
    """Fifty steps at a learning rate of 1e-3, two micro-batches each, experts of four sizes. bf16 rounds sums to 8 bits, and
    hosts round other sums than one process."""
    one = digit_losses(World.single_process(GPU), 48, kind)
    for many in run_ranks(hosted_losses, 2, kind, chunks):
        assert many == pytest.approx(one, rel=rel, abs=absolute)


def test_two_hosts_on_a_gpu_are_exact_in_fp64() -> None:
    placed = {"host_of": PLACED, "chunks": 2, "recompute": True}
    one = steps(DoubleDigits(CONFIG), 50, 20, 8, World.single_process(GPU))
    many = run_ranks(rank_steps, 2, DoubleDigits, 50, 10, 8, placed)
    for host in many:
        same(host, one, 1e-12)
        dense = {name for name in host["weights"] if ".bank." not in name}
        for name in dense:
            torch.testing.assert_close(host["weights"][name], one["weights"][name], rtol=1e-9, atol=1e-9)
