"""The model at the end of a run: the best weights or the last ones, whatever trained them."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

from experts.balance import moe_layers
from experts.model import structure_of
from experts.moe.layer import MoELayer
from experts.types import Routing
from harness.hosts.ranks import run_ranks
from harness.moe.evolving import ListLog
from harness.runs.loop_runs import SMALL, losses_in
from harness.runs.records import decoded, made
from orchestrator.config.settings import Config
from orchestrator.record.events.kinds import Final
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.record.summary.summary import summarise
from orchestrator.result import Result
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.tasks.task import Loss, TensorData
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker.final_model import choose_weights, copy_model, final_model
from orchestrator.train.worker.placed_experts import build_experts
from orchestrator.train.worker.run import Supervision, run_worker
from orchestrator.trainer import Trainer

START: Event = {"event": "start", "best_by": "loss:min", "step": 0}
END: Event = {"event": "end", "status": "completed", "steps": 30}


def evaluated(step: int, best: bool) -> Event:
    return {"event": "evaluate", "step": step, "loss": 1.0, "metrics": {}, "best": best}


@pytest.mark.parametrize(
    ("events", "keep_last", "step", "weights", "reason"),
    [
        (
            [evaluated(10, True), evaluated(20, True), evaluated(30, False)],
            False,
            20,
            "best",
            "validation loss",
        ),
        ([evaluated(10, True), evaluated(30, True)], False, 30, "best", "validation loss"),
        ([evaluated(10, True), evaluated(30, False)], True, 30, "last", "--keep-last"),
        ([evaluated(30, False)], False, 30, "last", "another folder"),
        ([], False, 30, "last", "no validation result"),
    ],
)
def test_the_best_weights_are_chosen_unless_there_are_none(
    events: list[Event], keep_last: bool, step: int, weights: str, reason: str
) -> None:
    chosen = choose_weights(decoded([START, *events, END]), made(END), keep_last)
    assert (chosen.step, chosen.weights) == (step, weights)
    assert reason in chosen.reason


def test_an_interrupted_run_keeps_its_last_weights() -> None:
    events = [START, evaluated(10, True), evaluated(20, False), END | {"status": "stopped"}]
    assert choose_weights(decoded(events), made(events[-1]), False) == Final(
        step=30, weights="last", reason="the run can be continued"
    )


# Runs whose best step is not the last one, and has other experts. The task's learning rate is turned
# around half-way, so that the run becomes worse.

STEPS = 60
EVOLVING: dict[str, Any] = SMALL | {
    "epochs": 40,
    "max_steps": STEPS,
    "batch_size": 16,
    "global_batch_size": 48,
    "experts": 4,
    "expert_hidden_size": (4, 4, 8, 8),
    "evolution": "bold",
    "sleep_every": 9,
    "birth_entropy": 0.1,
    "birth_patience": 1,
    "newborn_warmup": 6,
    "merge_similarity": 0.2,
    "change_tolerance": 1000.0,
    "evaluate_every": 5,
    "checkpoint_every": 5,
    "keep": 1,
}


def prepare(run_dir: Path, **settings: Any) -> PreparedRun:
    config = Config.of(**EVOLVING | settings, run_dir=run_dir)
    prepared = Trainer(config=config, quiet=True).prepare()
    prepared.task.schedule = lambda: _there_and_back
    return prepared


def _there_and_back(step: int) -> float:
    return 1.0 if step < STEPS // 2 else -1.0


def run(run_dir: Path, world: World | None = None, **settings: Any) -> tuple[PreparedRun, nn.Module]:
    """Train in this process, as a worker does."""
    world = world or World.single_process()
    run_dir.mkdir(parents=True, exist_ok=True)
    log: Log = EventLog(run_dir / "events.jsonl") if world.is_main else SilentLog()
    prepared = prepare(run_dir, **settings)
    _, model = run_worker(prepared, world, run_dir, log, Supervision())
    log.close()
    return prepared, model


def run_on_rank(rank: int, size: int, store: str, run_dir: Path, settings: dict[str, Any]) -> None:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        run(run_dir, world, workers=size, **settings)


def validation_loss(prepared: PreparedRun, model: nn.Module) -> float:
    data = prepared.task.validation_data()
    assert isinstance(data, TensorData)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        loss = prepared.task.loss(model, data.tensors)
    model.train(was_training)
    return loss.sum.item() / loss.count


def finish(
    run_dir: Path, prepared: PreparedRun, live_model: nn.Module | None = None
) -> tuple[nn.Module, ListLog, dict[str, Any]]:
    """Return the final model, its events and the summary with them."""
    log = ListLog()
    model = final_model(prepared, run_dir, log, perf_counter(), live_model)
    return model, log, summarise(decoded([*read_events(run_dir / "events.jsonl"), *log.events]))


def assert_is_final(model: nn.Module, prepared: PreparedRun, summary: dict[str, Any], rel: float) -> None:
    """The model computes the validation loss of the summary, and has the experts that it names."""
    assert validation_loss(prepared, model) == pytest.approx(summary["validation"]["loss"], rel=rel)
    assert [len(layer.experts) for layer in structure_of(model)] == summary["experts"]


@pytest.fixture(scope="module")
def evolved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("evolved") / "run"
    run(run_dir)
    return run_dir


def copied(evolved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(evolved, tmp_path / "run"))


def test_one_process_ends_with_the_experts_and_weights_of_the_best_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prepared, live_model = run(run_dir)
    last_loss = validation_loss(prepared, live_model)
    experts_at_end = [layer.ids for layer in structure_of(live_model)]
    for _, layer in moe_layers(live_model):
        layer.bank.fp8 = True  # as a run with --precision fp8 leaves it
    model, log, summary = finish(run_dir, prepared, live_model)
    assert model is live_model
    assert not any(layer.bank.fp8 for _, layer in moe_layers(model)), "it computes on any device"
    assert_is_final(model, prepared, summary, 1e-6)
    assert summary["validation"]["loss"] == summary["best"]["loss"] < 0.9 * last_loss
    assert summary["final"] == {
        "step": summary["best"]["step"],
        "weights": "best",
        "reason": "the best validation loss",
    }
    assert summary["last"]["step"] == STEPS > summary["final"]["step"]
    assert [layer.ids for layer in structure_of(model)] != experts_at_end
    assert [event["event"] for event in log.events] == ["final"]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (3, {"parallel_strategy": "expert_parallel"}),
        (2, {"parallel_strategy": "data_parallel"}),
        (2, {"parallel_strategy": "data_parallel", "sharding": "zero3", "evolution": "off"}),
    ],
    ids=["three expert hosts", "two DDP workers", "two FSDP workers"],
)
def test_several_workers_end_with_the_best_weights(
    tmp_path: Path, workers: int, settings: dict[str, Any]
) -> None:
    run_dir = tmp_path / "run"
    run_ranks(run_on_rank, workers, run_dir, settings)
    prepared = prepare(run_dir, workers=workers, **settings)
    model, _, summary = finish(run_dir, prepared)
    assert summary["final"]["weights"] == "best"
    assert 0 < summary["final"]["step"] < STEPS
    assert_is_final(model, prepared, summary, 1e-5)


@pytest.mark.extended
def test_the_last_weights_are_kept_on_request(evolved: Path) -> None:
    prepared = prepare(evolved, keep_last=True)
    model, _, summary = finish(evolved, prepared)
    assert summary["final"] == {"step": STEPS, "weights": "last", "reason": "set by --keep-last"}
    assert_is_final(model, prepared, summary, 1e-6)
    assert summary["validation"]["loss"] == summary["last"]["loss"] > summary["best"]["loss"]


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_without_a_good_checkpoint_of_the_best_step_the_last_weights_stay(
    evolved: Path, tmp_path: Path, damage: str
) -> None:
    run_dir = copied(evolved, tmp_path)
    best = summarise(decoded(read_events(run_dir / "events.jsonl")))["best"]["step"]
    checkpoint = run_dir / "checkpoints" / f"step_{best:08d}"
    if damage == "missing":
        shutil.rmtree(checkpoint)
    else:
        (checkpoint / "manifest.json").write_text("{}")
    prepared = prepare(run_dir)
    model, log, summary = finish(run_dir, prepared)
    assert (summary["final"]["step"], summary["final"]["weights"]) == (STEPS, "last")
    assert f"of step {best}, cannot be restored" in summary["final"]["reason"]
    assert "cannot be restored" in of_kind(log.events, "warning")[0]["message"]
    assert_is_final(model, prepared, summary, 1e-6)


def test_a_completed_run_is_resumed_from_its_last_step(evolved: Path, tmp_path: Path) -> None:
    run_dir = copied(evolved, tmp_path)
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"event": "final", "step": 5, "weights": "best", "reason": "the best validation loss"}\n')
    num_losses = len(losses_in(run_dir))
    run(run_dir, resume="auto", max_steps=STEPS + 2)
    events = read_events(run_dir / "events.jsonl")
    assert of_kind(events, "resume")[-1]["step"] == STEPS
    assert len(losses_in(run_dir)) == num_losses + 2
    assert summarise(decoded(events))["final"] == {}, "the earlier end says nothing about a run that went on"


class Mixture(nn.Module):
    """A user's own model with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(4, (8, 8, 8, 8), 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        y, routing = self.moe(x)
        return self.head(y), routing


def test_a_users_own_model_gets_the_best_weights_and_their_experts(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (96,), generator=generator)
    x = torch.randn(96, 4, generator=generator) + nn.functional.one_hot(labels, 4)

    def loss(model: nn.Module, batch: Any) -> Loss:
        logits, routing = model(batch[0])
        total = nn.functional.cross_entropy(logits, batch[1], reduction="sum")
        return Loss(total, len(batch[1]), loads=(routing.counts_E,))

    torch.manual_seed(0)
    model = Mixture()
    changes = {"birth_entropy": 0.1, "birth_patience": 1, "newborn_warmup": 4, "change_tolerance": 1000.0}
    config = Config.of(
        run_dir=tmp_path / "run",
        epochs=STEPS // 3,
        batch_size=32,
        evolution="bold",
        sleep_every=3,
        trackers=(),
        **changes,
    )
    result: Result = Trainer(
        model, data=(x, labels), validation=(x, labels), loss=loss, schedule=_there_and_back, config=config,
        quiet=True,
    ).fit()  # fmt: skip
    assert result.step == result.summary["best"]["step"] < result.summary["steps"]
    assert len(next(iter(moe_layers(model)))[1].structure.experts) == result.summary["experts"][0]
    for trained in (model, result.model):
        trained.eval()
        with torch.no_grad():
            value = loss(trained, (x, labels)).sum.item() / len(x)
        assert value == pytest.approx(result.summary["validation"]["loss"], rel=1e-5)


def test_a_resumed_run_knows_the_result_of_a_step_that_was_saved_before_its_evaluation(
    tmp_path: Path,
) -> None:
    """The last step is saved at its interval, then evaluated because the run ends."""
    settings = SMALL | {"run_dir": tmp_path / "run", "checkpoint_every": 5, "epochs": 9, "evolution": "off"}
    first = Trainer(config=Config.of(**settings, max_steps=10)).fit()
    assert first.step == 10
    worse = {"max_steps": 15, "learning_rate": 100.0, "resume": "auto"}
    second = Trainer(config=Config.of(**settings | worse)).fit()
    evaluations = of_kind(read_events(tmp_path / "run" / "events.jsonl"), "evaluate")
    assert [(event["step"], event["best"]) for event in evaluations] == [(10, True), (15, False)]
    assert second.step == 10


AVERAGED: dict[str, Any] = {"ema_decay": 0.9, "evaluate_ema": True}


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("keep_last", [False, True])
def test_the_average_that_was_evaluated_is_the_model_at_the_end(tmp_path: Path, keep_last: bool) -> None:
    """In the memory of the process that trained, and from a checkpoint; the experts change meanwhile."""
    run_dir = tmp_path / "run"
    prepared, live_model = run(run_dir, keep_last=keep_last, **AVERAGED)
    model, _, summary = finish(run_dir, prepared)
    assert summary["final"]["weights"] == ("last" if keep_last else "best")
    assert_is_final(model, prepared, summary, 1e-6)
    model, _, summary = finish(run_dir, prepared, live_model)
    assert_is_final(model, prepared, summary, 1e-6)


@pytest.mark.extended
def test_a_model_without_a_checkpoint_has_the_average_that_was_evaluated(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prepared, live_model = run(run_dir, keep_last=True, **AVERAGED)
    shutil.rmtree(run_dir / "checkpoints")
    model, _, summary = finish(run_dir, prepared, live_model)
    assert_is_final(model, prepared, summary, 1e-6)


def test_an_expert_in_its_warm_up_keeps_its_prior_in_a_copied_model() -> None:
    source, target = (nn.Sequential(MoELayer(4, (3, 5), 1)) for _ in range(2))
    (structure,) = structure_of(source)
    ramping = replace(structure.experts[1], parents=(0,), born_step=2, ramp_step=2, warm_step=10)
    build_experts(source, [replace(structure, experts=(structure.experts[0], ramping))])
    copy_model(source, target, 6)
    (layer,) = [module for module in target if isinstance(module, MoELayer)]
    gate = layer.gate
    assert gate.has_prior
    torch.testing.assert_close(gate.prior_E, torch.tensor([0.0, math.log(0.5)]))
