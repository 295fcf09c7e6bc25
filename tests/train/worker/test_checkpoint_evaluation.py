"""Evaluation of checkpoints, compared with the evaluation inside the training of the same weights."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.hosts.ranks import run_ranks
from harness.runs.loop_runs import SMALL
from orchestrator.checkpoint.files import step_name
from orchestrator.config.settings import Config
from orchestrator.errors import CheckpointDamaged, UserError
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.tasks.generation import GenerationOptions
from orchestrator.tasks.split import with_split
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker.checkpoint_evaluation import evaluate_checkpoint
from orchestrator.trainer import Trainer
from tests.train.worker.test_final_model import STEPS
from tests.train.worker.test_final_model import run as run_evolving

# 359 samples: with three workers the last batch has two, and one worker has none.
TRAINED: dict[str, Any] = SMALL | {
    "experts": 7,
    "expert_hidden_size": (4, 8, 4, 4, 8, 4, 4),
    "top_k": 1,
    "max_steps": 6,
    "evaluate_every": 3,
    "checkpoint_every": 3,
    "eval_batch_size": 17,
    "ema_decay": 0.5,
    "learning_rate": 0.01,
    "trackers": (),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    Trainer(config=Config.of(**TRAINED, run_dir=run_dir), quiet=True).fit()
    return run_dir


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, whose evaluations are of the average."""
    run_dir = tmp_path_factory.mktemp("averaged") / "run"
    Trainer(config=Config.of(**TRAINED, run_dir=run_dir, evaluate_ema=True), quiet=True).fit()
    return run_dir


@pytest.fixture(scope="module")
def evolved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("evolved") / "run"
    run_evolving(run_dir, keep=100)
    return run_dir


def evaluations(run_dir: Path) -> dict[int, Event]:
    return {event["step"]: event for event in of_kind(read_events(run_dir / "events.jsonl"), "evaluate")}


def evaluate(
    checkpoint: Path, world: World | None = None, split: str = "validation", **settings: Any
) -> dict[str, Any]:
    """Evaluate as one worker of the world."""
    world = world or World.single_process()
    if world.size > 1:
        settings["workers"] = world.size
    config = Config.of(**settings, resume=str(checkpoint))
    prepared = Trainer(config=config, quiet=True).prepare()
    prepared = replace(prepared, task=with_split(prepared.task, split))
    batches: list[tuple[int, int | None]] = []
    result = evaluate_checkpoint(
        prepared, world, lambda done, total: batches.append((done, total)), GenerationOptions()
    )
    assert batches == [(number + 1, len(batches)) for number in range(len(batches))]
    return result


def on_rank(
    rank: int, size: int, store: str, checkpoint: Path, settings: dict[str, Any]
) -> tuple[float, dict[str, float], int]:
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        result = evaluate(checkpoint, world, **settings)
        return result["loss"], result["metrics"], result["samples"]


def checkpoint_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / step_name(step)


@pytest.mark.parametrize("step", [3, 6])
def test_one_process_repeats_the_evaluation_of_the_training_to_the_bit(trained: Path, step: int) -> None:
    result = evaluate(checkpoint_of(trained, step))
    expected = evaluations(trained)[step]
    for name in ("step", "loss", "metrics", "samples"):
        assert result[name] == expected[name]


@pytest.mark.extended
def test_every_step_of_changing_experts_is_repeated_to_the_bit(evolved: Path) -> None:
    """Born experts are in their warm-up at some of the steps."""
    expected = evaluations(evolved)
    assert len(expected) == STEPS // 5
    for step, event in expected.items():
        result = evaluate(checkpoint_of(evolved, step))
        assert (step, result["loss"]) == (step, event["loss"])


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (3, {"parallel_strategy": "expert_parallel"}),
        (3, {"parallel_strategy": "expert_parallel", "gate": "primary"}),
        (3, {"parallel_strategy": "data_parallel"}),
        (2, {"parallel_strategy": "data_parallel", "sharding": "zero3"}),
    ],
    ids=["three expert hosts", "a primary gate", "three DDP workers", "two FSDP workers"],
)
def test_several_workers_agree_with_the_training_in_one_process(
    trained: Path, workers: int, settings: dict[str, Any]
) -> None:
    expected = evaluations(trained)[6]
    for loss, metrics, samples in run_ranks(on_rank, workers, checkpoint_of(trained, 6), settings):
        assert samples == expected["samples"] == 359
        assert loss == pytest.approx(expected["loss"], rel=1e-6)
        assert metrics == pytest.approx(expected["metrics"], rel=1e-6)


@pytest.mark.extended
def test_three_hosts_evaluate_experts_that_have_changed(evolved: Path) -> None:
    step, event = list(evaluations(evolved).items())[5]
    settings = {"parallel_strategy": "expert_parallel"}
    for loss, _, _ in run_ranks(on_rank, 3, checkpoint_of(evolved, step), settings):
        assert loss == pytest.approx(event["loss"], rel=1e-6)


@pytest.mark.extended
def test_the_average_is_evaluated_on_request(trained: Path, averaged: Path) -> None:
    """Both runs have the same weights; the second one has evaluated their average."""
    expected = evaluations(averaged)[6]
    assert expected["loss"] != evaluations(trained)[6]["loss"]
    result = evaluate(checkpoint_of(trained, 6), evaluate_ema=True)
    assert (result["loss"], result["metrics"]) == (expected["loss"], expected["metrics"])
    settings = {"parallel_strategy": "expert_parallel", "evaluate_ema": True}
    for loss, _, _ in run_ranks(on_rank, 3, checkpoint_of(trained, 6), settings):
        assert loss == pytest.approx(expected["loss"], rel=1e-6)


def test_a_run_that_evaluated_the_average_is_evaluated_with_it(trained: Path, averaged: Path) -> None:
    assert evaluate(checkpoint_of(averaged, 6))["loss"] == evaluations(averaged)[6]["loss"]
    weights = evaluate(checkpoint_of(averaged, 6), evaluate_ema=False)
    assert weights["loss"] == evaluations(trained)[6]["loss"]


@pytest.mark.extended
def test_a_checkpoint_without_an_average_is_refused(evolved: Path) -> None:
    with pytest.raises(UserError, match="the run keeps none"):
        evaluate(checkpoint_of(evolved, 5), evaluate_ema=True)
    with pytest.raises(UserError, match="no average of the weights"):
        evaluate(checkpoint_of(evolved, 5), evaluate_ema=True, ema_decay=0.9)


@pytest.mark.extended
def test_a_split_is_evaluated_in_place_of_the_validation_data(trained: Path) -> None:
    result = evaluate(checkpoint_of(trained, 6), split="train")
    prepared = Trainer(config=Config.of(**TRAINED), quiet=True).prepare()
    assert result["samples"] == len(prepared.task.train_data())
    assert result["loss"] != evaluations(trained)[6]["loss"]


def test_damage_is_found_on_all_workers(trained: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "run" / "checkpoints" / step_name(6)
    damaged.parent.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    damaged.mkdir()
    for file in checkpoint_of(trained, 6).iterdir():
        data = bytearray(file.read_bytes())
        if file.name.startswith("model"):
            data[-3] ^= 1
        (damaged / file.name).write_bytes(data)
    with pytest.raises(CheckpointDamaged):
        evaluate(damaged)


@pytest.mark.extended
def test_a_compiled_model_leaves_the_settings_of_torch_as_they_were(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = importlib.import_module("torch._functorch.config")
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: real(call, backend="eager"))
    evaluate(checkpoint_of(trained, 6), compile="on")
    assert settings.ban_recompute_used_far_apart is True
