"""The form of the optimizer's state of experts, which all hosts agree on before experts change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from experts.model import initialise_experts
from experts.moe.bank import ExpertBank, ExpertForm
from experts.structure import Change
from experts.surgery.surgery import Surgery, change_layer
from harness.hosts.ranks import run_ranks
from harness.moe.surgery import WIDTH, make, train_step
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.train.evolution.execution import state_spec
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.optim.adamw8bit import AdamW8bit
from orchestrator.train.optim.named_optimizers import build_named_optimizer

KINDS = ["adamw", "sgd", "muon", "adamw8bit"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_role_keeps_its_own_state_when_experts_change(kind: str) -> None:
    """Muon trains matrices with one tensor of state, and biases as AdamW does."""
    model, _ = make((6, 5, 6), 1, steps=0)
    form = ExpertForm(bias=True)
    model.moe.bank = ExpertBank(WIDTH, (6, 5, 6), form)
    initialise_experts(model.moe.bank, "moe.bank", form.roles, 0)
    model.double()
    optimizer = build_named_optimizer(model, Config.of(optimizer=kind).optim, fused=False)
    train_step(model, optimizer, 0)
    before = {name: optimizer.state[stack] for name, stack in model.moe.bank.named_parameters()}
    spec = state_spec(model.moe, optimizer, World.single_process())
    change = Change("moved", 0, (0,), "a test", hosts=((0,),))
    change_layer(model, model.moe, change, Surgery(optimizer, spec, seed=0, step=1))
    for name, stack in model.moe.bank.named_parameters():
        state = optimizer.state[stack]
        assert state is not before[name], "the stack is a new one"
        assert state.keys() == before[name].keys()
        assert all(torch.equal(state[slot], value) for slot, value in before[name].items())
    train_step(model, optimizer, 1)


def test_codes_of_merged_experts_are_decoded_added_and_encoded() -> None:
    model, _ = make((6, 5, 6), 1, steps=0)
    optimizer = build_named_optimizer(model, Config.of(optimizer="adamw8bit").optim, fused=False)
    assert isinstance(optimizer, AdamW8bit)
    train_step(model, optimizer, 0)
    before = {
        role: optimizer.expanded(optimizer.state[stack])
        for group, role, stack in model.moe.bank.stacks()
        if group.hidden == 6
    }
    gate = optimizer.expanded(optimizer.state[model.moe.gate.weight_ED])
    spec = state_spec(model.moe, optimizer, World.single_process())
    change = Change("merged", 0, (3,), "a test", (0, 2), ((0,),), weights=(1.0, 3.0))
    change_layer(model, model.moe, change, Surgery(optimizer, spec, seed=0, step=1))
    for group, role, stack in model.moe.bank.stacks():
        if group.hidden == 6:
            state = optimizer.state[stack]
            # Experts with tokens of their own: both averages add up.
            exact = optimizer.compressed(
                {slot: before[role][slot].sum(0, keepdim=True) for slot in ("exp_avg", "exp_avg_sq")}
            )
            assert all(torch.equal(state[slot], value) for slot, value in exact.items())
    roots = gate["exp_avg_sq"].sqrt()
    found = optimizer.expanded(optimizer.state[model.moe.gate.weight_ED])["exp_avg_sq"].sqrt()
    rows = {1: roots[1], 3: roots[0] + roots[2]}
    wanted = torch.stack([rows[expert.id] for expert in model.moe.structure.experts])
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.01 * float(wanted.max()))
    train_step(model, optimizer, 1)


def error_on_host(rank: int, size: int, store: str) -> str:
    model, _ = make((6, 6), 1, steps=0)
    parameters: list[nn.Parameter] = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    optimizer = torch.optim.SGD(parameters if rank else groups, lr=0.1)
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 30) as world:
        with pytest.raises(UserError) as caught:
            state_spec(model.moe, optimizer, world)
        return str(caught.value)


def test_hosts_with_different_parameter_groups_are_refused_on_all() -> None:
    first, second = run_ranks(error_on_host, 2)
    assert first == second
    assert "has 1 and 2 parameter groups on different hosts" in first
