"""Runs with other optimizers and an average of the weights: on hosts, in parts, and while experts change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.runs.loop_runs import run_loop
from harness.runs.records import by_step
from orchestrator.checkpoint.files import load
from orchestrator.record.files.reading import of_kind, read_events
from tests.train.evolution import test_resume as evolving
from tests.train.worker.test_run import losses, train

MODEL: dict[str, Any] = {"experts": 5, "expert_hidden_size": (4, 8, 4, 12, 8), "schedule": "constant"}
AVERAGED: dict[str, Any] = {"ema_decay": 0.9, "evaluate_ema": True, "learning_rate": 1e-3}


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (3, {"optimizer": "muon", "parallel_strategy": "expert_parallel"}),
        (2, {"optimizer": "sgd", "batch_size": 7}),
    ],
)
def test_a_run_on_several_workers_in_two_parts_equals_one_process(
    tmp_path: Path, workers: int, settings: dict[str, Any]
) -> None:
    settings = MODEL | AVERAGED | settings
    in_one: dict[str, Any] = settings | {"parallel_strategy": "auto"}
    expected = train(tmp_path / "one", 1, max_steps=16, **in_one)
    train(tmp_path / "parts", workers, max_steps=8, **settings)
    events = train(tmp_path / "parts", 1, max_steps=16, resume="auto", **in_one)
    assert losses(events) == pytest.approx(losses(expected), rel=1e-5)
    actual_loss, expected_loss = (of_kind(found, "evaluate")[-1]["loss"] for found in (events, expected))
    assert actual_loss == pytest.approx(expected_loss, rel=1e-4), "the average is evaluated"
    saved = load(tmp_path / "parts" / "checkpoints" / "step_00000016")
    assert any(key.startswith("ema/") for key in saved.tensors["optimizer"])


BYTES: dict[str, Any] = MODEL | {"optimizer": "adamw8bit", "learning_rate": 1e-3}


@pytest.mark.extended
def test_adamw_in_8_bit_learns_as_adamw_does(tmp_path: Path) -> None:
    """And a run in two parts is the same run, to the last bit: the codes are in the checkpoint."""
    in_full: dict[str, Any] = BYTES | {"optimizer": "adamw"}
    _, expected = run_loop(tmp_path / "adamw", max_steps=60, **in_full)
    _, whole = run_loop(tmp_path / "whole", max_steps=60, **BYTES)
    assert whole != expected
    assert whole == pytest.approx(expected, rel=0.05)
    run_loop(tmp_path / "parts", max_steps=23, **BYTES)
    _, parts = run_loop(tmp_path / "parts", max_steps=60, resume="auto", **BYTES)
    assert parts == whole
    saved = load(tmp_path / "parts" / "checkpoints" / "step_00000060").tensors["optimizer"]
    kinds = {str(tensor.dtype) for key, tensor in saved.items() if key.startswith("exp_avg/")}
    assert kinds == {"torch.uint8", "torch.float32"}


@pytest.mark.extended
def test_adamw_in_8_bit_goes_on_with_other_hosts(tmp_path: Path) -> None:
    """Where rounding differs, a code may be the next one: losses agree less closely than those of adamw."""
    on_hosts: dict[str, Any] = BYTES | {"parallel_strategy": "expert_parallel"}
    expected = train(tmp_path / "one", 1, max_steps=16, **BYTES)
    train(tmp_path / "parts", 3, max_steps=6, **on_hosts)
    train(tmp_path / "parts", 2, max_steps=12, resume="auto", **on_hosts)
    events = train(tmp_path / "parts", 1, max_steps=16, resume="auto", **BYTES)
    assert losses(events) == pytest.approx(losses(expected), rel=1e-3)


def test_the_average_is_evaluated_if_asked(tmp_path: Path) -> None:
    """At a decay of 0.9 the average is some steps behind the weights."""
    average, _ = run_loop(tmp_path / "average", max_steps=16, **AVERAGED)
    without: dict[str, Any] = AVERAGED | {"evaluate_ema": False}
    weights, _ = run_loop(tmp_path / "weights", max_steps=16, **without)
    assert average.progress.epoch_loss == weights.progress.epoch_loss
    assert average.progress.validation["loss"] > weights.progress.validation["loss"] + 1e-3


@pytest.mark.extended
def test_a_run_whose_experts_change_resumes_with_muon_and_its_average(tmp_path: Path) -> None:
    settings: dict[str, Any] = AVERAGED | {"optimizer": "muon", "max_steps": 170}
    first: dict[str, Any] = settings | {"max_steps": 100}
    second: dict[str, Any] = settings | {"resume": "auto"}
    evolving.run(tmp_path / "whole", **settings)
    kinds = {event["change"] for event in evolving.changes_in(tmp_path / "whole")}
    assert kinds >= {"born", "merged"}
    evolving.run(tmp_path / "parts", **first)
    evolving.run(tmp_path / "parts", **second)
    whole, parts = (by_step(read_events(tmp_path / name / "events.jsonl")) for name in ("whole", "parts"))
    assert [event["loss"] for event in parts] == [event["loss"] for event in whole]


@pytest.mark.extended
def test_sgd_without_momentum_resumes_with_its_average(tmp_path: Path) -> None:
    """The average is then the only state of a parameter."""
    settings: dict[str, Any] = AVERAGED | {"optimizer": "sgd", "momentum": 0.0}
    _, whole = run_loop(tmp_path / "whole", max_steps=4, **settings)
    run_loop(tmp_path / "parts", max_steps=2, **settings)
    _, parts = run_loop(tmp_path / "parts", max_steps=4, resume="auto", **settings)
    assert parts == whole
    first, second = (load(tmp_path / name / "checkpoints" / "step_00000004") for name in ("whole", "parts"))
    for key, tensor in first.tensors["optimizer"].items():
        assert torch.equal(second.tensors["optimizer"][key], tensor), key
