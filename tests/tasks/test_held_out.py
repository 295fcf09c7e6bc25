"""Tests of a share of the training data that is held out for validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.tasks.object_task import hold_out
from orchestrator.tasks.task import WindowData
from orchestrator.train.data.steps import as_dataset
from orchestrator.trainer import Trainer

X = torch.arange(20.0).unsqueeze(1)


class Squares:
    """A data set with random access, and no other member."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(X)


def values(part: Any) -> list[float]:
    data = as_dataset(part)
    if hasattr(data, "gather"):
        batch = data.gather(torch.arange(len(data)))
        return (batch[0] if isinstance(batch, tuple) else batch)[:, 0].tolist()
    return [float(data[number][0]) for number in range(len(data))]


@pytest.mark.parametrize(
    "data",
    [X, X.numpy(), (X, X), TensorDataset(X), Squares(), WindowData(torch.arange(21), 1)],
    ids=lambda data: type(data).__name__,
)
def test_each_kind_of_data_is_divided_alike_by_the_seed(data: Any) -> None:
    kept, held_out = (values(part) for part in hold_out(data, 0.2, seed=3))
    assert len(held_out) == 4
    assert sorted(kept + held_out) == list(range(20))
    assert (kept, held_out) == tuple(values(part) for part in hold_out(X, 0.2, seed=3))
    assert held_out != values(hold_out(X, 0.2, seed=4)[1])


def test_both_parts_have_a_sample_at_least() -> None:
    assert [len(part) for part in hold_out(X[:3], 0.01, 0)] == [2, 1]
    assert [len(part) for part in hold_out(X[:3], 0.99, 0)] == [1, 2]
    with pytest.raises(UserError, match="the data has 1 samples; 2 were needed"):
        hold_out(X[:1], 0.5, 0)


def test_data_that_is_read_in_order_is_refused() -> None:
    for data in (Stream(), DataLoader(TensorDataset(X), batch_size=2)):
        with pytest.raises(UserError, match="the data is read in order: samples cannot be chosen from it"):
            hold_out(data, 0.5, 0)


def trainer(**settings: Any) -> Trainer:
    parts: dict[str, Any] = {"data": X}
    parts |= {name: settings.pop(name) for name in ("data", "validation") if name in settings}
    loss: Any = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
    return Trainer(nn.Linear(1, 1), **parts, loss=loss, config=Config.of(**settings), quiet=True)


def test_a_trainer_without_validation_data_holds_out_a_share() -> None:
    facts = trainer(validation_share=0.25).prepare().facts
    assert (facts.samples, facts.validation_samples) == (15, 5)
    assert trainer().prepare().facts.validation_samples == 0


def test_a_share_beside_validation_data_or_for_another_task_is_refused() -> None:
    with pytest.raises(UserError, match=r"validation_share is 0\.25, and validation data is given too"):
        trainer(validation=X, validation_share=0.25).prepare()
    with pytest.raises(UserError, match=r"validation_share 0\.25 has no effect: the task digits"):
        Trainer(config=Config.of(validation_share=0.25), quiet=True).prepare()
    with pytest.raises(UserError, match=r"validation_share is 1\.0; it must be at least 0 and below 1"):
        Config.of(validation_share=1.0)
    assert np.isclose(Config.of(validation_share=0.5).data.validation_share or 0, 0.5)
