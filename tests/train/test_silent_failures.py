"""Silent errors of other MoE trainers, one test each, as in the table in ``facts.md``: checkpoints, memory and hosts that are gone. Each
check fails where its error is planted in our own code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from orchestrator.errors import OutOfMemory, TaskFailed, UserError
from orchestrator.train.batches import slice_batch
from orchestrator.train.checkpoint import capture as capture_module
from orchestrator.train.checkpoint.capture import capture
from orchestrator.train.checkpoint.files import Contents
from orchestrator.train.checkpoint.progress import Progress
from orchestrator.train.checkpoint.restore import restore
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.data import StepBatch
from orchestrator.train.parts.world import World
from orchestrator.train.step import Stepper
from orchestrator.train.totals import Totals
from tests.support.planted_faults import (
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
from tests.support.ranks import PEER_GONE, run_ranks
from tests.support.steppers import make_stepper, mean_loss
from tests.support.tiny_model import Tiny

# The checkpoint keeps one rank's experts, and the run resumes silently.


def keeps_own_experts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture_module, "_gather_experts", lambda *_: None)


def keeps_own_moments(patch: pytest.MonkeyPatch) -> None:
    real = capture_module._gather_experts

    def in_part(both: dict[str, dict[str, Tensor]], *rest: Any) -> None:
        own = dict(both["optimizer"])
        real(both, *rest)
        both["optimizer"] = own

    patch.setattr(capture_module, "_gather_experts", in_part)


SAVED = TrainingCase(steps=4)
SAVED_AT = 2


def saved_on_host(
    rank: int, size: int, store: str, plant: Plant | None
) -> tuple[Contents | None, dict[str, Tensor]]:
    """A checkpoint in the middle of a run, and the weights at its end."""
    with planted_world(rank, size, store, plant) as world:
        stepper, feed = SAVED.stepper(world)
        model, contents = stepper.strategy.model, None
        for step, portion in enumerate(step_batches(feed, SAVED.steps)):
            if step == SAVED_AT:
                contents = capture(
                    TrainState(model, stepper.optimizer.inner, stepper.precision), Progress(step), world
                )
            stepper.run(portion, step)
        return contents, by_expert(model, dict(model.named_parameters()))


def resumed_alone(contents: Contents) -> dict[str, Tensor]:
    stepper, feed = SAVED.stepper(World.single_process())
    model = stepper.strategy.model
    restore(contents, TrainState(model, stepper.optimizer.inner, stepper.precision))
    for step, portion in enumerate(step_batches(feed, SAVED.steps)):
        if step >= SAVED_AT:
            stepper.run(portion, step)
    return by_expert(model, dict(model.named_parameters()))


def saved(plant: Plant | None) -> tuple[Contents, dict[str, Tensor]]:
    answers = run_ranks(saved_on_host, HOSTS, plant)
    (contents,) = [made for made, _ in answers if made is not None]
    return contents, merge_hosts([weights for _, weights in answers])


def a_checkpoint_has_all_experts(plant: Plant | None) -> None:
    contents, expected = saved(plant)
    lacking = expected.keys() - contents.tensors["model"].keys()
    assert not lacking, f"the checkpoint lacks {sorted(lacking)}"
    for name, weight in resumed_alone(contents).items():
        torch.testing.assert_close(
            weight, expected[name], rtol=1e-9, atol=1e-9, msg=f"{name} is wrong after resuming"
        )


def test_checkpoint_keeps_one_ranks_experts() -> None:
    fails_when_planted(
        a_checkpoint_has_all_experts,
        keeps_own_experts,
        r"the checkpoint lacks .'blocks\.0\.ffn\.bank\.1\.down'",
    )
    for plant in (keeps_own_experts, keeps_own_moments):  # nor would it be taken up silently
        with pytest.raises(
            UserError, match=r"has no blocks\.0\.ffn\.bank\.\d\.\w+; the model has that expert"
        ):
            resumed_alone(saved(plant)[0])


# One rank runs out of memory, the others keep their batch.


@dataclass(frozen=True)
class Hurt:
    losses: list[float]
    counts: list[int]
    error: str
    kind: str
    limit: int


HURT = TrainingCase(Tiny((SIZES,), samples=48), micro_batch=4, steps=3)
HURT_AT = 3  # of the forward passes, two in a step
GONE = "the other host is gone"


def short_of_memory(forward: Callable[..., Any]) -> Callable[..., Any]:
    calls = count(1)

    def tight(batch: Any, samples: int, last: bool) -> Any:
        if next(calls) == HURT_AT:
            raise torch.OutOfMemoryError("injected")
        return forward(batch, samples, last)

    return tight


def hurt_on_host(rank: int, size: int, store: str, hosts: bool, plant: Plant | None) -> Hurt:
    """A run of which the second worker runs out of memory in the second step; what each came to."""
    losses, counts, error, kind, limit = [], [], "", "", 0
    try:
        with planted_world(rank, size, store, plant) as world:
            stepper, feed = (
                HURT.stepper(world)
                if hosts
                else make_stepper(
                    HURT.task, HURT.micro_batch, HURT.global_batch, LEARNING_RATE, HURT.clip_norm, world=world
                )
            )
            if rank == 1:
                stepper._forward = short_of_memory(stepper._forward)
            for step, portion in enumerate(step_batches(feed, HURT.steps)):
                totals = stepper.run(portion, step)
                losses.append(mean_loss(totals))
                counts.append(int(totals.count))
            limit = stepper.max_pass_samples
    except Exception as caught:
        kind, error = (
            type(caught).__name__,
            GONE if any(phrase in str(caught) for phrase in PEER_GONE) else str(caught),
        )
    return Hurt(losses, counts, error, kind, limit)


def goes_on_with_half(patch: pytest.MonkeyPatch) -> None:
    """The worker that ran out takes half of its samples, and tells nobody."""
    real = Stepper._attempt

    def attempt(self: Stepper, portion: StepBatch, step: int) -> Totals | None:
        try:
            return real(self, portion, step)
        except torch.OutOfMemoryError:
            half = [
                replace(m, num_samples=m.num_samples // 2, fetch=lambda m=m: _half(m.fetch(), m.num_samples))
                for m in portion.micro_batches
            ]
            return real(self, replace(portion, micro_batches=half), step)

    patch.setattr(Stepper, "_attempt", attempt)


def _half(batch: Any, samples: int) -> Any:
    return slice_batch(batch, 0, samples // 2, samples)


def halves_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stepper, "_vote", lambda self, problem: problem)


def hosts_end_together(plant: Plant | None) -> None:
    """Tokens have left already: nobody can be asked, and the run begins again with less."""
    first, second = run_ranks(hurt_on_host, HOSTS, True, plant)
    expected = train_single_process(HURT, None).losses[:1]
    assert [len(host.losses) for host in (first, second)] == [1, 1], (
        f"went on with batches of {second.counts} of {HURT.global_batch}"
    )
    assert first.losses == second.losses == pytest.approx(expected, rel=1e-12)
    assert first.error == GONE
    assert second.kind == OutOfMemory.__name__
    assert second.error == "worker 1 ran out of memory at step 2 with a micro-batch of 4"


def workers_halve_together(plant: Plant | None) -> None:
    expected = train_single_process(HURT, None).losses
    workers = run_ranks(hurt_on_host, HOSTS, False, plant)
    assert [worker.error for worker in workers] == ["", ""]
    for worker in workers:
        assert worker.counts == [HURT.global_batch] * HURT.steps, "went on with batches"
        assert worker.losses == pytest.approx(expected, rel=1e-12)
    assert [worker.limit for worker in workers] == [2, 2], "one worker halved alone"


def test_one_rank_runs_out_of_memory_and_the_others_keep_their_batch() -> None:
    fails_when_planted(hosts_end_together, goes_on_with_half, r"went on with batches of \[16, 12, 16\] of 16")
    fails_when_planted(workers_halve_together, goes_on_with_half, "went on with batches")
    with pytest.raises(AssertionError, match="one worker halved alone"):
        workers_halve_together(halves_alone)


def test_a_host_that_is_gone_is_no_mistake_of_the_users() -> None:
    """A mistake of theirs is never tried again, and would hide that the other ran out of memory."""
    first, _ = run_ranks(hurt_on_host, HOSTS, True, None)
    assert first.error == GONE
    assert first.kind != TaskFailed.__name__
