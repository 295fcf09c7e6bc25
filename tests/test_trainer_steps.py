"""Tests of the steps of a run: batches that fit in memory, recomputation, compilation, a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.runs.blob_trainers import blobs, cross_entropy, events_of, settings, trainer
from harness.runs.records import by_step
from orchestrator import Trainer
from orchestrator.record.files.reading import of_kind


def test_a_step_repeated_after_out_of_memory_updates_batch_norm_once(tmp_path: Path) -> None:
    def num_batches_tracked(with_failure: bool) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        is_training = False
        num_failures = 0

        def failing_loss(model: nn.Module, batch: Any) -> torch.Tensor:
            nonlocal num_failures
            loss = cross_entropy(model, batch)
            is_real_step = is_training and model.training and batch[0].device.type == "cpu"
            if with_failure and is_real_step and len(batch[0]) == 16 and not num_failures:
                num_failures += 1
                raise torch.OutOfMemoryError("injected")
            return loss

        config = settings(tmp_path / str(with_failure), epochs=1)
        own = trainer(config, blobs(64), failing_loss, model)
        prepared = own.prepare()
        is_training = True
        own._run_in_process(prepared)
        assert num_failures == with_failure
        return int(model[1].get_buffer("num_batches_tracked"))

    assert num_batches_tracked(False) == 4
    assert num_batches_tracked(True) == 8, "four steps in two halves each, without the failed attempt"


@pytest.mark.extended
def test_an_evaluation_that_does_not_fit_is_done_in_halves(tmp_path: Path) -> None:
    def tight_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if not model.training and len(batch[0]) > 5:
            raise torch.OutOfMemoryError("injected")
        return cross_entropy(model, batch)

    means = []
    for name, loss in (("plain", cross_entropy), ("tight", tight_loss)):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        config = settings(tmp_path / name, epochs=1)
        result = trainer(config, loss=loss, model=model, validation=blobs(23, 1)).fit()
        means.append(result.summary["validation"]["loss"])
    assert means[0] == pytest.approx(means[1], rel=1e-6)


@pytest.mark.extended
def test_batch_size_auto_on_a_cpu_is_measured_once(tmp_path: Path) -> None:
    def batch_choice() -> dict[str, Any]:
        return json.loads((tmp_path / "run" / "plan.json").read_text())["choices"]["batch_size"]

    config = settings(tmp_path, batch_size="auto", max_steps=2)
    trainer(config, blobs(512)).fit()
    first = batch_choice()
    assert "measured throughput" in first["reason"]
    assert 1 <= first["value"] <= 64, "at most an eighth of the data"
    trainer(config.but(resume="auto", max_steps=4), blobs(512)).fit()
    resumed = batch_choice()
    assert resumed["value"] == first["value"]
    assert resumed["reason"] == "measured when the run was first started"
    assert resumed["rejected"] == []


@pytest.mark.extended
def test_activation_checkpointing_keeps_the_losses(tmp_path: Path) -> None:
    losses = []
    for switch in ("off", "on"):
        config = settings(
            tmp_path / switch,
            epochs=2,
            batch_size=None,
            activation_checkpointing=switch,
            width=16,
            expert_hidden_size=(8,),
        )
        Trainer(config=config, quiet=True).fit()
        losses.append([step["loss"] for step in by_step(events_of(tmp_path / switch))])
    assert losses[0] == losses[1]


@pytest.mark.extended
def test_a_compiler_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is repeated without the compiler, and the run says so."""

    def failing_backend(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: compile_function(call, backend=failing_backend))
    result = trainer(settings(tmp_path, compile=True), blobs(64)).fit()
    assert result.status == "completed"
    (event,) = of_kind(events_of(tmp_path), "compile")
    assert event["status"] == "failed"
    assert "no compiler here" in event["detail"]


def test_modules_of_torch_itself_are_compiled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def counting_backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: compile_function(call, backend=counting_backend))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    trainer(settings(tmp_path, compile=True), blobs(64), model=model).fit()
    assert graphs
    (event,) = of_kind(events_of(tmp_path), "compile")
    assert event["status"] == "compiled"


def test_a_profile_is_a_trace_and_a_table(tmp_path: Path) -> None:
    trainer(settings(tmp_path, profile=True), blobs(200)).fit()
    assert "traceEvents" in json.loads((tmp_path / "run" / "trace.json").read_text())
    assert "addmm" in (tmp_path / "run" / "profile.txt").read_text()
