"""Tests of the loss scale of fp16: it follows overflows, and survives a restart with its count of good
steps."""

from __future__ import annotations

import json

import pytest
import torch

from orchestrator.train.device import precision as precision_module
from orchestrator.train.device.precision import Precision

CPU = torch.device("cpu")
GOOD = torch.tensor(True)
OVERFLOW = torch.tensor(False)


PLAIN_INTERVAL = precision_module._GROWTH_INTERVAL


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale doubles after five good steps."""
    monkeypatch.setattr(precision_module, "_GROWTH_INTERVAL", 5)


def make_precision(*steps: torch.Tensor) -> Precision:
    """fp16 after the given steps."""
    precision = Precision("fp16", CPU)
    for finite in steps:
        precision.update(finite)
    return precision


def scale_of(precision: Precision) -> float:
    assert precision.scale is not None
    return float(precision.scale)


def test_the_scale_starts_at_two_to_the_sixteen_and_is_halved_on_overflow() -> None:
    assert scale_of(make_precision()) == 2.0**16
    assert scale_of(make_precision(OVERFLOW)) == 2.0**15
    assert scale_of(make_precision(OVERFLOW, GOOD, OVERFLOW)) == 2.0**14


def test_the_scale_doubles_after_five_good_steps_in_a_row() -> None:
    assert scale_of(make_precision(*[GOOD] * 4)) == 2.0**16
    assert scale_of(make_precision(*[GOOD] * 5)) == 2.0**17
    assert scale_of(make_precision(*[GOOD] * 9)) == 2.0**17
    assert scale_of(make_precision(*[GOOD] * 10)) == 2.0**18


def test_a_run_waits_as_many_good_steps_as_torchs_own_scaler() -> None:
    assert torch.amp.GradScaler("cpu").get_growth_interval() == PLAIN_INTERVAL == 2000


def test_an_overflow_restarts_the_count_of_good_steps() -> None:
    after_overflow = [*[GOOD] * 4, OVERFLOW]
    assert scale_of(make_precision(*after_overflow, *[GOOD] * 4)) == 2.0**15
    assert scale_of(make_precision(*after_overflow, *[GOOD] * 5)) == 2.0**16


@pytest.mark.parametrize("good_steps", range(5))
def test_a_restart_keeps_the_scale_and_the_count_of_good_steps(good_steps: int) -> None:
    """The restored scale doubles in exactly the step in which the uninterrupted one does."""
    uninterrupted = make_precision(OVERFLOW, *[GOOD] * good_steps)
    restored = Precision("fp16", CPU)
    restored.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict())))
    assert restored.state_dict() == {"scale": 2.0**15, "good_steps": float(good_steps)}
    for _ in range(7):
        uninterrupted.update(GOOD)
        restored.update(GOOD)
        assert scale_of(restored) == scale_of(uninterrupted)
    assert scale_of(restored) == 2.0 ** (16 if good_steps < 3 else 17), "it doubled once or twice"


def test_a_scale_too_small_for_any_gradient_is_reported() -> None:
    precision = Precision("fp16", CPU)
    precision.load_state_dict({"scale": 2.0**-14, "good_steps": 0.0})
    assert not precision.scale_underflowed()
    precision.update(OVERFLOW)
    assert precision.scale_underflowed()


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp8"])
def test_only_fp16_has_a_scale(kind: precision_module.PrecisionName) -> None:
    precision = Precision(kind, CPU)
    precision.update(OVERFLOW)
    precision.load_state_dict({"scale": 4.0, "good_steps": 1.0})
    assert precision.scale is None
    assert precision.state_dict() == {}
    assert not precision.scale_underflowed()
    gradient = torch.tensor(3.0)
    assert precision.scaled(gradient) is gradient


def test_the_backward_pass_starts_with_the_scale() -> None:
    assert float(make_precision(OVERFLOW).scaled(torch.tensor(0.5))) == 2.0**14
