"""Tests of a step: its result does not depend on how the batch is split, and errors are classified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from harness.runs.steppers import (
    UNEVEN_EXPERTS,
    DoubleDigits,
    DoubleText,
    Events,
    assert_gradients_equal,
    gradients,
    make_stepper,
    mean_loss,
    run_steps,
)
from harness.runs.tiny_model import Tiny
from orchestrator.errors import ResourceError, TaskFailed, UserError
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss, TensorData
from orchestrator.tasks.text import Text
from orchestrator.train.data.indexed import IndexedFeed
from orchestrator.train.step.out_of_memory import GROW_AFTER
from orchestrator.train.step.totals import Totals
from orchestrator.train.stepper import power_of_two

JITTERED = Tiny(((3, 5, 2, 4, 6, 7),), tokens=3, options={"jitter": 0.4})


def norm_of(totals: Totals) -> float:
    assert totals.norm is not None
    return float(totals.norm)


class OutOfMemory:
    """Wraps a task: its loss runs out of memory above ``max_samples`` samples, at the given calls."""

    def __init__(
        self, task: Any, max_samples: int, calls: range | None = None, in_backward: bool = False
    ) -> None:
        self.task = task
        self.max_samples = max_samples
        self.calls = calls
        self.in_backward = in_backward
        self.num_calls = 0
        self.units_per_sample = task.units_per_sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.num_calls += 1
        samples = batch[0].shape[0] if isinstance(batch, tuple) else batch.shape[0]
        result = self.task.loss(model, batch)
        if samples > self.max_samples and (self.calls is None or self.num_calls in self.calls):
            if not self.in_backward:
                raise torch.OutOfMemoryError("injected")
            return Loss(_FailInBackward.apply(result.sum), result.count, result.metrics, result.loads)
        return result


class _FailInBackward(torch.autograd.Function):
    """Runs out of memory in the backward pass, when gradients of earlier micro-batches exist already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("injected in backward")


# --- accumulation


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize(
    ("task", "micro_batch", "global_batch"),
    [(DoubleDigits, 16, 64), (DoubleDigits, 7, 64), (DoubleText, 5, 16)],
)
def test_accumulation_is_exact_in_fp64(task: type, micro_batch: int, global_batch: int) -> None:
    plain, feed = make_stepper(task(UNEVEN_EXPERTS), global_batch, global_batch)
    split, split_feed = make_stepper(task(UNEVEN_EXPERTS), micro_batch, global_batch)
    expected = run_steps(plain, feed, 10)
    for step, totals in enumerate(run_steps(split, split_feed, 10)):
        assert mean_loss(totals) == pytest.approx(mean_loss(expected[step]), rel=1e-12), f"step {step}"
        assert norm_of(totals) == pytest.approx(norm_of(expected[step]), rel=1e-12), f"step {step}"
    assert_gradients_equal(gradients(split.strategy.model), gradients(plain.strategy.model), 1e-10, 1e-12)
    for name, parameter in plain.strategy.model.named_parameters():
        torch.testing.assert_close(split.strategy.model.get_parameter(name), parameter, rtol=1e-9, atol=1e-9)


@pytest.mark.extended
@pytest.mark.parametrize("task", [Digits, Text])
def test_accumulation_is_exact_in_fp32(task: type) -> None:
    """64 × 1 equals 16 × 4 in one step from equal weights, balance loss on, and in 50 free-running steps.

    Free-running, the balance loss has its default weight: at five times that, tokens at a tie between
    experts flip by rounding, and losses differ by 1.2e-5.
    """
    plain, feed = make_stepper(task(UNEVEN_EXPERTS), 64, 64)
    split, split_feed = make_stepper(task(UNEVEN_EXPERTS), 16, 64)
    expected = run_steps(plain, feed, 1)[0]
    totals = run_steps(split, split_feed, 1)[0]
    assert mean_loss(totals) == pytest.approx(mean_loss(expected), rel=1e-6)
    assert norm_of(totals) == pytest.approx(norm_of(expected), rel=1e-6)
    assert_gradients_equal(gradients(split.strategy.model), gradients(plain.strategy.model), 2e-6, 1e-7)
    free_running = UNEVEN_EXPERTS.but(balance_loss=0.01)
    plain, feed = make_stepper(task(free_running), 64, 64)
    split, split_feed = make_stepper(task(free_running), 16, 64)
    expected_losses = [mean_loss(t) for t in run_steps(plain, feed, 50)]
    losses = [mean_loss(t) for t in run_steps(split, split_feed, 50)]
    assert losses == pytest.approx(expected_losses, rel=1e-5)


def test_a_balance_loss_per_micro_batch_would_be_found() -> None:
    """The classic error: counts of the current micro-batch instead of the previous step's."""

    class Wrong(DoubleDigits):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            loss = super().loss(model, batch)
            for _, layer in moe_layers(model):
                layer.load_E.copy_(loss.loads[0])
            return loss

    plain, feed = make_stepper(Wrong(UNEVEN_EXPERTS), 64, 64)
    split, split_feed = make_stepper(Wrong(UNEVEN_EXPERTS), 16, 64)
    expected = run_steps(plain, feed, 3)[-1]
    totals = run_steps(split, split_feed, 3)[-1]
    assert mean_loss(totals) != pytest.approx(mean_loss(expected), rel=1e-6)


def test_a_count_on_the_device_gives_the_same_step() -> None:
    class CountOnDevice(DoubleDigits):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            loss = super().loss(model, batch)
            return Loss(loss.sum, torch.tensor(loss.count), loss.metrics, loss.loads)

    plain, feed = make_stepper(DoubleDigits(UNEVEN_EXPERTS), 16, 48)
    other, other_feed = make_stepper(CountOnDevice(UNEVEN_EXPERTS), 16, 48)
    expected = run_steps(plain, feed, 3)
    totals = run_steps(other, other_feed, 3)
    assert [mean_loss(t) for t in totals] == [mean_loss(t) for t in expected]
    assert [norm_of(t) for t in totals] == pytest.approx([norm_of(t) for t in expected], rel=1e-15)


def test_norm_and_clipping_are_those_of_torch() -> None:
    """The norm is torch's over all parameters, before clipping; gradients are clipped by it."""
    stepper, feed = make_stepper(DoubleDigits(UNEVEN_EXPERTS), 16, 64, clip_norm=0.01)
    totals = run_steps(stepper, feed, 1)[0]
    assert isinstance(feed, IndexedFeed)
    task = DoubleDigits(UNEVEN_EXPERTS)
    model = task.build_model()
    loss = task.loss(model, task.train_data().gather(feed.order(0)[:64]))
    (loss.sum / loss.count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert norm_of(totals) == pytest.approx(float(norm), rel=1e-12)
    # Torch adds 1e-6 to the norm that it divides by.
    assert_gradients_equal(gradients(stepper.strategy.model), gradients(model), 1e-4, 1e-12)


def test_power_of_two() -> None:
    assert [power_of_two(x) for x in (0, 1, 3, 64, 100)] == [1, 1, 4, 64, 128]


# --- out of memory


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_halved_by_out_of_memory_has_the_same_result(in_backward: bool) -> None:
    plain, feed = make_stepper(DoubleDigits(UNEVEN_EXPERTS), 32, 64)
    events = Events()
    task = OutOfMemory(
        DoubleDigits(UNEVEN_EXPERTS), max_samples=9, calls=range(6, 9), in_backward=in_backward
    )
    halved, halved_feed = make_stepper(task, 32, 64, emit=events)
    assert_same_steps(run_steps(halved, halved_feed, 8), run_steps(plain, feed, 8))
    assert_gradients_equal(gradients(halved.strategy.model), gradients(plain.strategy.model), 1e-10, 1e-12)
    sizes = [(event["micro_batch"], event["next_micro_batch"]) for event in events.of("oom")]
    assert sizes == [(32, 16), (16, 8)]


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_halved_step_draws_the_same_gate_jitter(in_backward: bool) -> None:
    """The noise of a token depends on its position in the global batch, in whichever pass it is computed.

    Two micro-batches of 8 samples, halved twice, equal one pass: passes begin at samples 0, 2, 4, ... of
    the batch.
    """
    plain, feed = make_stepper(JITTERED, 16, 16)
    task = OutOfMemory(JITTERED, max_samples=2, calls=range(3, 7), in_backward=in_backward)
    halved, halved_feed = make_stepper(task, 8, 16)
    expected = run_steps(plain, feed, 4)
    assert_same_steps(run_steps(halved, halved_feed, 4), expected)
    assert halved.max_pass_samples == 2
    assert_gradients_equal(gradients(halved.strategy.model), gradients(plain.strategy.model), 1e-10, 1e-12)
    without_jitter, other_feed = make_stepper(Tiny(JITTERED.sizes, tokens=3), 8, 16)
    other = run_steps(without_jitter, other_feed, 4)
    assert loads_of(other) != loads_of(expected), "the jitter is too small to be seen"


def loads_of(totals: list[Totals]) -> list[list[list[int]]]:
    return [[load.tolist() for load in t.loads] for t in totals]


def assert_same_steps(totals: list[Totals], expected: list[Totals]) -> None:
    assert [mean_loss(t) for t in totals] == pytest.approx([mean_loss(t) for t in expected], rel=1e-12)
    assert [norm_of(t) for t in totals] == pytest.approx([norm_of(t) for t in expected], rel=1e-12)
    assert loads_of(totals) == loads_of(expected)


@pytest.mark.extended
def test_the_micro_batch_grows_back() -> None:
    events = Events()
    task = OutOfMemory(Digits(UNEVEN_EXPERTS), max_samples=4, calls=range(1, 2))
    stepper, feed = make_stepper(task, 8, 8, emit=events)
    run_steps(stepper, feed, GROW_AFTER)
    assert stepper.max_pass_samples == 4
    run_steps(stepper, feed, 2 * GROW_AFTER)
    assert stepper.max_pass_samples == 8
    assert "back to 8" in events.of("warning")[0]["message"]


def test_one_sample_that_does_not_fit_is_a_resource_error() -> None:
    stepper, feed = make_stepper(OutOfMemory(Digits(UNEVEN_EXPERTS), max_samples=0), 4, 4)
    with pytest.raises(ResourceError, match="micro-batch of one sample"):
        run_steps(stepper, feed, 1)


# --- errors and randomness


def test_a_users_exception_is_shown_with_its_own_frame() -> None:
    class Broken(Digits):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            raise ZeroDivisionError("my own mistake")

    stepper, feed = make_stepper(Broken(UNEVEN_EXPERTS), 4, 4)
    with pytest.raises(TaskFailed) as caught:
        run_steps(stepper, feed, 1)
    first, _, rest = str(caught.value).partition("\n")
    assert first == "ZeroDivisionError: my own mistake"
    assert "test_stepper.py" in rest
    assert 'raise ZeroDivisionError("my own mistake")' in rest


def test_a_batch_on_another_device_is_refused() -> None:
    stepper, _ = make_stepper(Digits(UNEVEN_EXPERTS), 4, 4)
    batch = TensorData(torch.zeros(4, 3, device="meta")).tensors
    with pytest.raises(UserError, match="is on meta; the model is on cpu"):
        stepper._forward(batch, 4, last=True)


def test_randomness_depends_on_seed_and_step_alone() -> None:
    """Dropout draws the same in a repeated step, and differs in the next."""

    class Dropping(Digits):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 10))

        def loss(self, model: nn.Module, batch: Any) -> Any:
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    def losses() -> list[float]:
        torch.manual_seed(99)  # for the weights; the steps do not draw from this state
        stepper, feed = make_stepper(Dropping(UNEVEN_EXPERTS), 8, 8)
        torch.rand(int(torch.randint(1, 9, ())))
        return [mean_loss(t) for t in run_steps(stepper, feed, 3)]

    assert losses() == losses()
    assert len(set(losses())) == 3


class Drawing(Tiny):
    """A task whose loss depends on torch's random numbers."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = super().loss(model, batch)
        return Loss(found.sum * (1 + torch.rand(())), found.count, found.metrics, found.loads)


class Previewing(Drawing):
    """The same task, which looks at the whole step before it, and draws random numbers then."""

    def prepare_step(self, preview: Any) -> None:
        del preview
        torch.rand(3)


def test_a_preview_leaves_the_random_numbers_of_the_step_as_they_were() -> None:
    losses = []
    for task in (Drawing(((3, 5),)), Previewing(((3, 5),))):
        stepper, feed = make_stepper(task, micro_batch=4, global_batch=8)
        losses.append([mean_loss(totals) for totals in run_steps(stepper, feed, 3)])
    assert losses[0] == losses[1]
