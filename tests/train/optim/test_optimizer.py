"""The learning-rate schedule by hand, skipped updates, and gradients clipped in one pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.train.optim.gradient_norm import norm_of_gradients
from orchestrator.train.optim.optimizer import (
    ScheduledOptimizer,
    clip_factor,
    scale_gradients,
    warmup_schedule,
)

# --- the schedule


def test_warm_up_is_linear_and_reaches_the_peak_after_it() -> None:
    factor = warmup_schedule("constant", 4, 100)
    assert [factor(step) for step in (0, 1, 3, 4, 50, 1000)] == [0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert warmup_schedule("constant", 0, 100)(0) == 1.0


def test_the_cosine_falls_from_the_peak_to_a_tenth_and_stays_there() -> None:
    factor = warmup_schedule("cosine", 10, 110)
    assert factor(9) == 10 / 11
    expected = {10: 1.0, 35: 0.1 + 0.45 * (1 + math.sqrt(0.5)), 60: 0.55, 110: 0.1, 500: 0.1}
    assert {step: factor(step) for step in expected} == pytest.approx(expected, rel=1e-12)
    assert warmup_schedule("cosine", 3, 3)(3) == 1.0, "a run of nothing but warm-up"


# --- the optimizer


def make_optimizer(schedule: Any = None, **groups: float) -> tuple[ScheduledOptimizer, list[nn.Parameter]]:
    """SGD with a group for each learning rate, of one weight with a gradient of one."""
    weights = [nn.Parameter(torch.tensor([10.0])) for _ in groups]
    for weight in weights:
        weight.grad = torch.ones(1)
    inner = torch.optim.SGD(
        [{"params": [weight], "lr": rate} for weight, rate in zip(weights, groups.values(), strict=True)],
        lr=1.0,
    )
    return ScheduledOptimizer(inner, lambda step: 1 / (step + 1), schedule), weights


def test_each_group_has_its_own_peak() -> None:
    optimizer, weights = make_optimizer(first=2.0, second=4.0)
    assert optimizer.parameters == weights
    for step in (0, 1):
        optimizer.step(step, None)
    assert [float(weight.detach()) for weight in weights] == [10 - 2 - 1, 10 - 4 - 2]
    assert [group["lr"] for group in optimizer.inner.param_groups] == [1.0, 2.0]
    assert optimizer.learning_rate(3) == 0.5


def test_a_resumed_optimizer_keeps_its_peaks() -> None:
    optimizer, _ = make_optimizer(only=2.0)
    optimizer.step(3, None)
    again = ScheduledOptimizer(optimizer.inner, lambda _: 1.0)
    assert again.learning_rate(0) == 2.0


def test_an_update_is_skipped_if_gradients_overflowed() -> None:
    optimizer, (weight,) = make_optimizer(only=2.0)
    optimizer.step(0, torch.tensor(False))
    assert float(weight.detach()) == 10.0
    optimizer.step(0, torch.tensor(True))
    assert float(weight.detach()) == 8.0


def test_a_fused_optimizer_skips_the_update_on_the_device() -> None:
    class Fused:
        _step_supports_amp_scaling = True
        found: list[float]

        def __init__(self) -> None:
            self.param_groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": 1.0}]
            self.found = []

        def step(self) -> None:
            self.found.append(float(getattr(self, "found_inf", torch.tensor(-1.0))))

    inner: Any = Fused()
    optimizer = ScheduledOptimizer(inner, lambda _: 1.0)
    for finite in (torch.tensor(True), torch.tensor(False), None):
        optimizer.step(0, finite)
    assert inner.found == [0.0, 1.0, -1.0], "without a loss scale nothing is left from the step before"


def test_fused_sgd_equals_plain_sgd_from_a_first_step_that_overflows() -> None:
    """And where a parameter has its first gradient later than others."""

    def trained(fused: bool) -> list[Tensor]:
        weights = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
        optimizer = ScheduledOptimizer(
            torch.optim.SGD(weights, lr=1.0, momentum=0.9, weight_decay=0.1, fused=fused), lambda _: 1.0
        )
        for step, finite in enumerate((False, True, True, True)):
            # Memory that is freed with NaN in it, for a momentum that nobody initialises.
            del [torch.full((1000,), math.nan) for _ in range(20)][:]
            for number, weight in enumerate(weights):
                late = number == 1 and step < 2
                weight.grad = None if late else torch.full((1000,), 1.0 + step)
            optimizer.step(step, torch.tensor(finite))
        return [weight.detach() for weight in weights]

    for fused, plain in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)


def test_only_a_configured_schedule_is_rebuilt() -> None:
    configured, _ = make_optimizer("constant", only=2.0)
    configured.reschedule(1, 10)
    assert [configured.learning_rate(step) for step in (0, 1, 2)] == [1.0, 2.0, 2.0]
    own, _ = make_optimizer(None, only=2.0)
    own.reschedule(1, 10)
    assert [own.learning_rate(step) for step in (0, 1)] == [2.0, 1.0]


# --- norm, scale and clip


def scale_and_clip(gradients: list[Tensor], norm: Tensor, factor: float | Tensor, clip_norm: float) -> Tensor:
    norm, factor = clip_factor(norm, factor, clip_norm)
    scale_gradients(gradients, factor)
    return norm


def gradients_of_norm_five(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.tensor([3.0, 0.0], dtype=dtype), torch.tensor([[4.0]], dtype=dtype)]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(
    ("factor", "clip_norm", "norm", "scale"),
    [
        (1.0, 0.0, 5.0, 1.0),
        (0.5, 0.0, 2.5, 0.5),
        (1.0, 10.0, 5.0, 1.0),
        (1.0, 2.5, 5.0, 0.5),
        (4.0, 2.0, 20.0, 0.4),
        (0.5, 2.5, 2.5, 0.5),
        (1.0, 0.5, 5.0, 0.1),
    ],
)
def test_gradients_are_scaled_and_then_clipped(
    factor: float, clip_norm: float, norm: float, scale: float, as_tensor: bool
) -> None:
    gradients = gradients_of_norm_five()
    given = torch.tensor(factor, dtype=torch.float64) if as_tensor else factor
    returned = scale_and_clip(gradients, norm_of_gradients(gradients), given, clip_norm)
    assert float(returned) == pytest.approx(norm)
    expected = [scale * gradient for gradient in gradients_of_norm_five()]
    for gradient, value in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, value)


def test_a_single_gradient_of_another_type_is_scaled_by_a_factor_on_the_device() -> None:
    gradient = torch.full((2,), 8.0, dtype=torch.bfloat16)
    scale_and_clip([gradient], torch.tensor(1.0), torch.tensor(0.5, dtype=torch.float64), 0.0)
    assert (gradient.tolist(), gradient.dtype) == ([4.0, 4.0], torch.bfloat16)


@pytest.mark.parametrize(
    ("short", "wide"), [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)], ids=str
)
def test_a_factor_on_the_device_has_the_widest_type_of_the_gradients(
    short: torch.dtype, wide: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    types: list[torch.dtype] = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda _, factor: types.append(factor.dtype))
    factor = torch.ones((), dtype=torch.float64, device="meta")
    for order in ((short, wide), (wide, short), (short, short)):
        scale_gradients([torch.empty(2, dtype=dtype, device="meta") for dtype in order], factor)
    assert types == [wide, wide, short]


def test_a_worker_without_gradients_takes_part_in_the_norm() -> None:
    """The norm is that of all workers."""
    assert float(scale_and_clip([], torch.tensor(5.0), 0.5, 1.0)) == 2.5


def test_untouched_gradients_cost_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("gradients that stay as they are were multiplied")

    monkeypatch.setattr(torch, "_foreach_mul_", fail)
    for factor in (1.0, torch.tensor(1.0, dtype=torch.float64)):
        assert float(scale_and_clip(gradients_of_norm_five(), torch.tensor(5.0), factor, 0.0)) == 5.0
