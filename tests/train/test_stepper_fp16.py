"""Tests of steps in fp16, on CPUs: the norm is that of fp32, and an overflow on one worker is an overflow
on all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from harness.hosts.ranks import run_ranks
from harness.runs.host_runs import step_batches
from harness.runs.steppers import assert_gradients_equal, gradients, make_stepper, mean_loss, run_steps
from harness.runs.tiny_model import Tiny
from harness.storage.snapshots import captured_contents
from orchestrator.checkpoint.progress import Progress
from orchestrator.train.checkpoint.restore import restore
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.optim.optimizer import ScheduledOptimizer, warmup_schedule
from orchestrator.train.optim.shards import local_part
from orchestrator.train.stepper import Stepper

SIZES = (3, 5, 2, 4, 6, 7)
TASK = Tiny((SIZES, SIZES), dtype=torch.float32)
HOST_OF = [[expert % 2 for expert in range(len(SIZES))]] * 2
INITIAL_SCALE = 2.0**16


# --- one process


@pytest.mark.parametrize("micro_batch", [16, 6])
def test_gradients_and_norm_of_fp16_are_near_those_of_fp32(micro_batch: int) -> None:
    """Gradients are divided by the loss scale before the norm is taken; only the rounding of fp16 is left."""
    expected, expected_feed = make_stepper(TASK, micro_batch, 16, clip_norm=0.0)
    stepper, feed = make_stepper(TASK, micro_batch, 16, clip_norm=0.0, precision="fp16")
    expected_totals = run_steps(expected, expected_feed, 1)[0]
    totals = run_steps(stepper, feed, 1)[0]
    assert totals.norm is not None
    assert expected_totals.norm is not None
    assert mean_loss(totals) == pytest.approx(mean_loss(expected_totals), rel=2e-3)
    assert float(totals.norm) == pytest.approx(float(expected_totals.norm), rel=5e-3)
    assert_gradients_equal(
        gradients(stepper.strategy.model), gradients(expected.strategy.model), of_own=2e-2, of_global=2e-3
    )


def test_gradients_are_clipped_by_the_norm_without_the_scale() -> None:
    stepper, feed = make_stepper(TASK, 16, 16, clip_norm=0.05, precision="fp16")
    totals = run_steps(stepper, feed, 1)[0]
    assert totals.norm is not None
    assert float(totals.norm) > 1.0, "clipping must have something to do"
    clipped = torch.stack([g.norm() for g in gradients(stepper.strategy.model).values()]).norm()
    assert float(clipped) == pytest.approx(0.05, rel=1e-5)


def test_another_scale_gives_the_same_step() -> None:
    """The scale is a power of two, so it cancels without rounding while nothing over- or underflows."""
    norms = []
    for scale in (INITIAL_SCALE, INITIAL_SCALE / 16):
        stepper, feed = make_stepper(TASK, 16, 16, precision="fp16")
        stepper.precision.load_state_dict({"scale": scale, "good_steps": 0.0})
        norms.append([float(t.norm) for t in run_steps(stepper, feed, 3) if t.norm is not None])
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def use_optimizer(stepper: Stepper, kind: str) -> Stepper:
    """Return a stepper with a fused AdamW, which skips an update by itself, or with an SGD, which cannot."""
    if kind == "fused AdamW":
        return stepper
    sgd = torch.optim.SGD(stepper.strategy.model.parameters(), lr=0.1, fused=False)
    return replace(stepper, optimizer=ScheduledOptimizer(sgd, warmup_schedule("constant", 0, 1000)))


@pytest.mark.parametrize("kind", ["fused AdamW", "SGD"])
def test_an_overflow_halves_the_scale_and_skips_the_update(kind: str) -> None:
    stepper, feed = make_stepper(TASK, 8, 16, precision="fp16")
    stepper = use_optimizer(stepper, kind)
    steps = run_with_overflow(stepper, feed, overflow="dense")
    assert [step.scale for step in steps] == [INITIAL_SCALE, INITIAL_SCALE / 2, INITIAL_SCALE / 2]
    assert [step.good_steps for step in steps] == [1, 0, 1]
    assert [step.moved for step in steps] == [True, False, True]
    assert [step.finite for step in steps] == [True, False, True]


@dataclass(frozen=True)
class Normed(Tiny):
    """The tiny model with a batch norm, which keeps statistics of its passes."""

    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        model.head = nn.Sequential(nn.BatchNorm1d(self.width), model.head)
        return model


def test_a_skipped_step_changes_neither_balance_nor_statistics() -> None:
    task = Normed((SIZES, SIZES), dtype=torch.float32, options={"bias_rate": 0.01})
    stepper, feed = make_stepper(task, 8, 16, precision="fp16")
    model: Any = stepper.strategy.model
    states: list[list[Tensor]] = []
    for step, batch in enumerate(step_batches(feed, 3)):
        undo = make_overflow(stepper, "dense") if step == 1 else None
        stepper.run(batch, step)
        if undo is not None:
            undo()
        states.append([buffer.clone() for buffer in model.buffers()])
    names = [name for name, _ in model.named_buffers()]
    assert {"blocks.0.ffn.load_E", "blocks.1.ffn.gate.bias_E", "head.0.running_mean"} <= set(names)
    for name, first, skipped, third in zip(names, *states, strict=True):
        assert torch.equal(first, skipped), name
        is_changing = name.endswith(("load_E", "bias_E", "running_mean", "running_var"))
        assert not is_changing or not torch.equal(skipped, third), name


def test_a_checkpoint_keeps_the_scale_and_the_count_of_good_steps() -> None:
    stepper, feed = make_stepper(TASK, 8, 16, precision="fp16")
    run_with_overflow(stepper, feed, overflow="dense")
    contents = captured_contents(state_of(stepper), Progress(3))
    resumed, _ = make_stepper(TASK, 8, 16, precision="fp16")
    restore(contents, state_of(resumed))
    assert resumed.precision.state_dict() == {"scale": INITIAL_SCALE / 2, "good_steps": 1.0}
    batch = next(feed.steps(5))
    assert mean_loss(resumed.run(batch, 3)) == mean_loss(stepper.run(batch, 3))
    assert resumed.precision.state_dict() == stepper.precision.state_dict()


def state_of(stepper: Stepper) -> TrainState:
    return TrainState(stepper.strategy.model, stepper.optimizer.inner, stepper.precision)


# --- several workers


@dataclass(frozen=True)
class StepRecord:
    scale: float
    good_steps: int
    moved: bool
    """Whether the step changed this worker's weights."""
    finite: bool
    """Whether this worker found the gradients finite."""


def run_with_overflow(stepper: Stepper, feed: Any, overflow: str | None) -> list[StepRecord]:
    """Run three steps; in the second, this worker's gradient of the named kind is infinite."""
    model = stepper.strategy.model
    records: list[StepRecord] = []
    for step, batch in enumerate(step_batches(feed, 3)):
        before = local_weights(model)
        undo = make_overflow(stepper, overflow) if step == 1 and overflow else None
        totals = stepper.run(batch, step)
        if undo is not None:
            undo()
        state = stepper.precision.state_dict()
        moved = any(not torch.equal(a, b) for a, b in zip(before, local_weights(model), strict=True))
        assert totals.finite is not None
        records.append(StepRecord(state["scale"], int(state["good_steps"]), moved, bool(totals.finite)))
    return records


def local_weights(model: nn.Module) -> list[Tensor]:
    return [local_part(parameter.detach()).clone() for parameter in model.parameters()]


def make_overflow(stepper: Stepper, kind: str) -> Any:
    """Make one of this worker's gradients infinite; return the function that undoes it."""
    model: Any = stepper.strategy.model
    if kind == "shard":
        real = stepper.strategy.gradient_norm
        stepper.strategy.gradient_norm = lambda gradients, expert_squares: real(
            [gradient.fill_(torch.inf) for gradient in gradients], expert_squares
        )
        return lambda: setattr(stepper.strategy, "gradient_norm", real)
    parameter = model.stem.weight
    if kind == "expert":
        parameter = next(stack for _, layer in moe_layers(model) for _, _, stack in layer.bank.stacks())
    return parameter.register_hook(lambda gradient: torch.full_like(gradient, torch.inf)).remove


def overflow_on_rank(
    rank: int, size: int, store: str, strategy: str, overflow: str, on_rank: int
) -> list[StepRecord]:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        stepper, feed = make_fp16_stepper(world, strategy)
        return run_with_overflow(stepper, feed, overflow if rank == on_rank else None)


def make_fp16_stepper(world: World, strategy: str) -> tuple[Stepper, Any]:
    return make_stepper(
        TASK,
        8,
        16,
        world=world,
        sharding="zero3" if strategy == "fsdp" else "none",
        host_of=HOST_OF if strategy == "expert_parallel" else None,
        precision="fp16",
    )


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize("on_rank", [0, 1])
@pytest.mark.parametrize(
    ("strategy", "overflow"),
    [("expert_parallel", "expert"), ("expert_parallel", "dense"), ("ddp", "dense"), ("fsdp", "shard")],
)
def test_an_overflow_on_one_worker_lowers_the_scale_on_all(
    strategy: str, overflow: str, on_rank: int
) -> None:
    """All workers skip the same update and keep one scale; otherwise their weights would drift apart in
    silence."""
    for steps in run_ranks(overflow_on_rank, 2, strategy, overflow, on_rank):
        assert [step.finite for step in steps] == [True, False, True]
        assert [step.scale for step in steps] == [INITIAL_SCALE, INITIAL_SCALE / 2, INITIAL_SCALE / 2]
        assert [step.good_steps for step in steps] == [1, 0, 1]
        assert [step.moved for step in steps] == [True, False, True]
