"""Building the training of a worker, and what a failure leaves behind."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.files.events import EventLog, by_step, of_kind, read_events
from orchestrator.train.worker import build as build_module
from orchestrator.train.worker.build_evolution import EvolutionParts
from orchestrator.trainer import Trainer
from tests.support.runs.loop_runs import build_small_training, run_loop
from tests.support.runs.tiny_model import Tiny


def test_a_run_that_cannot_start_leaves_the_settings_of_torch_as_they_were(tmp_path: Path) -> None:
    settings: Any = importlib.import_module("torch._functorch.config")
    before = settings.ban_recompute_used_far_apart
    recompiles = logging.getLogger("torch._dynamo.guards.__recompiles")
    handlers = list(recompiles.handlers)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    data = (torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64))
    config = Config.of(epochs=1, compile="on", early_stopping_patience=2, run_dir=tmp_path / "run")
    with pytest.raises(UserError, match="needs validation data"):
        Trainer(nn.Linear(3, 2), data=data, loss=loss, config=config, quiet=True).fit()
    assert before is True
    assert settings.ban_recompute_used_far_apart is True
    assert recompiles.handlers == handlers


@pytest.mark.parametrize(
    ("settings", "state_bytes"),
    [({}, 16), ({"optimizer": "sgd"}, 12), ({"ema_decay": 0.9}, 20)],
    ids=str,
)
def test_experts_move_by_the_memory_that_placed_them(
    settings: dict[str, Any], state_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[EvolutionParts] = []
    monkeypatch.setattr(build_module, "build_evolution", lambda parts, *_: built.append(parts))
    build_small_training(tmp_path, EventLog(tmp_path / "events.jsonl"), **settings).close()
    (parts,) = built
    assert parts.expert_state_bytes == state_bytes


def test_a_run_resumed_in_mid_epoch_with_another_batch_follows_the_new_number_of_steps(
    tmp_path: Path,
) -> None:
    """Half of 96 samples in 3 steps of 16, the rest in 4 of 12, and the second epoch in 8: 15 steps.

    A run with batches of 12 from the start would have 16."""
    settings: dict[str, Any] = {"schedule": "linear", "learning_rate": 1e-2, "epochs": 2, "evaluate_every": 0}
    task = Tiny(((4, 4),), samples=96, dtype=torch.float32)
    first: dict[str, Any] = settings | {"batch_size": 16, "max_steps": 3}
    second: dict[str, Any] = settings | {"batch_size": 12, "resume": "auto"}
    run_loop(tmp_path / "run", task, **first)
    run_loop(tmp_path / "run", task, **second)
    events = read_events(tmp_path / "run" / "events.jsonl")
    rates = [event["lr"] for event in by_step(events)]
    assert rates[3:] == pytest.approx([1e-2 * (1 - step / 15) for step in range(3, 15)])
    (warning,) = [event for event in of_kind(events, "warning") if event["kind"] == "schedule"]
    assert "ends at step 15" in warning["message"]
