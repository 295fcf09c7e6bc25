"""Tests of steps in graphs: which steps they replace, and what ends them. A fake graph runs on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.runs.steppers import Events, make_stepper, run_steps, weights
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Task, TensorData
from orchestrator.train.data.steps import Feed
from orchestrator.train.step_graph.graphs import MAX_GRAPHS, WARM_UP_STEPS, StepGraphs
from orchestrator.train.step_graph.layout import copy_tensors
from orchestrator.train.step_graph.recorder import CaptureFailed
from orchestrator.train.stepper import Stepper

T = TypeVar("T")


class FakeRecorder:
    """Counts what happens. ``failure`` is the reason why the next capture fails."""

    def __init__(self, failure: str | None = None) -> None:
        self.failure = failure
        self.num_warm_ups = 0
        self.num_records = 0
        self.num_replays = 0
        self.num_forgotten = 0

    def warm_up(self, function: Callable[[], T]) -> T:
        self.num_warm_ups += 1
        return function()

    def record(self, function: Callable[[], T]) -> Callable[[], T]:
        if self.failure is not None:
            raise CaptureFailed(self.failure)
        self.num_records += 1

        def replay() -> T:
            self.num_replays += 1
            return function()

        return replay

    def forget(self) -> None:
        self.num_forgotten += 1


def with_graphs(stepper: Stepper, recorder: FakeRecorder, required: bool = False) -> Stepper:
    """Let a stepper use graphs of this recorder."""
    device = stepper.world.device
    stepper.graphs = StepGraphs(recorder, stepper.strategy, stepper.optimizer, device, stepper.emit, required)
    return stepper


SIZES = Config.of(width=16, experts=4, expert_hidden_size=(8,), layers=1)
RATE = 2.0**-9  # exact in fp32, as a graph reads it
BEFORE = WARM_UP_STEPS + 1  # steps before the first replay


class Net(Task):
    """Dropout and batch norm. 40 samples in batches of 12 end with a batch of 4."""

    def __init__(self) -> None:
        self.temperature = 1.0
        self.table = {"weight": 1.0}

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(3, (40,), generator=generator)
        return TensorData(torch.randn(40, 6, generator=generator), labels)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]) / self.temperature, batch[1])


def graphed(task: Any, recorder: FakeRecorder, required: bool = False) -> tuple[Stepper, Feed, Events]:
    events = Events()
    stepper, feed = make_stepper(task, 12, 12, learning_rate=RATE, emit=events)
    return with_graphs(stepper, recorder, required), feed, events


def statuses(events: Events) -> list[str]:
    return [fields["status"] for fields in events.of("cuda_graph")]


@pytest.mark.parametrize(("micro_batch", "global_batch"), [(12, 12), (5, 12)])
@pytest.mark.parametrize("make_task", [Net, lambda: Digits(SIZES)], ids=["dense", "experts"])
def test_replayed_steps_compute_what_steps_compute(
    make_task: Any, micro_batch: int, global_batch: int
) -> None:
    plain, plain_feed = make_stepper(make_task(), micro_batch, global_batch, learning_rate=RATE)
    stepper, feed = make_stepper(make_task(), micro_batch, global_batch, learning_rate=RATE)
    recorder = FakeRecorder()
    with_graphs(stepper, recorder)
    expected = run_steps(plain, plain_feed, 20)
    found = run_steps(stepper, feed, 20)
    assert recorder.num_replays >= 20 - BEFORE - 5
    for totals, other in zip(found, expected, strict=True):
        assert float(totals.loss) == float(other.loss)
        assert totals.norm is not None
        assert other.norm is not None
        assert float(totals.norm) == float(other.norm)
        assert (totals.samples, totals.count, totals.nominal_count) == (
            other.samples,
            other.count,
            other.nominal_count,
        )
        assert list(totals.metrics) == list(other.metrics)
        for load, other_load in zip(totals.loads, other.loads, strict=True):
            assert torch.equal(load, other_load)
    expected_weights = weights(plain.strategy.model)
    for name, weight in weights(stepper.strategy.model).items():
        assert torch.equal(weight, expected_weights[name]), name
    assert [group["lr"] for group in stepper.optimizer.inner.param_groups] == [RATE, RATE]


def test_the_totals_of_a_replay_survive_the_next_one() -> None:
    stepper, feed, _ = graphed(Net(), FakeRecorder())
    totals = run_steps(stepper, feed, 12)
    assert len({float(each.loss) for each in totals}) == 12


def test_a_schedule_reaches_the_replayed_steps() -> None:
    runs = []
    for recorder in (None, FakeRecorder()):
        stepper, feed = make_stepper(Net(), 12, 12, learning_rate=RATE)
        stepper.optimizer.factor = lambda step: 2.0**-step
        if recorder is not None:
            with_graphs(stepper, recorder)
        runs.append([float(each.loss) for each in run_steps(stepper, feed, 14)])
        assert stepper.optimizer.inner.param_groups[0]["lr"] == RATE * 2.0**-13
    assert runs[0] == runs[1]


def test_a_layout_is_captured_after_its_warm_up() -> None:
    recorder = FakeRecorder()
    stepper, feed, events = graphed(Net(), recorder)
    run_steps(stepper, feed, 3)  # the fourth step of an epoch is short
    assert (recorder.num_warm_ups, recorder.num_records) == (0, 0)
    run_steps(stepper, feed, 6)
    assert (recorder.num_warm_ups, recorder.num_records, statuses(events)) == (1, 1, ["captured"])


def test_the_number_of_graphs_is_limited() -> None:
    recorder = FakeRecorder()
    stepper, _, _ = graphed(Net(), recorder)
    images, labels = Net().train_data().tensors
    for size in range(2, 3 + MAX_GRAPHS):
        _, feed = make_stepper(_Only(images[:size], labels[:size]), size, size)
        run_steps(stepper, feed, BEFORE + 2)
    assert recorder.num_records == MAX_GRAPHS


class _Only(Net):
    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self._tensors = tensors

    def train_data(self) -> TensorData:
        return TensorData(*self._tensors)


class _Cooling(Net):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.temperature *= 0.9
        return super().loss(model, batch)


class _Counting(Net):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.table["weight"] += 1
        return super().loss(model, batch)


class _Rebinding(Net):
    mean: Any = None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        self.mean = loss.detach()
        return loss


class _Drawing(Net):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + random.random())


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (_Cooling, "task.temperature"),
        (_Counting, "task.table"),
        (_Rebinding, "task.mean"),
        (_Drawing, "random numbers"),
    ],
)
def test_a_loss_with_state_in_python_is_not_captured(task: type[Net], named: str) -> None:
    recorder = FakeRecorder()
    stepper, feed, events = graphed(task(), recorder)
    run_steps(stepper, feed, 12)
    (event,) = events.of("cuda_graph")
    assert (event["status"], recorder.num_records) == ("off", 0)
    assert named in event["detail"]
    stepper, feed, _ = graphed(task(), FakeRecorder(), required=True)
    with pytest.raises(UserError, match=named):
        run_steps(stepper, feed, 12)


def test_a_cache_that_the_first_step_fills_is_no_obstacle() -> None:
    class Caching(Net):
        scale: Any = None

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            self.scale = torch.ones(()) if self.scale is None else self.scale
            return super().loss(model, batch) * self.scale

    stepper, feed, events = graphed(Caching(), FakeRecorder())
    run_steps(stepper, feed, 12)
    assert statuses(events) == ["captured"]


@pytest.mark.parametrize("place", ["task", "module", "group", "weights", "state", "hook", "mode"])
def test_a_change_after_the_capture_ends_the_graph(place: str) -> None:
    task = Net()
    recorder = FakeRecorder()
    stepper, feed, events = graphed(task, recorder)
    run_steps(stepper, feed, 12)
    model: Any = stepper.strategy.model
    inner: Any = stepper.optimizer.inner
    match place:
        case "task":
            task.temperature = 2.0
        case "module":
            model[2].p = 0.1
        case "group":
            inner.param_groups[0]["weight_decay"] = 0.5
        case "weights":
            model[0].weight.data = model[0].weight.data.clone()
        case "state":
            inner.load_state_dict(inner.state_dict())
        case "hook":
            model[0].register_forward_hook(lambda *_: None)
        case "mode":
            model[1].eval()
    before = recorder.num_replays
    run_steps(stepper, feed, 4)
    assert statuses(events) == ["captured", "off"]
    assert (recorder.num_replays, recorder.num_forgotten) == (before, 1)


def test_an_evaluation_between_steps_changes_nothing() -> None:
    stepper, feed, events = graphed(Net(), FakeRecorder())
    for _ in range(3):
        run_steps(stepper, feed, 6)
        stepper.strategy.model.eval()
        stepper.strategy.model.train()
    assert statuses(events) == ["captured"]


def test_a_step_that_cannot_be_captured_runs_without() -> None:
    plain, plain_feed = make_stepper(Net(), 12, 12, learning_rate=RATE)
    stepper, feed, events = graphed(Net(), FakeRecorder("RuntimeError: it waits"))
    expected = [float(each.loss) for each in run_steps(plain, plain_feed, 12)]
    assert [float(each.loss) for each in run_steps(stepper, feed, 12)] == expected
    (event,) = events.of("cuda_graph")
    assert (event["status"], event["detail"]) == ("failed", "RuntimeError: it waits")


def test_out_of_memory_beside_a_graph_drops_it_before_passes_shrink() -> None:
    task = Net()
    recorder = FakeRecorder()
    stepper, feed, events = graphed(task, recorder)
    run_steps(stepper, feed, 11)
    plain, plain_feed = make_stepper(Net(), 12, 12, learning_rate=RATE)
    run_steps(plain, plain_feed, 11)
    loss = task.loss
    failures = iter([True])

    def fail_once(model: nn.Module, batch: Any) -> Tensor:
        result = loss(model, batch)
        if next(failures, False):
            raise torch.OutOfMemoryError("injected")
        return result

    object.__setattr__(stepper.strategy, "task", _Wrapped(task, fail_once))
    batches = list(feed.steps(0))
    totals = stepper.run(batches[3], 11)
    expected = plain.run(list(plain_feed.steps(0))[3], 11)
    assert float(totals.loss) == float(expected.loss)
    assert (statuses(events), events.of("oom")) == (["captured", "off"], [])
    # Running statistics of the failed pass are undone.
    model: Any = stepper.strategy.model
    plain_model: Any = plain.strategy.model
    assert torch.equal(model[1].running_mean, plain_model[1].running_mean)


class _Wrapped:
    """A task with another loss."""

    def __init__(self, task: Any, loss: Any) -> None:
        self._task = task
        self.loss = loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def test_replaced_experts_drop_the_graphs_and_a_new_one_is_captured() -> None:
    recorder = FakeRecorder()
    stepper, feed, events = graphed(Digits(SIZES), recorder)
    run_steps(stepper, feed, BEFORE + 2)
    stepper.experts_changed()
    run_steps(stepper, feed, BEFORE + 2)
    assert (recorder.num_records, recorder.num_forgotten) == (2, 1)
    assert statuses(events) == ["captured", "captured"]


def test_the_clock_counts_a_replay_as_one_phase() -> None:
    stepper, feed, _ = graphed(Net(), FakeRecorder())
    run_steps(stepper, feed, 12)
    stepper.clock.begin()
    stepper.clock.end()
    stepper.clock.take()
    stepper.clock.begin()
    stepper.run(next(iter(feed.steps(0))), 12)
    stepper.clock.end()
    assert stepper.clock.take().keys() == {"steps", "data", "graph", "total"}


def test_batches_that_differ_in_each_step_are_not_remembered_for_ever() -> None:
    stepper, feed, events = graphed(Net(), FakeRecorder())
    assert stepper.graphs is not None
    batch = next(iter(feed.steps(0)))
    for number in range(200):
        if stepper.graphs.is_on:
            data = [(torch.ones(12, 6), f"sample {number}")]
            assert stepper.graphs.run(batch, data, number, 12, _not_called) is None
    assert statuses(events) == ["off"]


def _not_called(_: Any) -> Any:
    raise AssertionError("a step that came once was computed for a graph")


def test_a_batch_may_have_no_tensor() -> None:
    copy_tensors([], [])
