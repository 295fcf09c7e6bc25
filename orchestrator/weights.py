"""Weights of a run in a model of the user's own program, without a training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def load_weights(model: nn.Module, checkpoint: str | Path, average: bool = False) -> int:
    """Load the weights of a checkpoint, or of the best one of a run, into a model. Return their step.

    ``checkpoint`` is a folder or an address. The model has the sizes that the run began with; experts
    that were born, merged or pruned in it are built. With ``average`` it gets the average of
    ``--ema-decay``. Nothing is unpickled.
    """
    from orchestrator.checkpoint.files import load
    from orchestrator.checkpoint.progress import read_progress
    from orchestrator.plan.inventory.hardware import results_folder
    from orchestrator.train.remote.opened_checkpoint import opened_checkpoint
    from orchestrator.train.worker.final_model import restore_weights, weight_kinds, with_average

    with opened_checkpoint(checkpoint, results_folder()) as opened:
        contents = load(opened.path, kinds=weight_kinds(average))
        restore_weights(model, with_average(contents) if average else contents)
        return read_progress(contents.state).step
