"""Steps without anything to do are passed over: the others are the same as if every step were looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from experts.moe.context import MoEContext
from orchestrator.checkpoint.progress import Progress
from orchestrator.checkpoint.saved_experts import EvolutionState
from orchestrator.record.files.log import SilentLog
from orchestrator.train.evolution.engine import Evolution
from orchestrator.train.evolution.plan import EvolutionPlan

STEPS = 60


class RecordedEvolution(Evolution):
    """Records what it does after each step, and changes no expert."""

    def __init__(self, plan: EvolutionPlan, context: MoEContext, ramp: int, balance_every: int) -> None:
        strategy = SimpleNamespace(model=nn.Identity(), context=context)
        stepper: Any = SimpleNamespace(strategy=strategy, world=None)
        super().__init__(plan, stepper, SilentLog(), None, EvolutionState())
        self._ramp = ramp
        self._balance_every = balance_every
        self.num_looks = 0
        self.record: list[Any] = []

    def _find_warmups(self) -> None:
        self._last_ramp_step = getattr(self, "_ramp", 0)

    def born(self, step: int, warm_after: int) -> None:
        self._next_warmed_step = step + warm_after
        self._last_ramp_step = step + warm_after

    def _set_priors(self, step: int) -> None:
        self.num_looks += 1
        if step <= self._last_ramp_step:
            self.record.append(("priors", step))

    def _run(self, progress: Progress, due: frozenset[str]) -> None:
        step = progress.step
        self.record.append((step, sorted(due)))
        if "warmup" in due:
            self._next_warmed_step = None
        if "balance" in due:
            self._state.balance_step = step + self._balance_every
        if "sleep" in due and step % 3 == 0:
            self.born(step, warm_after=5)


class LooksAtEveryStep(RecordedEvolution):
    def _next_busy_step(self, progress: Progress) -> int:
        return progress.step + 1


def play(kind: type[RecordedEvolution], plan: EvolutionPlan, ramp: int, balance_every: int) -> Any:
    """Return what is done after each step, and how many steps were looked at."""
    context = MoEContext()
    evolution = kind(plan, context, ramp, balance_every)
    progress = Progress()
    evolution.start(progress)
    epoch_steps = plan.steps_left(Progress()) or 7
    for _ in range(STEPS):
        evolution.record.append(("observed", context.observing))
        progress.step += 1
        progress.position += 1
        evolution.record.append(("due", evolution.is_due(progress)))
        evolution.after_step(progress)
        if progress.position == epoch_steps:
            progress.position = 0
    return evolution.record, evolution.num_looks


@given(
    epoch_steps=st.integers(1, 25),
    is_known=st.booleans(),
    sleep_every=st.sampled_from([0, 0, 1, 2, 5, 8, 16, 24]),
    balance_every=st.sampled_from([0, 1, 3, 10]),
    ramp=st.integers(0, 12),
    has_policy=st.booleans(),
)
def test_idle_steps_are_those_without_anything_to_do(
    epoch_steps: int, is_known: bool, sleep_every: int, balance_every: int, ramp: int, has_policy: bool
) -> None:
    def steps_left(progress: Progress) -> int | None:
        left = epoch_steps - progress.position
        return left if is_known or left == 0 else None

    policy: Any = object() if has_policy else None
    plan = EvolutionPlan(0, steps_left, sleep_every, policy, None, moves=balance_every > 0)
    arguments = plan, ramp, balance_every
    assert play(RecordedEvolution, *arguments)[0] == play(LooksAtEveryStep, *arguments)[0]


@pytest.mark.parametrize(("sleep_every", "looks"), [(1000, 15), (20, 19)])
def test_most_steps_are_idle(sleep_every: int, looks: int) -> None:
    policy: Any = object()
    plan = EvolutionPlan(0, lambda _: 1000, sleep_every, policy)
    assert play(RecordedEvolution, plan, -1, 0)[1] == looks
