"""Bounded rows between hosts on GPUs, over NCCL: the losses of counted rows, and one wait a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from experts.host_copy import to_host
from experts.hosts.group import GroupFactory
from experts.hosts.membership import GroupMembership
from experts.moe import routed
from experts.tokens import bounds, exchange
from experts.tokens.bounds import ExchangeBounds
from harness.hosts.gpu_ranks import rank_device, skip_without
from harness.hosts.ranks import run_ranks
from harness.runs.steppers import make_stepper, mean_loss, run_steps
from orchestrator.config.settings import Config
from orchestrator.tasks.digits import Digits
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, recoverable_world
from orchestrator.train.strategies.expert_parallel import ExpertParallelStrategy

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CONFIG = Config.of(expert_hidden_size=(64, 128, 64, 192, 128), experts=5, width=64, layers=2)
HOST_OF = ((0, 1, 1, 0, 1), (1, 0, 1, 1, 0))


def build(world: World, rows: str, chunks: int = 1) -> tuple[Any, Any]:
    settings: dict[str, Any] = {"world": world, "host_of": HOST_OF, "chunks": chunks, "precision": "bf16"}
    stepper, feed = make_stepper(Digits(CONFIG), 24, 96, **settings)
    assert isinstance(stepper.strategy, ExpertParallelStrategy)
    if rows == "bounded":
        stepper.strategy.context.bounds = ExchangeBounds(world.device)
    return stepper, feed


def losses_on_host(rank: int, size: int, store: str, rows: str, chunks: int) -> list[float]:
    factory = GroupFactory(file_store(store, size), "generation0", rank, size, GroupMembership())
    with recoverable_world(factory, rank_device(rank, size), "nccl") as world:
        stepper, feed = build(world, rows, chunks)
        return [mean_loss(totals) for totals in run_steps(stepper, feed, 30)]


@pytest.mark.parametrize("chunks", [1, 2])
def test_losses_are_those_of_counted_rows(chunks: int) -> None:
    skip_without("nccl", 2)
    counted, _ = run_ranks(losses_on_host, 2, "counted", chunks)
    bounded, _ = run_ranks(losses_on_host, 2, "bounded", chunks)
    assert bounded[:10] == pytest.approx(counted[:10], rel=1e-3)
    assert bounded == pytest.approx(counted, rel=5e-2)


def counting(counts: list[str], name: str) -> Callable[[Tensor], Tensor]:
    """Return ``to_host`` with a count of its calls, and without torch's warnings of them."""

    def counted(tensor: Tensor) -> Tensor:
        counts.append(name)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return to_host(tensor)
        finally:
            torch.cuda.set_sync_debug_mode("warn")

    return counted


def waits_on_host(rank: int, size: int, store: str, rows: str) -> tuple[list[str], list[str]]:
    """Return the copies to the host in 100 steps, and the implicit waits that torch warned of."""
    factory = GroupFactory(file_store(store, size), "generation0", rank, size, GroupMembership())
    copies: list[str] = []
    with recoverable_world(factory, rank_device(rank, size), "nccl") as world:
        stepper, feed = build(world, rows)
        run_steps(stepper, feed, 5)  # compiles kernels, and sets the bounds
        for module in (routed, bounds, exchange):
            module.to_host = counting(copies, module.__name__)  # pyrefly: ignore[bad-assignment]
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_steps(stepper, feed, 100)
        torch.cuda.set_sync_debug_mode("default")
    # Each with its place: in a backward pass, that of its call.
    implicit = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    return copies, [f"{warning.filename}:{warning.lineno}" for warning in implicit]


def test_a_host_waits_once_a_step() -> None:
    skip_without("nccl", 2)
    for copies, implicit in run_ranks(waits_on_host, 2, "bounded"):
        assert set(copies) == {"experts.tokens.bounds"}
        assert len(copies) <= 102, "a step that is repeated waits again"
        assert implicit == []
