"""Shows the model of this process to callbacks between two steps, and leaves the run as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.checkpoint.progress import Progress
from orchestrator.errors import UserError
from orchestrator.live.callbacks.callback_values import ModelMoment
from orchestrator.live.callbacks.callbacks import CallbackRunner
from orchestrator.train.optim.shards import is_shard_type, local_part
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.worker.torch_settings import preserved_random_state

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d")


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
            _alone(model, self.num_workers) if is_spread else nullcontext(),
        ):
            self.callbacks.show_model(model, progress.step, progress.epoch, after)
        _check_unchanged(versions, _versions(model), progress.step)


def _versions(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Return each tensor of a model with the count of its changes in place, by name."""
    named = {**dict(model.named_parameters()), **_saved_buffers(model)}
    # The tensor is part of the value: one that replaces it has a count of its own. A shard counts in its
    # local part.
    return {
        name: (tensor, local_part(tensor)._version)
        for name, tensor in named.items()
        if not tensor.is_inference()
    }


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of checkpoints. A pass may replace others, such as a table of positions."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


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
def _alone(model: nn.Module, num_workers: int) -> Iterator[None]:
    """Refuse forward passes and collectives, which would wait for workers that do not call them."""
    modules = set(model.modules())

    def refuse(module: nn.Module, _: Any) -> None:
        if module in modules:
            raise UserError(
                f"on_model called {type(module).__name__}: the model is spread over {num_workers} workers, "
                "which would have to call it too. Look at its parameters, or load the checkpoint of "
                "on_checkpoint"
            )

    handle = register_module_forward_pre_hook(refuse)
    try:
        with _NoCollectives():
            yield
    finally:
        handle.remove()


class _NoCollectives(TorchDispatchMode):
    """Refuses operations of shards that need the other workers, or that would read one shard as a whole."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_number = func is torch.ops.aten._local_scalar_dense.default
        of_shards = any(is_shard_type(kind) for kind in types)
        if func.namespace in _COLLECTIVES or (is_number and of_shards):
            raise UserError(
                "on_model computed with a sharded parameter, which the other workers would have to do too. "
                "Look at this worker's part of it: parameter.to_local()"
            )
        # Shards carry out their operations themselves, and their collectives come here.
        return NotImplemented if of_shards else func(*args, **(kwargs or {}))
