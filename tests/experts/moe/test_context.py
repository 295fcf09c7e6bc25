"""The context of the MoE layers: the step is replaced as a whole, and comes back after the pass; the cache
of a recomputed pass repeats its values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from experts.moe.context import MoEContext, RecomputeCache, StepContext


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
        StepContext().seed = 1  # pyrefly: ignore[read-only]


# --- the cache of a recomputed pass


def test_the_cache_replays_values_in_order() -> None:
    context = MoEContext()
    cache = RecomputeCache()
    computed: list[int] = []

    def compute() -> int:
        computed.append(len(computed))
        return computed[-1]

    assert [context.replayed(compute), context.replayed(compute)] == [0, 1], (
        "nothing is cached without a cache"
    )
    with cache.recording(context):
        assert not context.replaying
        assert [context.replayed(compute), context.replayed(compute)] == [2, 3]
    for _ in range(2):
        with cache.replaying(context):
            assert context.replaying
            assert [context.replayed(compute), context.replayed(compute)] == [2, 3]
    assert computed == [0, 1, 2, 3]
    assert context.cache is None


def test_the_cache_keeps_values_without_their_autograd_history() -> None:
    context = MoEContext()
    cache = RecomputeCache()
    leaf = torch.ones(3, requires_grad=True)
    with cache.recording(context):
        computed = context.replayed(lambda: (leaf * 2, torch.arange(2)))
    with cache.replaying(context):
        replayed = context.replayed(lambda: computed)
    assert computed[0].grad_fn is not None
    assert replayed[0].grad_fn is None
    assert replayed[0].requires_grad
    assert not replayed[1].requires_grad
    assert torch.equal(replayed[0], computed[0])


def test_a_pass_that_fails_restores_the_cache_before_it() -> None:
    context = MoEContext()
    outer = RecomputeCache()
    with outer.recording(context):
        with pytest.raises(ZeroDivisionError), RecomputeCache().recording(context):
            raise ZeroDivisionError
        assert context.cache is outer
    assert context.cache is None
