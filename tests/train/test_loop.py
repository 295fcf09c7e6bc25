"""What the loop decides: what is better, and that a resumed run decides the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.record.events import by_step, effective_events, of_kind, read_events
from orchestrator.record.summary import summarise
from orchestrator.tasks.task import Task, TensorData
from orchestrator.train.validation import is_better
from tests.train.worker.test_build import run


@pytest.mark.parametrize(
    ("value", "best", "metric", "better"),
    [
        (1.0, None, "loss", True),
        (1.0, 2.0, "loss", True),
        (3.0, 2.0, "loss", False),
        (3.0, 2.0, "accuracy", True),
        (float("nan"), None, "loss", False),
        (float("nan"), 2.0, "accuracy", False),
        (3.0, float("nan"), "loss", True),
    ],
)
def test_better(value: float, best: float | None, metric: str, better: bool) -> None:
    assert is_better(value, best, metric) is better


class Scripted(Task):
    """A task whose validation losses are given: one per evaluation, by the number of the step."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values, self.steps = values, 0

    def build_model(self) -> nn.Module:
        return _Counting()

    def train_data(self) -> TensorData:
        return TensorData(torch.ones(16, 1))

    def validation_data(self) -> TensorData:
        return TensorData(torch.ones(1, 1))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0]).mean()
        return out if model.training else out.detach() * 0 + self.values[int(model.count)]  # pyright: ignore[reportArgumentType]


class _Counting(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count.add_(1)
        return x * self.weight


VALUES = {4: 5.0, 8: 6.0, 12: 4.0, 16: 7.0, 20: 7.5, 24: 8.0}
SETTINGS: dict[str, Any] = {
    "batch_size": 4,
    "epochs": 6,
    "early_stopping_patience": 2,
    "experts": None,
    "expert_hidden_size": (),
}


@pytest.mark.parametrize("checkpoint_every", [0, 2, 4])
@pytest.mark.parametrize("killed_at", [4, 8, 12, 20])
def test_early_stopping_decides_the_same_after_a_restart(
    tmp_path: Path, checkpoint_every: int, killed_at: int
) -> None:
    settings = SETTINGS | {"checkpoint_every": checkpoint_every}
    whole, _ = run(tmp_path / "whole", Scripted(VALUES), **settings)
    assert whole.progress.step == 20
    run(tmp_path / "parts", Scripted(VALUES), **settings | {"max_steps": killed_at})
    resumed, _ = run(tmp_path / "parts", Scripted(VALUES), **settings | {"resume": "auto"})
    assert (resumed.progress.step, resumed.progress.best_step, resumed.progress.bad_evaluations) == (
        20,
        12,
        2,
    )
    best = [
        e["step"] for e in of_kind(read_events(tmp_path / "parts" / "events.jsonl"), "evaluate") if e["best"]
    ]
    assert best[-1] == 12


@pytest.mark.parametrize("evaluate_every", [0, 4])
def test_a_run_that_was_stopped_early_stays_stopped(tmp_path: Path, evaluate_every: int) -> None:
    settings = SETTINGS | {"evaluate_every": evaluate_every}
    run(tmp_path, Scripted(VALUES), **settings)
    resumed, _ = run(tmp_path, Scripted(VALUES | {24: 1.0}), **settings | {"resume": "auto"})
    assert resumed.progress.step == 20, "a better value would have come, had it gone on"


def test_the_summary_is_of_the_run_as_it_went() -> None:
    def step(number: int, loss: float) -> dict[str, Any]:
        return {
            "event": "step",
            "time": 0,
            "step": number,
            "loss": loss,
            "seconds": 1.0,
            "samples": 4,
            "units": 4,
            "metrics": {},
        }

    first = [{"event": "start", "time": 0, "step": 0}, *(step(n, 9.0) for n in range(1, 12))]
    second = [{"event": "start", "time": 0, "step": 8}, step(9, 1.0), step(10, 2.0)]
    end = {
        "event": "end",
        "time": 0,
        "status": "completed",
        "reason": "",
        "steps": 10,
        "seconds": 5.0,
        "memory": {"allocated": 7},
    }
    summary = summarise([*first, *second, end])
    assert (summary["steps"], summary["train_loss"], summary["lost_steps"], summary["peak_memory_bytes"]) == (
        10,
        2.0,
        3,
        7,
    )
    assert [e["loss"] for e in by_step(effective_events([*first, *second]))][-3:] == [9.0, 1.0, 2.0]


def test_throughput_leaves_the_first_steps_of_each_process_out() -> None:
    steps = [
        {
            "event": "step",
            "time": 0,
            "step": n,
            "loss": 1.0,
            "seconds": s,
            "samples": 10,
            "units": 10,
            "metrics": {},
            **w,
        }
        for n, (s, w) in enumerate(
            [(60.0, {"warm_up": True}), (0.1, {}), (0.1, {}), (30.0, {"warm_up": True}), (0.1, {})], 1
        )
    ]
    assert summarise(steps)["samples_per_second"] == pytest.approx(100)
