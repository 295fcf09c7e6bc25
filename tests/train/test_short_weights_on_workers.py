"""Weights in bf16 on several workers, beside one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.hosts.ranks import run_ranks
from harness.runs.bits import Leg, Run, newest_state, run_all
from harness.runs.host_runs import by_expert, host_world, merge_hosts
from harness.runs.loop_runs import losses_in
from harness.runs.steppers import UNEVEN_EXPERTS, Events, assert_gradients_equal, make_stepper, run_steps
from harness.runs.tiny_model import Tiny
from orchestrator.checkpoint.files import load
from orchestrator.tasks.text import Text
from orchestrator.train.group.world import World
from orchestrator.train.optim.shards import full_tensor
from orchestrator.train.strategies import ddp

WORKERS = 3
EXPERTS = 7
TASK = Text(UNEVEN_EXPERTS.but(experts=EXPERTS, expert_hidden_size=(8, 16, 8, 24, 16, 8, 8), vocabulary=300))
STEPS = 3
FLIPPED = 5e-4
"""The share of weights that may be rounded to the other neighbour: where the update of another sum of
gradients, in fp32, is just on the other side of the draw."""


@dataclass(frozen=True)
class Case:
    hosts: bool = False
    sharding: str = "none"


CASES = [
    Case(),
    Case(hosts=True),
    Case(sharding="zero2"),
    Case(sharding="zero3"),
    Case(hosts=True, sharding="zero3"),
]


@dataclass(frozen=True)
class Outcome:
    gradients: dict[str, Tensor]
    first: dict[str, Tensor]
    """Weights after the first step."""
    last: dict[str, Tensor]
    losses: list[float]


def train(case: Case, world: World) -> Outcome:
    host_of = [[expert % WORKERS for expert in range(EXPERTS)]] * 2
    stepper, feed = make_stepper(
        TASK,
        12 // world.size // 2,
        12,
        clip_norm=1.0,
        world=world,
        host_of=host_of if case.hosts and world.size > 1 else None,
        sharding=case.sharding if world.size > 1 else "none",
        weight_precision="bf16",
    )
    model = stepper.strategy.model
    stepper.strategy.micro_batch_proven()  # torch's DDP would now reduce gradients, and refuses their type

    def whole(gradient: bool) -> dict[str, Tensor]:
        found = {name: p.grad if gradient else p.detach() for name, p in model.named_parameters()}
        return by_expert(model, {name: full_tensor(t) for name, t in found.items() if t is not None})

    losses = [float(totals.loss) for totals in run_steps(stepper, feed, 1)]
    gradients, first = whole(True), whole(False)
    losses += [float(totals.loss) for totals in run_steps(stepper, feed, STEPS)[1:]]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    return Outcome(gradients, first, whole(False), losses)


def train_on_worker(rank: int, size: int, store: str, cases: list[Case]) -> list[Outcome]:
    with host_world(rank, size, store) as world:
        return [train(case, world) for case in cases]


def share_of_others(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    # The bias of keys has no gradient but rounding errors, which AdamW takes for a direction.
    names = [name for name in expected if not name.endswith("qkv.bias")]
    others = sum(int((found[name] != expected[name]).sum()) for name in names)
    return others / sum(expected[name].numel() for name in names)


@pytest.fixture(scope="module")
def outcomes() -> dict[Case, list[Outcome]]:
    cases = CASES
    by_rank = run_ranks(train_on_worker, WORKERS, cases)
    return {case: list(ranks) for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True)}


@pytest.fixture(scope="module")
def one_process() -> Outcome:
    return train(Case(), World.single_process())


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("case", CASES)
def test_several_workers_round_as_one_process_does(
    case: Case, outcomes: dict[Case, list[Outcome]], one_process: Outcome
) -> None:
    ranks = outcomes[case]
    gradients = merge_hosts([each.gradients for each in ranks])
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert_gradients_equal(gradients, one_process.gradients, 5e-6, 1e-6)
    first = merge_hosts([each.first for each in ranks])
    start = by_expert(TASK.build_model(), dict(TASK.build_model().named_parameters()))
    moved = share_of_others(one_process.first, {name: t.bfloat16() for name, t in start.items()})
    assert moved > 0.3, "a step changes many weights"
    assert share_of_others(first, one_process.first) < FLIPPED
    last = merge_hosts([each.last for each in ranks])
    assert share_of_others(last, one_process.last) < STEPS * FLIPPED
    assert ranks[0].losses == pytest.approx(one_process.losses, rel=1e-4)
    dense = [name for name in first if "bank" not in name]
    for other in ranks[1:]:
        assert all(torch.equal(other.last[name], ranks[0].last[name]) for name in dense)


RUN: dict[str, Any] = {
    "weight_precision": "bf16",
    "global_batch_size": 12,
    "evolution": "off",
    "learning_rate": 1e-3,
    "schedule": "constant",
    "warmup_steps": 0,
    "log_every": 1,
    "deterministic": True,
    "gpu_mode": "cpu",
}


@pytest.mark.extended
def test_runs_on_hosts_go_on_elsewhere(tmp_path: Path) -> None:
    task = Tiny(((3, 5, 2, 4, 6, 7, 2),), dtype=torch.float32)
    hosts: dict[str, Any] = RUN | {"parallel_strategy": "expert_parallel", "rebalance": "on"}
    whole = Run(tmp_path / "whole", task, hosts, [Leg(3, 8)])
    again = Run(tmp_path / "again", task, hosts, [Leg(3, 3), Leg(3, 8)])
    elsewhere = Run(tmp_path / "elsewhere", task, hosts, [Leg(3, 3), Leg(2, 5), Leg(1, 8)])
    replicas = Run(tmp_path / "data", task, RUN | {"parallel_strategy": "data_parallel"}, [Leg(3, 8)])
    run_all([whole, again, elsewhere, replicas])
    assert newest_state(again.folder) == newest_state(whole.folder), "to the bit on as many hosts"
    for other in (elsewhere, replicas):
        assert losses_in(other.folder) == pytest.approx(losses_in(whole.folder), rel=1e-3)
        weights, expected = (
            load(run.folder / "checkpoints" / "step_00000008").tensors["model"] for run in (other, whole)
        )
        assert {t.dtype for name, t in weights.items() if "up" in name} == {torch.bfloat16}
        assert share_of_others(weights, expected) < 8 * FLIPPED


@pytest.mark.extended
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("data_parallel", "adamw"),
        ("expert_parallel", "adamw"),
        ("expert_parallel", "muon"),
        ("data_parallel", "adamw8bit"),
    ],
)
def test_sharded_runs_are_resumed_to_the_bit(strategy: str, optimizer: str, tmp_path: Path) -> None:
    task = Tiny(((3, 5, 2, 4, 6, 7, 2),), dtype=torch.float32)
    settings: dict[str, Any] = RUN | {"optimizer": optimizer}
    sharded: dict[str, Any] = settings | {"parallel_strategy": strategy, "sharding": "zero3"}
    whole = Run(tmp_path / "whole", task, sharded, [Leg(3, 8)])
    again = Run(tmp_path / "again", task, sharded, [Leg(3, 3), Leg(3, 8)])
    one = Run(tmp_path / "one", task, settings, [Leg(1, 8)])
    run_all([whole, again, one])
    assert newest_state(again.folder) == newest_state(whole.folder), "to the bit on as many workers"
    weights, expected = (
        load(run.folder / "checkpoints" / "step_00000008").tensors["model"] for run in (whole, one)
    )
    assert share_of_others(weights, expected) < 8 * FLIPPED


@pytest.mark.extended
def test_copies_of_experts_stay_equal(tmp_path: Path) -> None:
    task = Tiny(((3, 5, 2, 4, 6, 7, 2),), dtype=torch.float32)
    copied: dict[str, Any] = RUN | {"parallel_strategy": "expert_parallel", "expert_replicas": 2}
    runs = [
        Run(tmp_path / "copies", task, copied, [Leg(4, 6)]),
        Run(tmp_path / "one", task, RUN, [Leg(1, 6)]),
    ]
    run_all(runs)
    found, expected = (load(run.folder / "checkpoints" / "step_00000006").tensors["model"] for run in runs)
    assert share_of_others(found, expected) < 6 * FLIPPED


class ShortOfMemory(Text):
    """Runs out of memory on rank 1 in one call of its loss."""

    num_calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 5 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("injected")
        return super().loss(model, batch)


def run_out_of_memory(rank: int, size: int, store: str) -> list[str]:
    """Return the events of a shortage after the steps from which torch's DDP would reduce gradients."""
    with host_world(rank, size, store) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp, "STEPS_BEFORE_OVERLAP", 2)
        events = Events()
        task = ShortOfMemory(TASK.config)
        stepper, feed = make_stepper(task, 6, 12, world=world, emit=events, weight_precision="bf16")
        run_steps(stepper, feed, 6)
        return [event["event"] for event in events.events]


def test_data_parallel_workers_recover_from_a_late_shortage_of_memory() -> None:
    for events in run_ranks(run_out_of_memory, 2):
        assert events.count("oom") == 1
