"""A step is the same however its batch is cut: accumulation, out of memory, short last batches; and errors are told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, TaskFailed, UserError
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss, TensorData
from orchestrator.tasks.text import Text
from orchestrator.tasks.validate import as_loss
from orchestrator.train.step import GROW_AFTER, power_of_two
from tests.support.steppers import (
    DoubleDigits,
    DoubleText,
    Events,
    assert_gradients_equal,
    gradients,
    make_stepper,
    mean_loss,
    run_steps,
)

CONFIG = Config.of(
    expert_hidden_size=(8, 16, 8, 24, 16),
    experts=5,
    width=16,
    balance_loss=0.05,
    z_loss=0.001,
    context_length=24,
    layers=2,
)


class OutOfMemory:
    """Wraps a task: its loss runs out of memory when more than ``room`` samples meet, at the given calls."""

    def __init__(
        self, task: Any, room: int, calls: range | None = None, after_backward: bool = False
    ) -> None:
        self.task, self.room, self.calls, self.count = task, room, calls, 0
        self.after_backward = after_backward
        self.units_per_sample = task.units_per_sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.count += 1
        samples = batch[0].shape[0] if isinstance(batch, tuple) else batch.shape[0]
        result = self.task.loss(model, batch)
        if samples > self.room and (self.calls is None or self.count in self.calls):
            if not self.after_backward:
                raise torch.OutOfMemoryError("injected")
            return Loss(_Explode.apply(result.sum), result.count, result.metrics, result.loads)
        return result


class _Explode(torch.autograd.Function):
    """Runs out of memory in the backward pass, when gradients of earlier micro-batches are already there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("injected in backward")


@pytest.mark.parametrize(
    ("task", "micro", "whole"), [(DoubleDigits, 16, 64), (DoubleDigits, 7, 64), (DoubleText, 5, 16)]
)
def test_accumulation_is_exact_in_fp64(task: type, micro: int, whole: int) -> None:
    one, feed = make_stepper(task(CONFIG), whole, whole)
    cut, cut_feed = make_stepper(task(CONFIG), micro, whole)
    for step, (a, b) in enumerate(zip(run_steps(one, feed, 10), run_steps(cut, cut_feed, 10), strict=True)):
        assert mean_loss(b) == pytest.approx(mean_loss(a), rel=1e-12), f"step {step}"
        assert float(b.norm) == pytest.approx(float(a.norm), rel=1e-12)  # pyright: ignore[reportArgumentType]
    assert_gradients_equal(gradients(cut.strategy.model), gradients(one.strategy.model), 1e-10, 1e-12)
    for name, parameter in one.strategy.model.named_parameters():
        torch.testing.assert_close(cut.strategy.model.get_parameter(name), parameter, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("task", [Digits, Text])
def test_accumulation_is_exact_in_fp32(task: type) -> None:
    """64 × 1 against 16 × 4, balance loss on: one step from equal weights, then 50 free-running. There the balance loss has
    its default weight: at five times that, tokens at a tie between experts flip by rounding and losses differ by 1.2e-5."""
    one, feed = make_stepper(task(CONFIG), 64, 64)
    cut, cut_feed = make_stepper(task(CONFIG), 16, 64)
    (a,), (b,) = run_steps(one, feed, 1), run_steps(cut, cut_feed, 1)
    assert mean_loss(b) == pytest.approx(mean_loss(a), rel=1e-6)
    assert float(b.norm) == pytest.approx(float(a.norm), rel=1e-6)  # pyright: ignore[reportArgumentType]
    assert_gradients_equal(gradients(cut.strategy.model), gradients(one.strategy.model), 2e-6, 1e-7)
    free = CONFIG.but(balance_loss=0.01)
    one, feed = make_stepper(task(free), 64, 64)
    cut, cut_feed = make_stepper(task(free), 16, 64)
    for a, b in zip(run_steps(one, feed, 50), run_steps(cut, cut_feed, 50), strict=True):
        assert mean_loss(b) == pytest.approx(mean_loss(a), rel=1e-5)


@pytest.mark.parametrize("after_backward", [False, True])
def test_out_of_memory_is_survived_with_the_same_result(after_backward: bool) -> None:
    plain, feed = make_stepper(DoubleDigits(CONFIG), 32, 64)
    events = Events()
    hurt_task = OutOfMemory(DoubleDigits(CONFIG), room=9, calls=range(6, 9), after_backward=after_backward)
    hurt, hurt_feed = make_stepper(hurt_task, 32, 64, emit=events)
    for a, b in zip(run_steps(plain, feed, 8), run_steps(hurt, hurt_feed, 8), strict=True):
        assert mean_loss(b) == pytest.approx(mean_loss(a), rel=1e-12)
        assert float(b.norm) == pytest.approx(float(a.norm), rel=1e-12)  # pyright: ignore[reportArgumentType]
        assert [int(x) for x in b.loads[0]] == [int(x) for x in a.loads[0]]
    assert_gradients_equal(gradients(hurt.strategy.model), gradients(plain.strategy.model), 1e-10, 1e-12)
    assert [(e["micro_batch"], e["next_micro_batch"]) for e in events.of("oom")] == [(32, 16), (16, 8)]


def test_the_micro_batch_grows_back() -> None:
    events = Events()
    stepper, feed = make_stepper(OutOfMemory(Digits(CONFIG), room=4, calls=range(1, 2)), 8, 8, emit=events)
    run_steps(stepper, feed, GROW_AFTER)
    assert stepper.max_pass_samples == 4
    run_steps(stepper, feed, 2 * GROW_AFTER)
    assert stepper.max_pass_samples == 8
    assert "back to 8" in events.of("warning")[0]["message"]


def test_one_sample_that_does_not_fit_is_a_resource_error() -> None:
    stepper, feed = make_stepper(OutOfMemory(Digits(CONFIG), room=0), 4, 4)
    with pytest.raises(ResourceError, match="micro-batch of one sample"):
        run_steps(stepper, feed, 1)


def test_a_users_exception_is_told_with_its_own_frame() -> None:
    class Broken(Digits):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            raise ZeroDivisionError("my own mistake")

    stepper, feed = make_stepper(Broken(CONFIG), 4, 4)
    with pytest.raises(TaskFailed) as caught:
        run_steps(stepper, feed, 1)
    first, _, rest = str(caught.value).partition("\n")
    assert first == "ZeroDivisionError: my own mistake"
    assert "test_step.py" in rest
    assert 'raise ZeroDivisionError("my own mistake")' in rest


def test_randomness_is_a_function_of_seed_and_step() -> None:
    """Dropout draws the same in a repeated step, and not the same in the next."""

    class Dropping(Digits):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10))

        def loss(self, model: nn.Module, batch: Any) -> Any:
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    def losses() -> list[float]:
        torch.manual_seed(99)  # the weights; what the steps draw does not come from here
        stepper, feed = make_stepper(Dropping(CONFIG), 8, 8)
        torch.rand(int(torch.randint(1, 9, ())))
        return [mean_loss(t) for t in run_steps(stepper, feed, 3)]

    assert losses() == losses()
    assert len(set(losses())) == 3


def test_a_loss_may_be_a_mean_a_pair_or_a_loss() -> None:
    mean, weight = as_loss(torch.tensor(2.0), 8)
    assert (float(mean.sum) * weight, mean.count) == (16.0, 8)
    pair, weight = as_loss((torch.tensor(6.0), 3), 8)
    assert (float(pair.sum) * weight, pair.count) == (6.0, 3)
    for wrong in (torch.zeros(3), "loss", None):
        with pytest.raises(UserError, match="needed"):
            as_loss(wrong, 8)


def test_a_count_on_the_device_gives_the_same_step() -> None:
    class Counting(DoubleDigits):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            loss = super().loss(model, batch)
            return Loss(loss.sum, torch.tensor(loss.count), loss.metrics, loss.loads)

    plain, feed = make_stepper(DoubleDigits(CONFIG), 16, 48)
    other, other_feed = make_stepper(Counting(CONFIG), 16, 48)
    for a, b in zip(run_steps(plain, feed, 3), run_steps(other, other_feed, 3), strict=True):
        assert mean_loss(a) == mean_loss(b)
        assert float(a.norm) == pytest.approx(float(b.norm), rel=1e-15)  # pyright: ignore[reportArgumentType]


def test_norm_and_clipping_against_torch() -> None:
    """The norm is torch's own over all parameters, before clipping; the gradients end up clipped by it."""
    stepper, feed = make_stepper(DoubleDigits(CONFIG), 16, 64, clip_norm=0.01)
    (totals,) = run_steps(stepper, feed, 1)
    reference = DoubleDigits(CONFIG)
    model = reference.build_model()
    batch = reference.train_data().gather(feed.order(0)[:64])
    loss = reference.loss(model, batch)
    (loss.sum / loss.count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert float(totals.norm) == pytest.approx(float(norm), rel=1e-12)  # pyright: ignore[reportArgumentType]
    assert_gradients_equal(
        gradients(stepper.strategy.model), gradients(model), 1e-4, 1e-12
    )  # torch adds 1e-6 to the norm


def test_power_of_two() -> None:
    assert [power_of_two(x) for x in (0, 1, 3, 64, 100)] == [1, 1, 4, 64, 128]


def test_balance_loss_planted_per_micro_batch_shows() -> None:
    """The classic error: counts of the micro-batch at hand in place of the previous step's. The test above must see it."""

    class Wrong(DoubleDigits):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            loss = super().loss(model, batch)
            for name, module in model.named_modules():
                if name.endswith("ffn"):
                    module.load_E.copy_(loss.loads[0])  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
            return loss

    one, feed = make_stepper(Wrong(CONFIG), 64, 64)
    cut, cut_feed = make_stepper(Wrong(CONFIG), 16, 64)
    a, b = run_steps(one, feed, 3)[-1], run_steps(cut, cut_feed, 3)[-1]
    assert mean_loss(b) != pytest.approx(mean_loss(a), rel=1e-6)


def test_batch_on_the_wrong_device_is_named() -> None:
    class Elsewhere(Digits):
        def train_data(self) -> TensorData:
            return TensorData(*(t.to("meta") for t in super().train_data().tensors))

    stepper, feed = make_stepper(Elsewhere(CONFIG), 4, 4)
    feed.data = Elsewhere(CONFIG).train_data()
    micro = next(feed.steps(0)).micro_batches[0]
    with pytest.raises(UserError, match="is on meta; the model is on cpu"):
        stepper._forward(TensorData(torch.zeros(4, 3, device="meta")).tensors, micro.num_samples, last=True)
