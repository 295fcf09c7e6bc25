"""Shows the model of this process to callbacks between two steps, and leaves the run as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from orchestrator.errors import UserError
from orchestrator.record.callbacks.callback_values import ModelMoment
from orchestrator.record.callbacks.callbacks import CallbackRunner
from orchestrator.train.checkpoint.progress import Progress
from orchestrator.train.parts.shards import local_part
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.worker.torch_settings import preserved_random_state


@dataclass(frozen=True)
class ShownModel:
    """Calls ``on_model`` of callbacks: in evaluation mode, without gradients, and with the state restored."""

    callbacks: CallbackRunner
    strategy: Strategy
    num_workers: int

    def __call__(self, after: ModelMoment, progress: Progress) -> None:
        """Raise ``UserError`` if a callback has changed a weight: the run would go on with other weights, and
        on several workers each with its own."""
        model = self.strategy.model
        is_spread = self.num_workers > 1 and self.strategy.lockstep
        versions = _versions(model)
        with (
            torch.no_grad(),
            preserved_random_state(),
            _evaluation_mode(model),
            _without_passes(self.num_workers) if is_spread else nullcontext(),
        ):
            self.callbacks.show_model(model, progress.step, progress.epoch, after)
        _check_unchanged(versions, _versions(model), progress.step)


def _versions(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Return each tensor of a model with the count of its changes in place, by name."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # The tensor is part of the value: one that replaces it has a count of its own. A shard counts in its
    # local part.
    return {name: (tensor, local_part(tensor)._version) for name, tensor in named.items()}


def _check_unchanged(before: dict[str, Any], now: dict[str, Any], step: int) -> None:
    names = [*before, *(name for name in now if name not in before)]
    for name in names:
        old, old_version = before.get(name, (None, 0))
        new, new_version = now.get(name, (None, 0))
        if old is not new or old_version != new_version:
            raise UserError(
                f"a callback has changed {name!r} of the model in on_model after step {step}; the model is "
                "to look at only. Change a copy of the tensor (tensor.clone()), or train it in the task"
            )


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode; give each module the mode that it had when the block ends."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        # Not ``model.train()``: single modules, a frozen normalisation for one, may differ from the rest.
        for module, was_training in modes:
            module.training = was_training


@contextmanager
def _without_passes(num_workers: int) -> Iterator[None]:
    """Refuse forward passes of modules, which would wait for workers that do not call them."""

    def refuse(module: nn.Module, _: Any) -> None:
        raise UserError(
            f"on_model called {type(module).__name__}: the model is spread over {num_workers} workers, which "
            "would have to call it too. Look at its parameters, or load the checkpoint of on_checkpoint"
        )

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
