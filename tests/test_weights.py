"""The weights of a run in a model of another program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from harness.runs.blob_trainers import blobs, settings, trainer
from orchestrator import load_weights
from orchestrator.errors import UserError


def test_a_model_gets_the_weights_that_the_run_ended_with(tmp_path: Path) -> None:
    result = trainer(settings(tmp_path), validation=blobs(16, seed=1)).fit()
    model = nn.Linear(4, 3)
    assert load_weights(model, tmp_path / "run") == result.step
    torch.testing.assert_close(model.state_dict(), result.model.state_dict(), rtol=0, atol=0)


def test_a_checkpoint_may_be_named(tmp_path: Path) -> None:
    trainer(settings(tmp_path, checkpoint_every=1, keep=100)).fit()
    first = tmp_path / "run" / "checkpoints" / "step_00000001"
    model = nn.Linear(4, 3)
    assert load_weights(model, first) == 1
    weight_ND = model.weight.clone()
    assert load_weights(model, tmp_path / "run") > 1
    assert not torch.equal(model.weight, weight_ND)


def test_the_average_of_the_weights_is_loaded_where_there_is_one(tmp_path: Path) -> None:
    result = trainer(settings(tmp_path, ema_decay=0.5, evaluate_ema=True)).fit()
    model = nn.Linear(4, 3)
    load_weights(model, tmp_path / "run", average=True)
    averages = result.model.state_dict()
    torch.testing.assert_close(model.state_dict(), averages, rtol=0, atol=0)
    load_weights(model, tmp_path / "run")
    assert not torch.equal(model.weight, averages["weight"])


def test_a_missing_average_is_said(tmp_path: Path) -> None:
    trainer(settings(tmp_path)).fit()
    with pytest.raises(UserError, match=r"has no average of the weights.*average=False"):
        load_weights(nn.Linear(4, 3), tmp_path / "run", average=True)


def test_a_model_of_other_sizes_is_refused_by_the_name_of_a_weight(tmp_path: Path) -> None:
    trainer(settings(tmp_path)).fit()
    with pytest.raises(UserError, match=r"weight is \(3, 4\) in the checkpoint and \(5, 4\) in the model"):
        load_weights(nn.Linear(4, 5), tmp_path / "run")


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_weights(nn.Linear(4, 3), tmp_path)
