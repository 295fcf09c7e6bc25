"""--reproducible with samples that are left out, losses of whole steps, and scaled losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harness.hosts.ranks import run_ranks
from harness.lm.language_models import save_sums, save_tiny_model
from harness.runs.combinations import Validated
from harness.runs.tiny_model import Tiny
from orchestrator.tasks.task import Loss, StepPreview, TensorData
from orchestrator.train.step import preview
from tests.train.test_reproducible_shards import (
    DATA,
    EXPERTS,
    SETTINGS,
    STEPS,
    TASK,
    Cases,
    State,
    one_process,
    train_cases,
)

BAD = (0.8, 0.3)
"""Shares of bad samples: with the first, whole micro-batches have none that counts."""


class Damaged(Dataset[tuple[Tensor, Tensor]]):
    """Samples of which some cannot be loaded."""

    def __init__(self, data: TensorData, share: float) -> None:
        self._x, self._labels = data.tensors
        x = self._x
        self._bad = torch.rand(len(x), generator=torch.Generator().manual_seed(4)) < share

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._bad[index]:
            raise ValueError(f"sample {index} is damaged")
        return self._x[index], self._labels[index]


@dataclass(frozen=True)
class DamagedTask(Tiny):
    share: float = 0.5

    def train_data(self) -> Any:
        return Damaged(super().train_data(), self.share)

    def validation_data(self) -> Any:
        return self.train_data()


@dataclass(frozen=True)
class Drawn(Validated):
    """A loss that depends on draws of a look at the step: whole numbers, whose sum is exact."""

    drawn: list[Tensor] = field(default_factory=list)

    def prepare_step(self, preview: StepPreview) -> None:
        numbers = preview.forward(lambda _: torch.randint(1000, ()))
        total = sum(numbers, torch.zeros((), dtype=torch.int64))
        self.drawn[:] = [preview.all_reduce(total.double())]

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = super().loss(model, batch)
        # A trial of the loss comes before the first step.
        scale = float(self.drawn[0]) / 1000 if model.training and self.drawn else 1.0
        return Loss(found.sum * scale, found.count, {}, found.loads)


def drawn() -> Drawn:
    return Drawn(TASK.sizes, samples=41, dtype=torch.float32, tokens=5)


def damaged(share: float) -> DamagedTask:
    return DamagedTask(TASK.sizes, samples=41, dtype=torch.float32, tokens=5, share=share)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    files = tmp_path_factory.mktemp("files")
    data = str(save_sums(files / "sums.jsonl", 24))
    language: dict[str, Any] = {
        **SETTINGS,
        "task": "lm",
        "model": str(save_tiny_model(files / "model")),
        "sequence_length": 48,
        "batch_size": 2,
        "global_batch_size": 5,
        "data": [data],
        "validation_data": [data],
        "balance_loss": 0.1,
    }
    lora = {"lora": 3, "lora_dropout": 0.2}
    skipping = {**SETTINGS, "batch_size": 2, "global_batch_size": 10, "skip_bad": True}
    # A scale of 2**16 overflows in the first steps, which are skipped.
    scaled = {**SETTINGS, "precision": "fp16", "learning_rate": 1e-3}
    return {
        "experts-bad": (damaged(BAD[0]), {**skipping, **EXPERTS}),
        "data-bad": (damaged(BAD[0]), {**skipping, **DATA}),
        "data-zero3-bad": (damaged(BAD[1]), {**skipping, **DATA, "sharding": "zero3"}),
        "experts-lm": (None, {**language, **EXPERTS}),
        "data-lm-dropout": (None, {**language, **lora, **DATA}),
        "data-zero2-lm": (None, {**language, **DATA, "sharding": "zero2"}),
        "experts-zero3-lora": (None, {**language, **lora, **EXPERTS, "sharding": "zero3"}),
        "experts-fp16": (TASK, {**scaled, **EXPERTS}),
        "data-draws": (drawn(), {**SETTINGS, **DATA}),
    }


NAMES = (
    "experts-bad",
    "data-bad",
    "data-zero3-bad",
    "experts-lm",
    "data-lm-dropout",
    "data-zero2-lm",
    "experts-zero3-lora",
    "experts-fp16",
    "data-draws",
)


@pytest.fixture(scope="module")
def folder(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of each case: in one process, and on 2 workers whose run goes on on 3 workers."""
    folder = tmp_path_factory.mktemp("runs")
    one_process(cases, folder / "one")
    run_ranks(train_cases, 2, cases, folder / "workers", STEPS // 2, "", timeout=600)
    run_ranks(train_cases, 3, cases, folder / "workers", STEPS, "", timeout=600)
    return folder


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_no_bit_depends_on_the_workers(name: str, folder: Path) -> None:
    one = State.of(folder / "one" / name)
    assert len(one.losses) == STEPS
    assert one.differences(State.of(folder / "workers" / name)) == []


@pytest.mark.extended
def test_the_cases_leave_samples_out(cases: Cases) -> None:
    assert set(cases) == set(NAMES)
    data = damaged(BAD[0]).train_data()
    assert 0 < sum(int(bad) for bad in data._bad) < len(data)


@pytest.mark.extended
def test_draws_of_a_preview_by_rank_show(
    cases: Cases, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: a look at the step draws by the order of passes, not by micro-batch."""
    original = preview.Preview.__init__

    def start(self: Any, *arguments: Any) -> None:
        original(self, *arguments[:6])

    monkeypatch.setattr(preview.Preview, "__init__", start)
    name = "data-draws"
    one_process({name: cases[name]}, tmp_path)
    assert State.of(folder / "one" / name).differences(State.of(tmp_path / name)) != []
