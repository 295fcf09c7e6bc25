"""Tests of two workers on one GPU, over gloo (NCCL refuses two ranks on one device)."""

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
from orchestrator.train.parts.stores import file_store
from orchestrator.train.parts.world import World, process_group_world, recoverable_world
from orchestrator.train.strategies import ddp
from orchestrator.train.strategies.buffers import convert_sync_batchnorm, running_statistics
from orchestrator.types import MIB, PrecisionName
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
LARGER_EXPERTS = Config.of(expert_hidden_size=(32, 64, 64, 128, 256), experts=5, width=64, layers=2)
HOST_OF = ((0, 1, 1, 0, 1), (1, 0, 1, 1, 0))
GPU = torch.device("cuda:0")
STEPS = 8


@pytest.fixture(autouse=True)
def _free_memory() -> None:
    """Return memory that earlier tests of this process have cached; the ranks need it."""
    gc.collect()
    torch.cuda.empty_cache()


def cross_entropy_loss(model: nn.Module, batch: Any) -> Loss:
    return Loss(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


class Normed(DoubleDigits):
    """A model with batch norm; on several workers it is synchronized."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()
        return convert_sync_batchnorm(model) if torch.distributed.is_initialized() else model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return cross_entropy_loss(model, batch)


def train(task: Any, global_batch: int, micro_batch: int, world: World, **settings: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp, "STEPS_BEFORE_OVERLAP", 3)
        stepper, feed = make_stepper(task, micro_batch, global_batch, world=world, **settings)
        totals = run_steps(stepper, feed, STEPS)
    model = stepper.strategy.model
    return {
        "losses": [mean_loss(t) for t in totals],
        "norms": [float(t.norm) for t in totals if t.norm is not None],
        "gradients": {name: gradient.cpu() for name, gradient in gradients(model).items()},
        "weights": {name: weight.cpu() for name, weight in weights(model).items()},
        "statistics": [buffer.cpu() for buffer in running_statistics(model)],
    }


def train_on_rank(
    rank: int,
    size: int,
    store: str,
    task: type,
    global_batch: int,
    micro_batch: int,
    settings: dict[str, Any],
) -> dict[str, Any]:
    with process_group_world(file_store(store, size), rank, size, GPU, "gloo", 60) as world:
        return train(task(CONFIG), global_batch, micro_batch, world, **settings)


def assert_same_steps(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-12)


def test_synchronized_batch_norm_is_that_of_one_process() -> None:
    """2 × 16 samples equal 32 in one process, in fp64, statistics included."""
    expected = train(Normed(CONFIG), 64, 32, World.single_process(GPU))
    for result in run_ranks(train_on_rank, 2, Normed, 64, 16, {}):
        assert_same_steps(result, expected)
        assert_gradients_equal(result["gradients"], expected["gradients"], 1e-10, 1e-12)
        for buffer, expected_buffer in zip(result["statistics"], expected["statistics"], strict=True):
            # SyncBatchNorm counts its samples in fp32.
            torch.testing.assert_close(buffer, expected_buffer, rtol=1e-8, atol=1e-9)


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
def test_two_workers_on_a_gpu_are_exact_in_fp64(settings: dict[str, Any]) -> None:
    expected = train(DoubleDigits(CONFIG), 50, 50, World.single_process(GPU))
    for result in run_ranks(train_on_rank, 2, DoubleDigits, 50, 10, settings):
        assert_same_steps(result, expected)
        assert_gradients_equal(result["gradients"], expected["gradients"], 1e-10, 1e-12)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-9, atol=1e-9)


# --- memory


class Wide(Digits):
    """A model whose memory is nearly all parameters."""

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        blocks = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(24))
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 2048), _Blocks(blocks), nn.Linear(2048, 10))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return cross_entropy_loss(model, batch)


class _Blocks(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def peak_mib_on_rank(rank: int, size: int, store: str, settings: dict[str, Any]) -> float:
    with process_group_world(file_store(store, size), rank, size, GPU, "gloo", 60) as world:
        stepper, feed = make_stepper(Wide(CONFIG), 8, 32, world=world, **settings)
        run_steps(stepper, feed, 2)
        reset_peak(GPU)
        run_steps(stepper, feed, 2)
        return peak_memory(GPU)["allocated"] / MIB


def test_sharding_saves_memory() -> None:
    """400 MiB of parameters, twice that of optimizer state: each form needs less than the one before it."""
    forms: dict[str, dict[str, Any]] = {
        "ddp": {},
        "zero2": {"sharding": "zero2"},
        "zero3": {"sharding": "zero3"},
        "zero3, offload": {"sharding": "zero3", "offload": True},
    }
    peaks = {name: max(run_ranks(peak_mib_on_rank, 2, settings)) for name, settings in forms.items()}
    print("peak MiB per worker:", {name: round(value) for name, value in peaks.items()})  # noqa: T201
    assert all(later < 0.95 * earlier for earlier, later in pairwise(peaks.values())), peaks


# --- expert hosts


def leave_on_rank(rank: int, size: int, store: str) -> tuple[str, float]:
    """The second host takes no part in a collective; the first leaves, and still computes."""
    membership = GroupMembership()
    factory = GroupFactory(file_store(store, size), "generation0", rank, size, membership)
    with recoverable_world(factory, GPU, "gloo") as world:
        world.all_reduce(torch.ones(4, device=GPU))
        if rank == 0:
            threading.Timer(1.0, membership.leave).start()
            try:
                world.all_reduce(torch.ones(2**20, device=GPU))
            except GroupLeft as error:
                torch.cuda.synchronize()
                return str(error), float(torch.ones(3, device=GPU).sum())
        else:
            time.sleep(3.0)
        return "", 0.0


def test_a_host_on_a_gpu_can_leave_its_group() -> None:
    assert run_ranks(leave_on_rank, 2) == [("the group was left", 3.0), ("", 0.0)]


def digit_losses(world: World, micro_batch: int, precision: PrecisionName, chunks: int = 1) -> list[float]:
    stepper, feed = make_stepper(
        Digits(LARGER_EXPERTS),
        micro_batch,
        96,
        world=world,
        host_of=HOST_OF,
        chunks=chunks,
        precision=precision,
    )
    return [mean_loss(totals) for totals in run_steps(stepper, feed, 50)]


def digit_losses_on_host(
    rank: int, size: int, store: str, precision: PrecisionName, chunks: int
) -> list[float]:
    """Train in a group that can be left, as expert hosts do."""
    factory = GroupFactory(file_store(store, size), "generation0", rank, size, GroupMembership())
    with recoverable_world(factory, GPU, "gloo") as world:
        return digit_losses(world, 24, precision, chunks)


@pytest.mark.parametrize(("precision", "rel", "absolute"), [("fp32", 1e-5, 0.0), ("bf16", 2e-2, 2e-2)])
@pytest.mark.parametrize("chunks", [1, 2])
def test_two_hosts_on_a_gpu_have_the_losses_of_one_process(
    precision: PrecisionName, rel: float, absolute: float, chunks: int
) -> None:
    """Fifty steps at a learning rate of 1e-3, two micro-batches each, experts of four sizes.

    bf16 rounds sums to 8 bits, and hosts round other sums than one process.
    """
    expected = digit_losses(World.single_process(GPU), 48, precision)
    for losses in run_ranks(digit_losses_on_host, 2, precision, chunks):
        assert losses == pytest.approx(expected, rel=rel, abs=absolute)


def test_two_hosts_on_a_gpu_are_exact_in_fp64() -> None:
    settings = {"host_of": HOST_OF, "chunks": 2, "recompute": True}
    expected = train(DoubleDigits(CONFIG), 50, 20, World.single_process(GPU))
    for host in run_ranks(train_on_rank, 2, DoubleDigits, 50, 10, settings):
        assert_same_steps(host, expected)
        for name, weight in host["weights"].items():
            if ".bank." not in name:
                torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-9, atol=1e-9)
