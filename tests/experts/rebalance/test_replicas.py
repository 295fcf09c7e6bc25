"""Static replicas: each group holds every expert once, and its tokens stay in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experts.copies import CopiedGradients
from experts.model import attach, place_structure
from experts.moe.context import MoEContext
from experts.moe.layer import MoELayer
from experts.rebalance.replicas import group_count, replica_placement
from experts.structure import Change, LayerStructure, changed
from experts.tokens.exchange import GroupExchange
from experts.tokens.routes import route_table
from harness.hosts.ranks import run_ranks
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 7))
def test_tokens_stay_in_their_group_and_each_group_holds_each_expert_once(
    group_size: int, replicas: int, num_experts: int
) -> None:
    num_hosts = group_size * replicas
    placed = [expert % group_size for expert in range(num_experts)]
    (layer,) = replica_placement(
        [LayerStructure.initial("moe", [8] * num_experts, placed)], num_hosts, replicas
    )
    for rank in range(num_hosts):
        group = range(rank // group_size * group_size, (rank // group_size + 1) * group_size)
        held = [index for host in group for index in layer.held(host)]
        assert sorted(held) == list(range(num_experts))
        assert {host for row in route_table(layer, rank, num_hosts) for host in row} <= set(group)


def test_one_replica_changes_nothing() -> None:
    layers = (LayerStructure.initial("moe", [8, 8], [0, 1]),)
    assert replica_placement(layers, 2, 1) == layers


def test_a_number_of_replicas_that_does_not_divide_the_hosts_is_refused() -> None:
    message = "6 hosts cannot be divided into 4 groups .* --expert-replicas to one of 1, 2, 3, 6"
    with pytest.raises(ValueError, match=message):
        replica_placement([LayerStructure.initial("moe", [8])], 6, 4)


def test_experts_outside_the_first_group_are_refused() -> None:
    layer = LayerStructure.initial("moe", [8, 8], [0, 2])
    with pytest.raises(ValueError, match=r"expert 1 of moe is on hosts \[2\]; .* on one host below 2"):
        replica_placement([layer], 4, 2)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 7))
def test_the_number_of_groups_is_found_again(group_size: int, replicas: int, num_experts: int) -> None:
    placed = [expert % group_size for expert in range(num_experts)]
    layers = [LayerStructure.initial("moe", [8] * num_experts, placed)]
    num_hosts = group_size * replicas
    assert group_count(replica_placement(layers, num_hosts, replicas), num_hosts) == replicas


def test_copies_with_shares_of_their_own_are_no_groups() -> None:
    change = Change("copied", 0, (0, 1), "", hosts=((0, 2), (1, 3)), splits=((3, 1), (1, 1)))
    layer = changed(LayerStructure.initial("moe", [8, 8], [0, 1]), change, 0)
    assert group_count([layer], 4) == 1
    assert group_count([LayerStructure.initial("moe", [8, 8], [0, 1])], 4) == 1


def layer_on(*hosts: tuple[int, ...]) -> LayerStructure:
    """A layer whose experts are on these hosts, with equal shares."""
    layer = LayerStructure.initial("moe", [8] * len(hosts))
    experts = [replace(expert, hosts=own) for expert, own in zip(layer.experts, hosts, strict=True)]
    return replace(layer, experts=tuple(experts))


@pytest.mark.parametrize(
    ("layers", "num_hosts", "groups"),
    [
        ([layer_on((0, 2), (1, 3))], 4, 2),
        ([layer_on((0, 3), (1, 2))], 4, 1),
        ([layer_on((0, 2), (1, 3), (0, 1))], 4, 1),
        ([layer_on((0, 2)), layer_on((1, 3))], 4, 2),
        ([layer_on((0, 2)), layer_on((1, 2))], 4, 1),
        ([layer_on((0, 2)), layer_on((1,))], 4, 1),
        ([layer_on((0, 1), (0, 1))], 3, 1),
        ([layer_on()], 4, 1),
        ([], 4, 1),
    ],
    ids=[
        "two groups",
        "other hosts",
        "one expert on other hosts",
        "two layers",
        "another layer on other hosts",
        "another layer without copies",
        "hosts that groups do not divide",
        "no experts",
        "no layers",
    ],
)
def test_only_copies_of_all_experts_of_all_layers_are_groups(
    layers: list[LayerStructure], num_hosts: int, groups: int
) -> None:
    assert group_count(layers, num_hosts) == groups


def backward_on_host(rank: int, size: int, store: str) -> bool:
    """Return whether the gradients of a step are those of all groups, summed in the order of hosts."""
    with process_group_world(file_store(store, size), rank, size, torch.device("cpu"), "gloo", 60) as world:
        assert world.group is not None
        torch.manual_seed(0)
        layer = MoELayer(8, [6, 6, 4], 2)
        exchange = GroupExchange(world.group)
        attach(layer, MoEContext(exchange))
        experts = [LayerStructure.initial("", layer.bank.sizes)]
        place_structure(layer, replica_placement(experts, size, size), rank, size)
        torch.manual_seed(rank)
        layer(torch.randn(40, 8))[0].square().sum().backward()
        stacks = list(layer.bank.parameters())
        gradients = [stack.grad.clone() for stack in stacks if stack.grad is not None]
        CopiedGradients([layer], exchange).add_up()
        for stack, own in zip(stacks, gradients, strict=True):
            of_hosts = own.new_empty(size * own.numel())
            world.group.all_gather(of_hosts, own.view(-1)).wait()
            expected = torch.zeros_like(own)
            for gradient in of_hosts.split(own.numel()):
                expected += gradient.view_as(own)
            if stack.grad is None or not torch.equal(stack.grad, expected):
                return False
        return True


def test_the_gradients_of_groups_are_summed_in_the_order_of_hosts() -> None:
    assert run_ranks(backward_on_host, 4) == [True] * 4
