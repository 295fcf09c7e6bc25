"""Optimizers by name, over the parameters of a model in two groups: matrices, and norms and biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from experts.expert_state import is_expert_parallel
from experts.moe.bank import ExpertBank
from orchestrator.config.sections.optim import OptimSettings
from orchestrator.errors import UserError
from orchestrator.train.optim.adamw import AdamW, has_fp64
from orchestrator.train.optim.adamw8bit import AdamW8bit
from orchestrator.train.optim.muon import Muon
from orchestrator.train.optim.shards import is_shard, is_sharded, local_part


def build_named_optimizer(
    model: nn.Module, settings: OptimSettings, fused: bool, place_free: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer that the settings name.

    With ``place_free`` the bits of a weight do not depend on its place: in a shard, or in a stack of experts.

    All hosts have the same groups, also one that holds no parameter of a group, or none at all."""
    optimizer = _build(model, settings, fused, place_free)
    separate_shards(optimizer, model)
    return optimizer


def _build(model: nn.Module, settings: OptimSettings, fused: bool, place_free: bool) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    dims = _matrix_dims(model)
    matrices = [p for p in parameters if dims.get(id(p), p.ndim) >= 2]
    others = [p for p in parameters if dims.get(id(p), p.ndim) < 2]
    lr = settings.peak_learning_rate
    decay = settings.weight_decay
    # Decay keeps the weights of products small; a norm's scale or a bias should not tend to zero.
    other_decay = decay if settings.decay_biases else 0.0
    other_group = {"params": others, "weight_decay": other_decay}
    groups = [{"params": matrices, "weight_decay": decay}, other_group]
    if settings.optimizer == "sgd" and place_free:
        return ElementwiseSGD(groups, lr=lr, momentum=settings.momentum_used)
    if settings.optimizer == "sgd":
        # For shards torch has no fused SGD, but one that updates them as lists.
        foreach = True if is_sharded(model) else None
        return torch.optim.SGD(groups, lr=lr, momentum=settings.momentum_used, fused=fused, foreach=foreach)
    if settings.optimizer == "adamw":
        return _adamw(groups, model, settings, fused, place_free)
    if settings.optimizer == "adamw8bit":
        return AdamW8bit(groups, lr=lr, betas=settings.betas, eps=settings.eps)
    # Rows of an embedding are looked up, not multiplied: AdamW trains them.
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables = [p for p in matrices if id(p) in embedded]
    matrices = [p for p in matrices if id(p) not in embedded]
    adamw_groups = [{"params": tables, "weight_decay": decay}, other_group]
    adamw = torch.optim.AdamW(adamw_groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=fused)
    if place_free:
        adamw = _adamw(adamw_groups, model, settings, fused, place_free)
    muon = Muon(matrices, adamw, lr, momentum=settings.momentum_used, weight_decay=decay)
    muon.one_by_one = place_free
    return muon


def _adamw(
    groups: list[dict[str, Any]], model: nn.Module, settings: OptimSettings, fused: bool, place_free: bool
) -> torch.optim.AdamW:
    if not place_free:
        return build_adamw(groups, settings, fused, list(model.parameters()))
    rate = settings.peak_learning_rate
    return AdamW(groups, rate, settings.betas, settings.eps, lambda: _matrix_dims(model))


def build_adamw(
    groups: list[dict[str, Any]], settings: OptimSettings, fused: bool, parameters: Sequence[nn.Parameter]
) -> torch.optim.AdamW:
    """Build AdamW: our own for whole parameters on a GPU, else torch's, with the same state.

    ``parameters`` are all those of the model: a host whose groups are empty chooses as the others do.
    Not our own in fp64: torch's kernel takes the factor of gradients in fp32, which would round them."""
    whole_on_gpu = all(p.is_cuda and not is_shard(p) for p in parameters)
    if fused and whole_on_gpu and not has_fp64(parameters):
        return AdamW(groups, settings.peak_learning_rate, settings.betas, settings.eps)
    rate = settings.peak_learning_rate
    return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, eps=settings.eps, fused=fused)


def separate_shards(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Put shards of a dense part into parameter groups of their own, apart from whole experts.

    Torch updates the parameters of a group together, and refuses shards next to whole ones. All hosts divide
    alike: one without experts may get some later. ``same_as`` is the number of the group with the same
    settings: checkpoints know that one alone."""
    if not (is_sharded(model) and is_expert_parallel(model)):
        return
    add_group = optimizer.param_groups.append
    if isinstance(optimizer, Muon):
        add_group = optimizer.add_adamw_group
    else:
        check_owns_groups(optimizer)
    for number, group in enumerate(list(optimizer.param_groups)):
        if isinstance(optimizer, Muon) and number == 0:
            continue  # its matrices are updated one by one
        shards = [p for p in group["params"] if is_shard(p)]
        group["params"] = [p for p in group["params"] if not is_shard(p)]
        add_group({**group, "params": shards, "same_as": number})


def check_owns_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for an optimizer around another one, whose groups would keep shards that are moved."""
    if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
        raise UserError(
            f"the task's optimizer {type(optimizer).__name__} contains another optimizer: with a sharded "
            "dense part on expert hosts its parameters cannot be divided; build one that is not wrapped, or "
            "use --sharding none"
        )


def _matrix_dims(model: nn.Module) -> dict[int, int]:
    """Return the dimensions of each expert's part of a stacked parameter, by the parameter's id."""
    banks = [module for module in model.modules() if isinstance(module, ExpertBank)]
    return {id(stack): stack.ndim - 1 for bank in banks for _, _, stack in bank.stacks()}


class ElementwiseSGD(torch.optim.SGD):
    """Torch's SGD with momentum and weight decay, with the same state. Parameters may be shards.

    Each operation is one that IEEE 754 rounds in one way: fused ones may round the last elements of a tensor
    in another way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        weights = [local_part(parameter.detach()) for parameter in parameters]
        directions = [local_part(parameter.grad) for parameter in parameters]
        if group["weight_decay"]:
            decays = torch._foreach_mul(weights, group["weight_decay"])
            directions = list(torch._foreach_add(directions, decays))
        if group["momentum"]:
            momenta = [self._momentum(parameter) for parameter in parameters]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, directions)
            directions = momenta
        torch._foreach_sub_(weights, torch._foreach_mul(directions, group["lr"]))
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the momentum of this worker's part of a parameter, zeros before the first step."""
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return local_part(state["momentum_buffer"])
