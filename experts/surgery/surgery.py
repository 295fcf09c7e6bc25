"""Changes of a layer's experts, carried out on its bank, its gate and the optimizer's state.

Nothing is changed in place: the tensors before the change stay as they are, so that it can be undone
exactly. An expert that another host needs is sent with its optimizer state, from device to device. See
``types`` for the letters of shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from experts.moe.bank import ExpertBank, without_memory
from experts.moe.layer import MoELayer
from experts.moe.routed import RoutedExperts
from experts.moe.statistics import ExpertStatistics
from experts.structure import Change, LayerStructure, changed
from experts.surgery.builder import ExpertBuilder
from experts.surgery.expert_transfer import ExpertTensors, StateSpec, exchange_experts
from experts.surgery.gate_rows import change_gate, follow_number
from experts.surgery.optimizer_state import ParameterGroups, coding_of

_MOVES = ("moved", "copied")
"""Changes that leave the gate as it is."""


@dataclass(frozen=True)
class Surgery:
    """The means by which a layer is changed. ``step`` counts the steps done."""

    optimizer: torch.optim.Optimizer
    spec: StateSpec
    seed: int
    step: int


@dataclass(frozen=True)
class LayerBackup:
    """A layer and its optimizer state, as they were before a change."""

    layer: RoutedExperts
    structure: LayerStructure
    attributes: Sequence[tuple[nn.Module, str, Any]]
    """What a change replaces in the layer and its gate: module, name and value."""
    optimizer: torch.optim.Optimizer
    state: Mapping[nn.Parameter, dict[str, Any]]
    groups: Sequence[list[nn.Parameter]]

    @classmethod
    def of(cls, layer: RoutedExperts, optimizer: torch.optim.Optimizer) -> LayerBackup:
        replaced: list[tuple[nn.Module, str]] = [(layer, "bank"), (layer, "load_E")]
        if isinstance(layer, MoELayer):
            replaced += [(layer.gate, "weight_ED"), (layer.gate, "bias_E"), (layer, "statistics")]
        return cls(
            layer,
            layer.structure,
            [(module, name, getattr(module, name)) for module, name in replaced],
            optimizer,
            {p: optimizer.state[p] for p in _changed_parameters(layer) if p in optimizer.state},
            [list(group["params"]) for group in optimizer.param_groups],
        )

    def restore(self, step: int) -> None:
        """Put everything back, except the next id: ids are never used again."""
        layer = self.layer
        structure = replace(self.structure, next_id=layer.structure.next_id)
        for parameter in _changed_parameters(layer):
            self.optimizer.state.pop(parameter, None)
        for module, name, value in self.attributes:
            setattr(module, name, value)
        if isinstance(layer, MoELayer):
            follow_number(layer, len(structure.experts))
        layer.use_structure(structure, _host(layer), step)
        for parameter, state in self.state.items():
            self.optimizer.state[parameter] = state
        for group, parameters in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = parameters


def _host(layer: RoutedExperts) -> tuple[int, int]:
    """Return the rank of this host, and the number of hosts."""
    return layer.context.exchange.rank, layer.context.exchange.size


def _changed_parameters(layer: RoutedExperts) -> list[nn.Parameter]:
    return [*layer.router_parameters, *layer.bank.parameters()]


@torch.no_grad()
def change_layer(model: nn.Module, layer: RoutedExperts, change: Change, surgery: Surgery) -> LayerBackup:
    """Carry out a change. Return the means to undo it.

    All hosts must call it with the same change. The parameters of bank and gate are replaced: the caller
    notifies the strategy that holds them."""
    if change.kind not in _MOVES and not isinstance(layer, MoELayer):
        raise ValueError(
            f"{layer.layer_name}: an expert was to be {change.kind}; a router that is not ours knows its "
            f"number of experts, so that they can be {' and '.join(_MOVES)} alone: use --evolution off"
        )
    backup = LayerBackup.of(layer, surgery.optimizer)
    replaced = _changed_parameters(layer)
    old = layer.structure
    new = changed(old, change, surgery.step, layer.chooses_all)
    rank = layer.context.exchange.rank
    sources = _sources(old, new, change)
    own = {layer.bank.ids[row]: _expert_tensors(layer.bank, row, surgery) for row in layer.bank.held}
    available = own | exchange_experts(layer, old, new, sources, own, surgery.spec)
    tensors: dict[int, ExpertTensors] = {}
    for row in new.held(rank):
        expert = new.experts[row]
        builder = ExpertBuilder(layer, change, surgery.seed, expert.id, coding_of(surgery.optimizer))
        tensors[row] = builder.build([available[source] for source in sources[expert.id]])
    groups = ParameterGroups(surgery.optimizer, layer, surgery.spec.groups)
    bank = _build_bank(layer.bank, new, rank, tensors, surgery)
    layer.bank = bank
    if change.kind not in _MOVES and isinstance(layer, MoELayer):
        change_gate(layer, new, change, surgery.optimizer, surgery.seed)
        if layer.statistics is not None and change.kind != "warmed":
            layer.statistics = ExpertStatistics(len(new.experts), bank.width).to(layer.load_E.device)
    layer.use_structure(new, _host(layer), surgery.step)
    groups.replace(model, layer, set(replaced))
    return backup


def _sources(old: LayerStructure, new: LayerStructure, change: Change) -> dict[int, tuple[int, ...]]:
    """Return the experts that each new expert is made from."""
    sources: dict[int, tuple[int, ...]] = {expert.id: (expert.id,) for expert in new.experts}
    if change.kind == "born":
        # An expert made afresh takes the scale of the optimizer's averages from one of its size.
        same_size = [expert.id for expert in old.experts if expert.size == new.expert(change.ids[0]).size]
        sources[change.ids[0]] = change.parents or (same_size[0],)
    elif change.kind == "merged":
        sources[change.ids[0]] = change.parents
    return sources


def _expert_tensors(bank: ExpertBank, row: int, surgery: Surgery) -> ExpertTensors:
    """Return an expert's weights and optimizer state, as views."""
    tensors: ExpertTensors = {}
    for group, role, stack in bank.stacks():
        if row not in group.rows:
            continue
        place = group.rows.index(row)
        tensors["", role] = stack.detach()[place]
        for slot in surgery.spec.slots_of(role):
            value = surgery.optimizer.state[stack][slot.name]
            tensors[slot.name, role] = value if slot.is_scalar else value[place]
    return tensors


def _build_bank(
    before: ExpertBank,
    structure: LayerStructure,
    rank: int,
    tensors: Mapping[int, ExpertTensors],
    surgery: Surgery,
) -> ExpertBank:
    """Build a bank of this host's experts from their tensors, by row, and set the optimizer's state."""
    with without_memory():
        bank = before.with_experts(structure.sizes, structure.ids, structure.held(rank))
    for group, role, _ in list(bank.stacks()):
        weights = torch.stack([tensors[row]["", role] for row in group.rows])
        stack = bank.set_stack(group, role, weights, trains=role not in surgery.spec.frozen)
        state = surgery.spec.values_of(role)
        for slot in surgery.spec.slots_of(role):
            parts = [tensors[row][slot.name, role] for row in group.rows]
            state[slot.name] = parts[0].clone() if slot.is_scalar else torch.stack(parts)
        if state:
            surgery.optimizer.state[stack] = state
    return bank


@torch.no_grad()
def restructure(layers: Sequence[RoutedExperts], structures: Sequence[LayerStructure]) -> None:
    """Give layers that were just built the experts of a saved structure, before the model is placed.

    Their weights are not initialised: a checkpoint or a snapshot fills them."""
    for layer, structure in zip(layers, structures, strict=True):
        num_experts = len(structure.experts)
        layer.load_E = layer.load_E.new_zeros(num_experts)
        before = layer.bank
        layer.bank = before.with_experts(structure.sizes, structure.ids)
        _keep_types(before, layer.bank)
        if isinstance(layer, MoELayer):
            _restructure_gate(layer, num_experts)
        # Not placed yet: this process has all experts, each once.
        layer.use_structure(structure.on_hosts([0] * num_experts))


def _keep_types(before: ExpertBank, bank: ExpertBank) -> None:
    """Give the parameters of a bank the types of another one, and freeze those that were frozen."""
    stack_of_role = {role: stack for _, role, stack in before.stacks()}
    for _, role, stack in bank.stacks():
        stack.data = stack.data.to(stack_of_role[role].dtype)
        stack.requires_grad_(stack_of_role[role].requires_grad)


def _restructure_gate(layer: MoELayer, num_experts: int) -> None:
    gate = layer.gate
    before = gate.weight_ED
    zeros = before.new_zeros(num_experts, before.shape[1])
    gate.weight_ED = nn.Parameter(zeros, requires_grad=before.requires_grad)
    gate.bias_E = gate.bias_E.new_zeros(num_experts)
    if layer.statistics is not None:
        layer.statistics = ExpertStatistics(num_experts, layer.bank.width)
    follow_number(layer, num_experts)
