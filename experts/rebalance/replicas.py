"""Static copies of all experts: groups of hosts, each of which holds every expert once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experts.structure import Expert, LayerStructure


def replica_placement(
    layers: Sequence[LayerStructure], num_hosts: int, replicas: int
) -> tuple[LayerStructure, ...]:
    """Copy the experts of each layer to groups of neighbouring hosts.

    ``layers`` are placed on the hosts of one group, from 0. The copies have equal shares, so the route
    table of a rank names only the hosts of its own group."""
    if replicas < 1 or num_hosts % replicas:
        raise ValueError(
            f"{num_hosts} hosts cannot be divided into {replicas} groups of equal size; "
            f"set --expert-replicas to one of {_divisors(num_hosts)}"
        )
    group_size = num_hosts // replicas
    return tuple(
        replace(
            layer,
            experts=tuple(_copied(expert, group_size, replicas, layer.name) for expert in layer.experts),
        )
        for layer in layers
    )


def group_count(layers: Sequence[LayerStructure], num_hosts: int) -> int:
    """Return the number of groups that ``replica_placement`` has copied the experts to; 1 if it has not."""
    experts = [expert for layer in layers for expert in layer.experts]
    groups = len(experts[0].hosts) if experts else 1
    if num_hosts % groups:
        return 1
    step = num_hosts // groups
    is_copied = [expert.hosts == _group_hosts(expert.hosts[0], step, groups) for expert in experts]
    return groups if all(is_copied) and not any(expert.split for expert in experts) else 1


def _group_hosts(first: int, group_size: int, replicas: int) -> tuple[int, ...]:
    return tuple(group * group_size + first for group in range(replicas))


def _copied(expert: Expert, group_size: int, replicas: int, layer_name: str) -> Expert:
    if len(expert.hosts) != 1 or expert.hosts[0] >= group_size:
        raise ValueError(
            f"expert {expert.id} of {layer_name} is on hosts {list(expert.hosts)}; before it is copied to "
            f"{replicas} groups it must be on one host below {group_size}"
        )
    return replace(expert, hosts=_group_hosts(expert.hosts[0], group_size, replicas), split=())


def _divisors(count: int) -> str:
    return ", ".join(str(each) for each in range(1, count + 1) if count % each == 0)
