"""Copies of the experts' weights in the type of the products, written by the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.moe.bank import ExpertBank
from experts.moe.weight_copy import WeightCopy
from orchestrator.train.optim.adamw import AdamW, is_large


class WeightCopies:
    """The copies of all large stacks of experts of a model, for banks that a forward pass uses once."""

    def __init__(self, model: nn.Module, optimizer: AdamW, dtype: torch.dtype) -> None:
        self._model = model
        self._optimizer = optimizer
        self._dtype = dtype
        self._copies: list[WeightCopy] = []
        self.update()

    def update(self) -> None:
        """Make the copies of new parameters, and forget those of replaced ones."""
        trained = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        self._copies = []
        banks = _unshared_banks(self._model)
        kept = {id(bank): bank.copies for bank in banks}
        for bank in banks:
            bank.copies = {}
        for bank, name, stack in copied_stacks(self._model):
            if id(stack) in trained:
                copy = kept[id(bank)].get(name)
                if copy is None or copy.parameter is not stack:
                    copy = WeightCopy(stack, self._dtype)
                bank.copies[name] = copy
                self._copies.append(copy)
        self._optimizer.copies = {copy.parameter: copy for copy in self._copies}

    @property
    def tensors(self) -> list[Tensor]:
        """The copies themselves."""
        return [copy.weights for copy in self._copies]

    def drop(self) -> None:
        """Let the banks compute with their weights again: a later optimizer may not write copies."""
        for copy in self._copies:
            copy.release()
        for bank in _unshared_banks(self._model):
            bank.copies = {}
        self._copies = []
        self._optimizer.copies = {}

    def refresh(self) -> None:
        """Write those copies anew whose weights have changed."""
        for copy in self._copies:
            copy.refresh()

    def begin_step(self, is_single_pass: bool) -> None:
        """Keep gradients in the short type in a step of one pass; several passes are summed in full."""
        for copy in self._copies:
            copy.keeps_short_gradient = is_single_pass


def copied_stacks(model: nn.Module) -> Iterator[tuple[ExpertBank, str, nn.Parameter]]:
    """Yield the stacks of a model that get a copy if they are trained: their bank, name and parameter."""
    for bank in _unshared_banks(model):
        for group, role, stack in bank.stacks():
            if stack.requires_grad and is_large(stack) and not _has_hooks(stack):
                yield bank, f"{role}_{group.hidden}", stack


def _unshared_banks(model: nn.Module) -> list[ExpertBank]:
    """Return the banks of one layer each: gradients of several uses would be summed in the short type."""
    banks = [layer.bank for _, layer in moe_layers(model)]
    return [bank for bank in banks if sum(bank is other for other in banks) == 1]


def _has_hooks(stack: nn.Parameter) -> bool:
    """Whether a task looks at the gradient of a stack: it would never see that of a copy."""
    return bool(stack._backward_hooks or getattr(stack, "_post_accumulate_grad_hooks", None))
