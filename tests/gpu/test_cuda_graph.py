"""Steps in CUDA graphs: equal to ordinary ones, without a wait of the host, and safe beside everything else.

Run with ``make gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.runs.records import by_step
from harness.runs.steppers import Events, run_steps, weights
from orchestrator.config.settings import Config
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.tasks.task import Task, TensorData
from orchestrator.train.data.steps import Feed
from orchestrator.train.group.world import World
from orchestrator.train.stepper import Stepper
from orchestrator.train.worker.build import build_feed
from orchestrator.train.worker.build_model import build_graphs, build_parts, build_stepper
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.trainer import Trainer

pytestmark = pytest.mark.gpu

STEPS = 30
DENSE: dict[str, Any] = {
    "task": "synthetic",
    "experts": 0,
    "width": 128,
    "layers": 2,
    "sequence_length": 128,
    "samples": 512,
    "batch_size": 16,
}
TEXT: dict[str, Any] = {"task": "text", "batch_size": 32}
MODELS = {"dense": DENSE, "text": TEXT}


class Images(Task):
    """A small network with dropout and batch norm over random images."""

    fail: str | None = None
    decays = False

    def __init__(self) -> None:
        self.temperature = 1.0

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10)
        )

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        # The last batch of an epoch is short: 200 = 6 × 32 + 8.
        images = torch.randn(200, 64, generator=generator)
        return TensorData(images, torch.randint(10, (200,), generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]) / self.temperature, batch[1])
        if self.decays:
            self.temperature *= 0.99
        if self.fail == "item" and loss.item() < 0:
            raise AssertionError
        return loss


def build(own: Task | None = None, **settings: Any) -> tuple[Stepper, Feed, Events]:
    """Build a stepper with graphs, unless the settings turn them off. ``own`` is a task of these tests."""
    config = Config.of(**{"learning_rate": 1e-3} | settings)
    prepared = Trainer(task=own, config=config, quiet=True).prepare()
    world = World.single_process(prepared.plan.device.value)
    parts = build_parts(config, prepared.plan, prepared.task, world)
    events = Events()
    stepper = build_stepper(config, world, parts, prepared.plan.batch_size.value, events)
    stepper.graphs = build_graphs(config, prepared.plan, world, parts, events)
    return stepper, build_feed(prepared.resolved.config, prepared.plan, prepared.task, world), events


def figures_of(stepper: Stepper, feed: Feed, steps: int = STEPS) -> list[tuple[float, float, int]]:
    totals = run_steps(stepper, feed, steps)
    return [(float(t.loss), float(t.norm if t.norm is not None else 0), t.samples) for t in totals]


def statuses(events: Events) -> list[str]:
    return [fields["status"] for fields in events.of("cuda_graph")]


def assert_same_run(own: Task | None, settings: dict[str, Any], steps: int = STEPS) -> None:
    """A run with graphs has the losses, norms and weights of one without, to the bit."""
    plain, plain_feed, plain_events = build(own, **settings, cuda_graph="off")
    graphed, feed, events = build(own, **settings, cuda_graph="on")
    expected = figures_of(plain, plain_feed, steps)
    assert figures_of(graphed, feed, steps) == expected
    assert set(statuses(events)) == {"captured"}
    assert not statuses(plain_events)
    expected_weights = weights(plain.strategy.model)
    for name, weight in weights(graphed.strategy.model).items():
        assert torch.equal(weight, expected_weights[name]), name
    for buffer, other in zip(graphed.strategy.model.buffers(), plain.strategy.model.buffers(), strict=True):
        assert torch.equal(buffer, other)


@pytest.mark.parametrize("model", ["dense", "text"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_graph_computes_what_steps_compute(model: str, precision: str) -> None:
    if (model, precision) == ("text", "fp32"):
        pytest.skip("in fp32 a loop computes the experts")
    settings = {**MODELS[model], "precision": precision, "deterministic": True}
    prepared = Trainer(config=Config.of(**settings), quiet=True).prepare()
    device = torch.device(prepared.plan.device.value)
    with torch_settings(prepared.resolved.config, prepared.plan, device):
        assert_same_run(None, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "bf16", "optimizer": "sgd"},
        {"precision": "bf16", "ema_decay": 0.9},
        {"precision": "bf16", "accumulation_steps": 4, "batch_size": 8},
        {"precision": "bf16", "clip_norm": 0.0},
        {"precision": "fp32", "deterministic": True},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_dropout_batch_norm_and_short_batches_are_the_same(settings: dict[str, Any]) -> None:
    assert_same_run(Images(), {"batch_size": 32, "warmup_steps": 10, "epochs": 20, **settings}, steps=40)


@pytest.mark.parametrize("model", ["dense", "text"])
def test_each_replay_is_as_near_to_a_step_as_another_step(model: str) -> None:
    """Without deterministic kernels two steps differ by rounding; free-running, that grows.

    So all begin each step with the same weights and moments."""
    settings: dict[str, Any] = {**MODELS[model], "precision": "bf16"}
    plain, feed, _ = build(**settings, cuda_graph="off")
    again, _, _ = build(**settings, cuda_graph="off")
    graphed, _, events = build(**settings, cuda_graph="on")
    batches = [batch for epoch in range(3) for batch in feed.steps(epoch)][:60]
    off: dict[str, list[float]] = {"again": [], "graphed": []}
    for step, batch in enumerate(batches):
        for other in (again, graphed):
            copy_state(plain, other)
        expected = plain.run(batch, step)
        for name, other in (("again", again), ("graphed", graphed)):
            totals = other.run(batch, step)
            assert float(totals.loss) == pytest.approx(float(expected.loss), rel=1e-5)
            assert totals.norm is not None
            assert expected.norm is not None
            assert float(totals.norm) == pytest.approx(float(expected.norm), rel=1e-3)
            off[name].append(distance(plain, other))
    assert statuses(events) == ["captured"]
    assert sum(off["graphed"]) <= 2 * sum(off["again"]) + 1e-6, off


def copy_state(source: Stepper, target: Stepper) -> None:
    """Copy weights, buffers and moments in place."""
    target.strategy.model.load_state_dict(source.strategy.model.state_dict())
    pairs = zip(source.optimizer.parameters, target.optimizer.parameters, strict=True)
    for parameter, other in pairs:
        for name, value in source.optimizer.inner.state[parameter].items():
            target.optimizer.inner.state[other][name].copy_(value)


def distance(one: Stepper, other: Stepper) -> float:
    """Return the mean difference of the weights."""
    pairs = zip(one.optimizer.parameters, other.optimizer.parameters, strict=True)
    return float(torch.stack([(a.detach() - b.detach()).abs().mean() for a, b in pairs]).mean())


@pytest.mark.parametrize("cuda_graph", ["on", "off"])
@pytest.mark.parametrize("model", list(MODELS))
def test_100_steps_do_not_synchronise(model: str, cuda_graph: str) -> None:
    stepper, feed, events = build(**MODELS[model], precision="bf16", cuda_graph=cuda_graph)
    run_steps(stepper, feed, 8)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_steps(stepper, feed, 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert set(statuses(events)) == ({"captured"} if cuda_graph == "on" else set())


def test_a_loss_that_waits_is_trained_without_a_graph() -> None:
    """Nothing of the failed capture stays: dropout draws as before, and the losses are the same."""
    task = Images()
    task.fail = "item"
    settings: dict[str, Any] = {"batch_size": 32, "precision": "bf16", "epochs": 20}
    plain, plain_feed, _ = build(task, **settings, cuda_graph="off")
    graphed, feed, events = build(task, **settings, cuda_graph="on")
    assert figures_of(graphed, feed) == figures_of(plain, plain_feed)
    assert statuses(events) == ["failed"]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_graph_can_be_captured_after_a_failed_one() -> None:
    task = Images()
    task.fail = "item"
    stepper, feed, events = build(task, batch_size=32, precision="bf16", cuda_graph="on")
    figures_of(stepper, feed)
    assert statuses(events) == ["failed"]
    assert_same_run(Images(), {"batch_size": 32, "precision": "bf16"})


def test_a_value_that_changes_in_python_keeps_the_graph_away() -> None:
    task = Images()
    task.decays = True
    stepper, feed, events = build(task, batch_size=32, precision="bf16", epochs=20)
    figures_of(stepper, feed)
    (event,) = events.of("cuda_graph")
    assert (event["status"], "task.temperature" in event["detail"]) == ("off", True)


def test_a_value_that_changes_later_ends_the_graph() -> None:
    task = Images()
    stepper, feed, events = build(task, batch_size=32, precision="bf16", epochs=20)
    figures_of(stepper, feed, 12)
    task.temperature = 2.0
    figures_of(stepper, feed, 12)
    assert statuses(events) == ["captured", "off"]


def test_an_ordinary_step_out_of_memory_drops_the_graphs_and_is_repeated() -> None:
    task = Images()
    stepper, feed, events = build(task, batch_size=32, precision="bf16", epochs=20)
    batches = [batch for epoch in range(3) for batch in feed.steps(epoch)]
    original = task.loss
    num_failures = 1

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal num_failures
        if len(batch[0]) == 8 and statuses(events) == ["captured"] and num_failures:
            num_failures -= 1
            raise torch.OutOfMemoryError("injected")
        return original(model, batch)

    handle: Any = stepper.strategy.task
    handle.loss = loss
    for step, batch in enumerate(batches):
        stepper.run(batch, step)
    assert statuses(events) == ["captured", "off"]
    assert not events.of("oom")


def test_a_whole_run_with_evaluation_and_checkpoints_is_the_same(tmp_path: Path) -> None:
    """Also a resumed one."""
    losses: dict[str, list[float]] = {}
    evaluations: dict[str, list[float]] = {}
    for switch in ("off", "on"):
        run_dir = tmp_path / switch
        config = Config.of(
            **TEXT,
            run_dir=run_dir,
            max_steps=40,
            evaluate_every=20,
            checkpoint_every=15,
            cuda_graph=switch,
            ema_decay=0.9,
            evaluate_ema=True,
            log_every=10,
            deterministic=True,
        )
        assert Trainer(config=config, quiet=True).fit().status == "completed"
        resumed = config.but(max_steps=60, resume="auto")
        assert Trainer(config=resumed, quiet=True).fit().status == "completed"
        events = read_events(run_dir / "events.jsonl")
        losses[switch] = [event["loss"] for event in by_step(events)]
        evaluations[switch] = [event["loss"] for event in of_kind(events, "evaluate")]
        expected = ["captured", "captured"] if switch == "on" else []
        assert [event["status"] for event in of_kind(events, "cuda_graph")] == expected
    assert losses["on"] == losses["off"]
    assert evaluations["on"] == evaluations["off"]


def test_phases_of_replayed_steps_add_up(tmp_path: Path) -> None:
    config = Config.of(**TEXT, run_dir=tmp_path / "run", max_steps=200, cuda_graph="on", log_every=50)
    Trainer(config=config, quiet=True).fit()
    phases = of_kind(read_events(tmp_path / "run" / "events.jsonl"), "phases")[-1]
    assert phases["graph"] > 0
    assert "forward" not in phases
    assert phases["graph"] + phases["data"] <= 1.2 * phases["total"]


def test_a_compiled_model_is_captured_too() -> None:
    stepper, feed, events = build(**DENSE, precision="bf16", compile="on", cuda_graph="on")
    figures = figures_of(stepper, feed)
    assert statuses(events) == ["captured"]
    plain, plain_feed, _ = build(**DENSE, precision="bf16", compile="on", cuda_graph="off")
    expected = figures_of(plain, plain_feed)
    assert [loss for loss, *_ in figures] == pytest.approx([loss for loss, *_ in expected], rel=1e-3)


class Samples(Images):
    """The same images by the sample: a loader brings them to the device, the next ones during a step."""

    def train_data(self) -> Any:
        images, labels = super().train_data().tensors
        return [(images[index], labels[index]) for index in range(len(images))]


@pytest.mark.parametrize("cuda_graph", ["on", "off"])
def test_loaded_batches_are_copied_beside_the_computation(cuda_graph: str) -> None:
    settings: dict[str, Any] = {"batch_size": 32, "precision": "fp32", "epochs": 20, "loader_workers": 0}
    gathered, gathered_feed, _ = build(Images(), **settings, cuda_graph="off")
    loaded, feed, _ = build(Samples(), **settings, cuda_graph=cuda_graph)
    assert figures_of(loaded, feed) == figures_of(gathered, gathered_feed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_steps(loaded, feed, 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
