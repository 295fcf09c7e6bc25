"""Several workers on GPUs, over gloo and over NCCL, against one process."""

from __future__ import annotations

import gc
import threading
import time
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import nn

from experts.hosts.group import GroupFactory
from experts.hosts.membership import GroupLeft, GroupMembership
from harness.hosts.gpu_ranks import rank_device, skip_without
from harness.hosts.ranks import run_ranks
from harness.runs.steppers import (
    DoubleDigits,
    assert_gradients_equal,
    gradients,
    make_stepper,
    mean_loss,
    run_steps,
    weights,
)
from orchestrator.config.settings import Config
from orchestrator.plan.inventory.hardware import set_environment
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss
from orchestrator.train.device.memory import peak_memory, reset_peak
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world, recoverable_world
from orchestrator.train.strategies import ddp
from orchestrator.train.strategies.buffers import convert_sync_batchnorm, running_statistics
from orchestrator.types import MIB, PrecisionName

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CONFIG = Config.of(
    expert_hidden_size=(8, 16, 8, 24, 16),
    experts=5,
    width=16,
    balance_loss=0.05,
    sequence_length=24,
    layers=2,
)
LARGER_EXPERTS = Config.of(expert_hidden_size=(32, 64, 64, 128, 256), experts=5, width=64, layers=2)
HOST_OF = ((0, 1, 1, 0, 1), (1, 0, 1, 1, 0))
GPU = torch.device("cuda:0")
STEPS = 8


@pytest.fixture(params=["gloo", "nccl"])
def backend(request: pytest.FixtureRequest) -> str:
    skip_without(request.param, 2)
    return request.param


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
    backend: str,
    task: type,
    global_batch: int,
    micro_batch: int,
    settings: dict[str, Any],
) -> dict[str, Any]:
    device = rank_device(rank, size)
    with process_group_world(file_store(store, size), rank, size, device, backend, 60) as world:
        return train(task(CONFIG), global_batch, micro_batch, world, **settings)


def assert_same_steps(result: dict[str, Any], expected: dict[str, Any], rel: float = 1e-12) -> None:
    assert result["losses"] == pytest.approx(expected["losses"], rel=rel)
    assert result["norms"] == pytest.approx(expected["norms"], rel=rel)


def test_synchronized_batch_norm_is_that_of_one_process(backend: str) -> None:
    """2 × 16 samples equal 32 in one process, in fp64, statistics included."""
    expected = train(Normed(CONFIG), 64, 32, World.single_process(GPU))
    for result in run_ranks(train_on_rank, 2, backend, Normed, 64, 16, {}):
        assert_same_steps(result, expected)
        assert_gradients_equal(result["gradients"], expected["gradients"], 1e-10, 1e-12)
        for buffer, expected_buffer in zip(result["statistics"], expected["statistics"], strict=True):
            # SyncBatchNorm counts its samples in fp32.
            torch.testing.assert_close(buffer, expected_buffer, rtol=1e-8, atol=1e-9)


FORMS: list[dict[str, Any]] = [
    {},
    {"sharding": "zero2"},
    {"sharding": "zero3"},
    {"sharding": "zero2", "offload": True},
    {"sharding": "zero3", "offload": True},
]


@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_two_workers_have_the_losses_of_one_process_in_fp32(settings: dict[str, Any], backend: str) -> None:
    expected = train(Digits(CONFIG), 50, 50, World.single_process(GPU))
    for result in run_ranks(train_on_rank, 2, backend, Digits, 50, 10, settings):
        assert_same_steps(result, expected, rel=1e-5)


@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_two_workers_on_a_gpu_are_exact_in_fp64(settings: dict[str, Any]) -> None:
    """Over gloo: not every build of NCCL sums fp64 in a reduce-scatter."""
    expected = train(DoubleDigits(CONFIG), 50, 50, World.single_process(GPU))
    for result in run_ranks(train_on_rank, 2, "gloo", DoubleDigits, 50, 10, settings):
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
    device = rank_device(rank, size)
    with process_group_world(file_store(store, size), rank, size, device, "gloo", 60) as world:
        stepper, feed = make_stepper(Wide(CONFIG), 8, 32, world=world, **settings)
        run_steps(stepper, feed, 2)
        reset_peak(device)
        run_steps(stepper, feed, 2)
        return peak_memory(device)["allocated"] / MIB


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


def leave_on_rank(rank: int, size: int, store: str, backend: str) -> tuple[str, float]:
    """The second host takes no part in a collective; the first leaves, and still computes."""
    membership = GroupMembership()
    factory = GroupFactory(file_store(store, size), "generation0", rank, size, membership)
    device = rank_device(rank, size)
    with recoverable_world(factory, device, backend) as world:
        assert world.group is not None
        world.all_reduce(torch.ones(4, device=device))
        if rank == 0:
            threading.Timer(1.0, membership.leave).start()
            try:
                world.all_reduce(torch.ones(2**20, device=device))
                torch.cuda.synchronize()  # over NCCL the device waits, and an abort ends the wait
                world.group.check()
            except GroupLeft as error:
                torch.cuda.synchronize()
                return str(error), float(torch.ones(3, device=device).sum())
        else:
            time.sleep(3.0)
        return "", 0.0


def test_a_host_on_a_gpu_can_leave_its_group(backend: str) -> None:
    assert run_ranks(leave_on_rank, 2, backend) == [("the group was left", 3.0), ("", 0.0)]


def observe_on_rank(rank: int, size: int, store: str) -> list[tuple[int, bool]]:
    """Report the waits of a device that waits for its peer, and of one that computes meanwhile."""
    membership = GroupMembership()
    factory = GroupFactory(file_store(store, size), "generation0", rank, size, membership)
    device = rank_device(rank, size)
    with recoverable_world(factory, device, "nccl") as world:
        # The first launch of a kernel loads it, which may wait for the kernels that run.
        world.all_reduce(torch.ones(4, device=device))
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        world.barrier()
        before = membership.observe().num_completed
        if rank == 1:
            torch.cuda._sleep(4_000_000_000)
        world.all_reduce(torch.ones(4, device=device))
        time.sleep(0.5)
        during = membership.observe()
        torch.cuda.synchronize()
        after = membership.observe()
        return [(state.num_completed - before, state.waiting) for state in (during, after)]


def test_a_device_that_waits_is_told_from_one_that_computes() -> None:
    skip_without("nccl", 2)
    waiting, computing = run_ranks(observe_on_rank, 2)
    assert waiting == [(0, True), (1, False)]
    assert computing == [(0, False), (1, False)]


HOSTS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: HOST_OF,
    3: ((0, 2, 2, 0, 2), (2, 0, 2, 2, 0)),
    4: ((0, 1, 3, 0, 3), (1, 0, 3, 3, 0)),
}
"""The hosts of the experts, by the number of hosts: on three the second, on four the third has none."""


def digit_losses(world: World, micro_batch: int, precision: PrecisionName, chunks: int = 1) -> list[float]:
    stepper, feed = make_stepper(
        Digits(LARGER_EXPERTS),
        micro_batch,
        96,
        world=world,
        host_of=HOSTS.get(world.size, HOST_OF),
        chunks=chunks,
        precision=precision,
    )
    return [mean_loss(totals) for totals in run_steps(stepper, feed, 50)]


def digit_losses_on_host(
    rank: int, size: int, store: str, backend: str, precision: PrecisionName, chunks: int
) -> list[float]:
    """Train in a group that can be left, as expert hosts do."""
    set_environment("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    factory = GroupFactory(file_store(store, size), "generation0", rank, size, GroupMembership())
    with recoverable_world(factory, rank_device(rank, size), backend) as world:
        return digit_losses(world, 48 // size, precision, chunks)


ON_HOSTS = pytest.mark.parametrize(("hosts", "chunks"), [(2, 1), (2, 2), (3, 1), (4, 2)])
"""Fifty steps at a learning rate of 1e-3, two micro-batches each, experts of four sizes."""


@ON_HOSTS
def test_hosts_on_gpus_have_the_losses_of_one_process(backend: str, hosts: int, chunks: int) -> None:
    skip_without(backend, hosts)
    expected = digit_losses(World.single_process(GPU), 48, "fp32")
    for losses in run_ranks(digit_losses_on_host, hosts, backend, "fp32", chunks):
        assert losses == pytest.approx(expected, rel=1e-5)


@ON_HOSTS
def test_hosts_on_gpus_follow_the_losses_of_one_process_in_bf16(
    backend: str, hosts: int, chunks: int
) -> None:
    """bf16 rounds to 8 bits, and hosts round other sums than one process.

    Where two experts are about equal for a token, another one is chosen: single losses then differ by
    some hundredths, and their mean does not.
    """
    skip_without(backend, hosts)
    expected = digit_losses(World.single_process(GPU), 48, "bf16")
    for losses in run_ranks(digit_losses_on_host, hosts, backend, "bf16", chunks):
        assert losses[:10] == pytest.approx(expected[:10], rel=4e-2)
        differences = [abs(loss - other) for loss, other in zip(losses, expected, strict=True)]
        assert fmean(differences) < 1e-2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_hosts_are_bitwise_equal_from_run_to_run(backend: str, precision: PrecisionName) -> None:
    skip_without(backend, 3)
    first, second = (run_ranks(digit_losses_on_host, 3, backend, precision, 1) for _ in range(2))
    assert first == second


def test_two_hosts_on_a_gpu_are_exact_in_fp64(backend: str) -> None:
    settings = {"host_of": HOST_OF, "chunks": 2, "recompute": True}
    expected = train(DoubleDigits(CONFIG), 50, 20, World.single_process(GPU))
    for host in run_ranks(train_on_rank, 2, backend, DoubleDigits, 50, 10, settings):
        assert_same_steps(host, expected)
        for name, weight in host["weights"].items():
            if ".bank." not in name:
                torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-9, atol=1e-9)
