"""Groups of expert hosts for any number of hosts, and the memory that a host has for experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fakes.inventories import machine, model
from orchestrator.config.settings import Config
from orchestrator.plan.host_groups import expert_memory, groups_on
from orchestrator.plan.planning import Plan, plan

FACTS = model(experts=8, expert_parameters=800_000, moe_layers=1, expert_weights=((100_000,) * 8,))
STATE_BYTES = 16 * 100_000  # of one expert


def planned(workers: int, replicas: int, room_for: int | None = None) -> tuple[Config, Plan]:
    """Return a plan, with room for so many experts on each host."""
    config = Config.of(parallel_strategy="expert_parallel", workers=workers, expert_replicas=replicas)
    chosen = plan(config, machine(), FACTS)
    limit = None
    if room_for is not None:
        held = -(-FACTS.experts // (workers // replicas))
        limit = chosen.memory.total + (room_for - held) * STATE_BYTES
    return config, replace(chosen, memory=replace(chosen.memory, limit=limit))


@pytest.mark.parametrize(
    ("workers", "replicas", "hosts", "groups"),
    [(4, 2, 4, 2), (4, 2, 3, 1), (4, 2, 2, 2), (4, 2, 1, 1), (6, 3, 5, 1), (6, 3, 4, 2), (8, 4, 6, 3)],
)
def test_the_largest_number_of_groups_that_divides_the_hosts(
    workers: int, replicas: int, hosts: int, groups: int
) -> None:
    assert groups_on(*planned(workers, replicas), FACTS, hosts).value == groups


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_groups_always_divide_the_hosts_and_are_never_more_than_planned(
    group_size: int, replicas: int, data: st.DataObject
) -> None:
    workers = group_size * replicas
    hosts = data.draw(st.integers(1, workers))
    groups = groups_on(*planned(workers, replicas), FACTS, hosts).value
    assert hosts % groups == 0
    assert 1 <= groups <= replicas
    if hosts == workers:
        assert groups == replicas, "all hosts are back"


def test_smaller_groups_are_taken_only_if_their_experts_fit() -> None:
    """Four of eight hosts in two groups: a host would hold four experts where it held two."""
    roomy = groups_on(*planned(8, 2, room_for=4), FACTS, 4)
    assert roomy.value == 2
    assert "up to 4 of 8 experts of a layer, 2 as planned" in roomy.reason
    full = groups_on(*planned(8, 2, room_for=3), FACTS, 4)
    assert full.value == 1
    assert full.reason == (
        "in 2 groups a host would need 6.1 MiB for experts and has 4.6 MiB; "
        "a host holds up to 2 of 8 experts of a layer, 2 as planned"
    )


def test_one_group_is_left_where_nothing_fits() -> None:
    assert groups_on(*planned(4, 2, room_for=4), FACTS, 1).value == 1


def test_the_reason_names_the_hosts_and_the_experts_of_one() -> None:
    choice = groups_on(*planned(4, 2), FACTS, 3)
    assert choice.reason == (
        "2 groups of equal size cannot be made of 3 hosts; "
        "a host holds up to 3 of 8 experts of a layer, 4 as planned"
    )


def test_memory_for_experts_is_the_limit_less_the_dense_part() -> None:
    """Three hosts of five experts: the estimate counts two of them on a host."""
    config = Config.of(parallel_strategy="expert_parallel", workers=3)
    facts = model(experts=5, expert_parameters=500, moe_layers=1, expert_weights=((100,) * 5,))
    chosen = plan(config, machine(), facts)
    dense_bytes = chosen.memory.total - 16 * 200
    assert expert_memory(dense_bytes + 7.0, chosen, facts) == pytest.approx(7.0)
    assert expert_memory(dense_bytes - 7.0, chosen, facts) == 0.0
    assert expert_memory(None, chosen, facts) == float("inf")
    no_experts = model(experts=0, expert_parameters=0)
    assert expert_memory(chosen.memory.total + 5, chosen, no_experts) == pytest.approx(5)
