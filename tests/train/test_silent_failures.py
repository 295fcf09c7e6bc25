"""Silent errors known from other MoE trainers: incomplete checkpoints, out-of-memory on one rank, and lost
hosts.

Each check passes, and fails when the error is planted in the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experts.expert_state import stacked_names
from harness.faults.planted_faults import (
    HOSTS,
    LEARNING_RATE,
    SIZES,
    Plant,
    TrainingCase,
    by_expert,
    fails_when_planted,
    merge_hosts,
    planted_world,
    step_batches,
    train_single_process,
)
from harness.hosts.ranks import PEER_GONE, run_ranks
from harness.runs.steppers import make_stepper, mean_loss
from harness.runs.tiny_model import Tiny
from orchestrator.checkpoint.files import Contents, load, step_name
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.errors import OutOfMemory, TaskFailed, UserError
from orchestrator.record.files.log import SilentLog
from orchestrator.train.checkpoint import capture as capture_module
from orchestrator.train.checkpoint.restore import restore
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.checkpoint.writer import CheckpointWriter
from orchestrator.train.data.steps import MicroBatch, StepBatch
from orchestrator.train.device.batches import slice_batch
from orchestrator.train.group.world import World
from orchestrator.train.step.out_of_memory import StepRecovery
from orchestrator.train.step.totals import Totals
from orchestrator.train.stepper import Stepper

# --- the checkpoint has one rank's experts, and the run resumes in silence


def keep_own_experts(patch: pytest.MonkeyPatch) -> None:
    keep_own(patch, ("model", "optimizer"))


def keep_own_moments(patch: pytest.MonkeyPatch) -> None:
    keep_own(patch, ("optimizer",))


def keep_own(patch: pytest.MonkeyPatch, kinds: Sequence[str]) -> None:
    """Let only the main host write its experts."""
    real = capture_module.host_share

    def without_experts(state: TrainState, world: World) -> capture_module.HostShare:
        share = real(state, world)
        if world.is_main:
            return share
        stacked = stacked_names(state.model)
        lost = {index for index, t in enumerate(share.tensors) if t.name in stacked and t.kind in kinds}
        return replace(share, own=share.own - lost)

    patch.setattr(capture_module, "host_share", without_experts)


SAVED_CASE = TrainingCase(steps=4)
SAVED_AT = 2


def state_of(stepper: Stepper) -> TrainState:
    return TrainState(stepper.strategy.model, stepper.optimizer.inner, stepper.precision)


def save_on_host(
    rank: int, size: int, store: str, plant: Plant | None
) -> tuple[Contents | None, dict[str, Tensor]]:
    """Return the checkpoint in the middle of a run, and the weights at its end."""
    with planted_world(rank, size, store, plant) as world:
        stepper, feed = SAVED_CASE.stepper(world)
        model = stepper.strategy.model
        folder = Path(f"{store}-checkpoints")
        checkpoints = CheckpointStore(folder, repair=world.is_main)
        writer = CheckpointWriter(checkpoints, state_of(stepper), world, SilentLog())
        for step, batch in enumerate(step_batches(feed, SAVED_CASE.steps)):
            if step == SAVED_AT:
                writer.save(Progress(step))
            stepper.run(batch, step)
        writer.finish()
        writer.close()
        contents = load(folder / step_name(SAVED_AT)) if world.is_main else None
        return contents, by_expert(model, dict(model.named_parameters()))


def save_on_hosts(plant: Plant | None) -> tuple[Contents, dict[str, Tensor]]:
    results = run_ranks(save_on_host, HOSTS, plant)
    (contents,) = [contents for contents, _ in results if contents is not None]
    return contents, merge_hosts([weights for _, weights in results])


def resume_in_one_process(contents: Contents) -> dict[str, Tensor]:
    stepper, feed = SAVED_CASE.stepper(World.single_process())
    model = stepper.strategy.model
    restore(contents, state_of(stepper))
    for step, batch in enumerate(step_batches(feed, SAVED_CASE.steps)):
        if step >= SAVED_AT:
            stepper.run(batch, step)
    return by_expert(model, dict(model.named_parameters()))


def assert_the_checkpoint_has_all_experts(plant: Plant | None) -> None:
    contents, expected = save_on_hosts(plant)
    missing = expected.keys() - contents.tensors["model"].keys()
    assert not missing, f"the checkpoint lacks {sorted(missing)}"
    for name, weight in resume_in_one_process(contents).items():
        torch.testing.assert_close(
            weight, expected[name], rtol=1e-9, atol=1e-9, msg=f"{name} is wrong after resuming"
        )


def test_a_checkpoint_has_the_experts_of_all_hosts() -> None:
    fails_when_planted(
        assert_the_checkpoint_has_all_experts,
        keep_own_experts,
        r"the checkpoint lacks .'blocks\.0\.ffn\.bank\.1\.down'",
    )


@pytest.mark.parametrize("plant", [keep_own_experts, keep_own_moments])
def test_an_incomplete_checkpoint_is_refused(plant: Plant) -> None:
    contents, _ = save_on_hosts(plant)
    message = r"has no blocks\.0\.ffn\.bank\.\d\.\w+; the model has that expert"
    with pytest.raises(UserError, match=message):
        resume_in_one_process(contents)


# --- one rank runs out of memory, and the others keep their batch

OOM_CASE = TrainingCase(Tiny((SIZES,), samples=48), micro_batch=4, steps=3)
OOM_CALL = 3  # of the forward passes, two in a step
PEER_LOST = "the other host is gone"


@dataclass
class OomResult:
    """The steps that a worker completed, and the error that ended its run."""

    losses: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str = ""
    error_type: str = ""
    max_pass_samples: int = 0


def fail_once(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make one call of a forward pass run out of memory."""
    calls = count(1)

    def call(batch: Any, samples: int, last: bool) -> Any:
        if next(calls) == OOM_CALL:
            raise torch.OutOfMemoryError("injected")
        return forward(batch, samples, last)

    return call


def train_out_of_memory(
    rank: int, size: int, store: str, expert_parallel: bool, plant: Plant | None
) -> OomResult:
    """Train; the second worker runs out of memory in the second step."""
    result = OomResult()
    try:
        with planted_world(rank, size, store, plant) as world:
            stepper, feed = make_oom_stepper(world, expert_parallel)
            if rank == 1:
                stepper._forward = fail_once(stepper._forward)
            for step, batch in enumerate(step_batches(feed, OOM_CASE.steps)):
                totals = stepper.run(batch, step)
                result.losses.append(mean_loss(totals))
                result.counts.append(int(totals.count))
            result.max_pass_samples = stepper.max_pass_samples
    except Exception as error:
        result.error_type = type(error).__name__
        result.error = PEER_LOST if any(phrase in str(error) for phrase in PEER_GONE) else str(error)
    return result


def make_oom_stepper(world: World, expert_parallel: bool) -> tuple[Stepper, Any]:
    if expert_parallel:
        return OOM_CASE.stepper(world)
    return make_stepper(
        OOM_CASE.task,
        OOM_CASE.micro_batch,
        OOM_CASE.global_batch,
        LEARNING_RATE,
        OOM_CASE.clip_norm,
        world=world,
    )


def continue_with_half(patch: pytest.MonkeyPatch) -> None:
    """The worker that runs out of memory drops half of its samples, in silence."""
    real = Stepper._attempt

    def first_half(micro_batch: MicroBatch) -> MicroBatch:
        samples = micro_batch.num_samples
        return replace(
            micro_batch,
            num_samples=samples // 2,
            fetch=lambda: slice_batch(micro_batch.fetch(), 0, samples // 2, samples),
        )

    def attempt(self: Stepper, batch: StepBatch, step: int) -> Totals | None:
        try:
            return real(self, batch, step)
        except torch.OutOfMemoryError:
            halves = [first_half(micro_batch) for micro_batch in batch.micro_batches]
            return real(self, replace(batch, micro_batches=halves), step)

    patch.setattr(Stepper, "_attempt", attempt)


def halve_without_a_vote(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepRecovery, "vote", lambda self, problem: problem)


def assert_hosts_end_together(plant: Plant | None) -> None:
    """Tokens have been sent already, so no vote is possible: the run restarts with a smaller micro-batch."""
    first, second = run_ranks(train_out_of_memory, HOSTS, True, plant)
    expected = train_single_process(OOM_CASE).losses[:1]
    assert [len(host.losses) for host in (first, second)] == [1, 1], (
        f"continued with batches of {second.counts} of {OOM_CASE.global_batch}"
    )
    assert first.losses == second.losses == pytest.approx(expected, rel=1e-12)
    assert first.error == PEER_LOST
    assert second.error_type == OutOfMemory.__name__
    assert second.error == "worker 1 ran out of memory at step 2 with a micro-batch of 4"


def assert_workers_halve_together(plant: Plant | None) -> None:
    expected = train_single_process(OOM_CASE).losses
    workers = run_ranks(train_out_of_memory, HOSTS, False, plant)
    assert [worker.error for worker in workers] == ["", ""]
    for worker in workers:
        assert worker.counts == [OOM_CASE.global_batch] * OOM_CASE.steps, "continued with smaller batches"
        assert worker.losses == pytest.approx(expected, rel=1e-12)
    assert [worker.max_pass_samples for worker in workers] == [2, 2], "one worker halved alone"


def test_hosts_end_together_when_one_runs_out_of_memory() -> None:
    fails_when_planted(
        assert_hosts_end_together, continue_with_half, r"continued with batches of \[16, 12, 16\] of 16"
    )


def test_workers_halve_together_when_one_runs_out_of_memory() -> None:
    fails_when_planted(assert_workers_halve_together, continue_with_half, "continued with smaller batches")
    with pytest.raises(AssertionError, match="one worker halved alone"):
        assert_workers_halve_together(halve_without_a_vote)


def test_a_lost_host_is_not_the_users_error() -> None:
    """A user's error is never retried, and would hide that the other host ran out of memory."""
    first, _ = run_ranks(train_out_of_memory, HOSTS, True, None)
    assert first.error == PEER_LOST
    assert first.error_type != TaskFailed.__name__
