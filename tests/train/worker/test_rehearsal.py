"""A rehearsal takes steps of its own, whatever the run's settings, and leaves nothing behind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.config.settings import Config
from orchestrator.tasks.digits import Digits
from orchestrator.train.stepper import Stepper
from orchestrator.train.worker.rehearsal import rehearse_steps
from orchestrator.trainer import Trainer

CPU = torch.device("cpu")
RUNS: dict[str, dict[str, Any]] = {
    "default": {},
    "deterministic": {"deterministic": True},
    "uneven experts": {"experts": 7, "expert_hidden_size": (4, 8, 4, 8, 4, 8, 4), "top_k": 5},
    "no experts, other optimizer": {"experts": 0, "optimizer": "muon"},
    "compiled": {"compile": True, "evolution": "off"},
    "recomputed": {"activation_checkpointing": "on"},
}


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.fixture
def recorded_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The number of each step, and whether it computes deterministically."""
    steps: list[tuple[int, bool]] = []
    run = Stepper.run

    def record(stepper: Stepper, batch: Any, step: int) -> Any:
        steps.append((step, torch.are_deterministic_algorithms_enabled()))
        return run(stepper, batch, step)

    monkeypatch.setattr(Stepper, "run", record)
    return steps


@pytest.mark.extended(but_first=1)
@pytest.mark.parametrize("name", RUNS)
def test_a_rehearsal_takes_two_steps_with_the_settings_of_the_run(
    tmp_path: Path,
    recorded_steps: list[tuple[int, bool]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    config = Config.of(run_dir=tmp_path / "run", task="digits", trackers=(), **RUNS[name])
    prepared = Trainer(config=config, quiet=True).prepare()
    monkeypatch.setattr(Digits, "loss", None)  # a call would fail: user code is not rehearsed
    seed = 5
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    expected = draw()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    rehearse_steps(prepared, CPU)
    assert draw() == expected
    is_deterministic = name == "deterministic"
    assert recorded_steps == [(0, is_deterministic), (1, is_deterministic)]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not (tmp_path / "run").exists()
