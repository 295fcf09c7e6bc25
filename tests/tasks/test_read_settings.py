"""Settings that nothing reads are refused before a run; the plan records those that something reads."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.lm.language_models import lm_config, save_tiny_deepseek, save_tiny_model
from harness.runs.blob_trainers import Blobs
from orchestrator.config.sections.model import MoeSettings
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.tasks.read_settings import check_sweep_taken, watched
from orchestrator.trainer import Trainer

OWN_LAYER = """
import torch
from torch import nn
from experts.moe.layer import MoELayer
from orchestrator.tasks.task import Loss, Task, TensorData

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.moe = MoELayer(width, (8, 8, 8), 1)

    def forward(self, x):
        return self.moe(x)

class Fixed(Task):
    def __init__(self, config):
        self.config = config

    def build_model(self):
        return Model(4)

    def train_data(self):
        return TensorData(torch.ones(16, 4))

    def loss(self, model, batch):
        y, routing = model(batch[0])
        return Loss(y.square().sum() + self.weight() * routing.balance, len(y))

    def weight(self):
        return 0.01

class Balanced(Fixed):
    def weight(self):
        return self.config.moe.balance_loss or 0.0

class OwnOptimizer(Fixed):
    def build_optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=self.config.optim.learning_rate or 0.1)
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_layer.py").write_text(OWN_LAYER)
    yield tmp_path
    sys.modules.pop("own_layer", None)


def taken(**settings: Any) -> tuple[str, ...]:
    return Trainer(config=Config.of(**settings), quiet=True).prepare().facts.settings


def test_a_task_with_its_own_layer_refuses_settings_that_it_does_not_read(user_folder: Path) -> None:
    message = (
        r"balance_loss 50.0, experts 9 have no effect: the task own_layer:Fixed does not read them; leave"
    )
    with pytest.raises(UserError, match=message):
        taken(task="own_layer:Fixed", balance_loss=50, experts=9)
    assert "balance_loss" not in taken(task="own_layer:Fixed")


def test_settings_that_a_task_reads_in_its_loss_or_optimizer_are_taken(user_folder: Path) -> None:
    assert "balance_loss" in taken(task="own_layer:Balanced", balance_loss=50)
    assert "learning_rate" in taken(task="own_layer:OwnOptimizer", learning_rate=0.5)
    with pytest.raises(UserError, match=r"weight_decay 0\.5 has no effect"):
        taken(task="own_layer:OwnOptimizer", weight_decay=0.5)


def test_built_in_tasks_refuse_sizes_of_others() -> None:
    with pytest.raises(UserError, match="samples 9, sequence_length 5 have no effect: the task digits"):
        taken(task="digits", sequence_length=5, samples=9)
    assert {"experts", "top_k", "balance_loss", "width"} <= set(taken(task="digits", width=8))
    with pytest.raises(UserError, match=r"gate_jitter 0\.1 has no effect"):
        taken(task="digits", experts=0, gate_jitter=0.1)


def test_a_model_of_a_program_has_its_own_sizes_and_its_optimizer_its_own_rate() -> None:
    parts: dict[str, Any] = {
        "model": nn.Linear(4, 2),
        "data": torch.randn(8, 4),
        "loss": lambda model, batch: model(batch[0]).square().mean(),
    }
    with pytest.raises(UserError, match="width 9 has no effect: the task python:Linear does not read it"):
        Trainer(**parts, config=Config.of(width=9), quiet=True).prepare()
    own: Any = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    with pytest.raises(UserError, match=r"learning_rate 0\.5 has no effect"):
        Trainer(**parts, **own, config=Config.of(learning_rate=0.5), quiet=True).prepare()
    Trainer(**parts, config=Config.of(learning_rate=0.5), quiet=True).prepare()


def test_a_task_object_names_the_settings_that_it_reads() -> None:
    class Wide(Blobs):
        settings_read = ("width",)

    with pytest.raises(UserError, match=r"layers 3 .+ settings_read = \('layers',\)"):
        Trainer(task=Wide(), config=Config.of(width=9, layers=3), quiet=True).prepare()
    Trainer(task=Wide(), config=Config.of(width=9), quiet=True).prepare()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("save", "lora", "balances"),
    [
        (save_tiny_deepseek, None, {"balance_bias"}),
        (save_tiny_deepseek, 4, set()),
        (save_tiny_model, None, {"balance_loss"}),
    ],
)
def test_a_language_model_takes_the_balance_that_its_family_has(
    tmp_path: Path, save: Any, lora: int | None, balances: set[str]
) -> None:
    config = lm_config(tmp_path, save, lora=lora)
    facts = Trainer(config=config, quiet=True).prepare().facts
    assert {"balance_loss", "balance_bias", "experts", "top_k"} & set(facts.settings) == balances
    assert {"lora", "sequence_length", "packing", "learning_rate"} <= set(facts.settings)


def test_a_swept_setting_that_nothing_reads_is_refused() -> None:
    with pytest.raises(UserError, match="top_k is swept, but the task mine:Task does not read it"):
        check_sweep_taken("mine:Task", ["learning_rate", "top_k", "batch_size"], ["learning_rate"])
    check_sweep_taken("mine:Task", ["learning_rate", "batch_size"], ["learning_rate"])


def test_settings_of_a_task_object_cannot_be_swept() -> None:
    """The object was made once: its sizes are the same in all trials."""
    taken = ["learning_rate", "width", "validation_share"]
    for name in ("width", "validation_share"):
        with pytest.raises(UserError, match=f"{name} is swept, but the task python:Task does not read it"):
            check_sweep_taken("python:Task", ["learning_rate", name], taken)
    check_sweep_taken("python:Task", ["learning_rate", "batch_size"], taken)


def test_watched_settings_equal_plain_ones_and_can_be_sent() -> None:
    config, reads = watched(Config.of(experts=3))
    assert not reads
    assert config.moe.experts == 3
    assert reads == {"experts"}
    assert config.given == {"experts"}
    assert config.moe == MoeSettings(experts=3)
    assert MoeSettings(experts=3) == config.moe
    sent = pickle.loads(pickle.dumps(config))  # noqa: S301
    assert type(sent.moe) is MoeSettings
    assert sent == Config.of(experts=3)
    assert config.but(top_k=2).moe.top_k == 2
