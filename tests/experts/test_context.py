"""The context of the MoE layers: the step is replaced as a whole, and comes back after the pass."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from experts.context import MoEContext, StepContext


def test_a_step_ends_with_its_block() -> None:
    context = MoEContext()
    outer = StepContext(seed=1)
    inner = StepContext(seed=2, dummy=True)
    with context.use_step(outer):
        with context.use_step(inner):
            assert context.step is inner
        assert context.step is outer
    assert context.step == StepContext()


def test_a_step_ends_with_an_error_too() -> None:
    context = MoEContext()
    with pytest.raises(ZeroDivisionError), context.use_step(StepContext(dummy=True)):
        raise ZeroDivisionError
    assert not context.step.dummy


def test_a_step_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        StepContext().seed = 1  # pyright: ignore[reportAttributeAccessIssue]
