"""Costs of experts on hosts: the structure of a layer and its loads as a problem in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experts.placement.division import Shares
from experts.placement.placement import ExpertCost, HostFacts
from experts.placement.problem import Problem
from experts.rebalance.load_history import Loads
from experts.structure import Expert, LayerStructure
from experts.tokens.routes import split_in_buckets


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the experts of a layer, per unit of their hidden size."""

    row_flops: float
    """FLOPs of a row, forward and backward."""
    state_bytes: float
    """Bytes of weights, gradients and optimizer state."""
    gradient_bytes: float

    def expert(self, size: int, tokens: float) -> ExpertCost:
        """Return the cost of an expert that gets so many tokens per step."""
        return ExpertCost(size * self.row_flops * tokens, size * self.state_bytes)


@dataclass(frozen=True)
class Cluster:
    """The hosts and the link between them."""

    hosts: tuple[HostFacts, ...]
    bandwidth: float
    """Bytes per second that a host sends or receives."""
    update_bandwidth: float = math.inf
    """Bytes per second of weights, gradients and optimizer state that a host's optimizer updates."""
    change_seconds: float = 0.0
    """The time of a change of one layer beside the bytes that it sends."""

    def __post_init__(self) -> None:
        if not self.hosts or not self.bandwidth > 0:
            raise ValueError(
                f"a cluster has {len(self.hosts)} hosts and a link of {self.bandwidth} bytes per second; "
                f"it needs at least one host and a bandwidth above 0"
            )

    def without(self, used: Sequence[float]) -> Cluster:
        """Return the cluster with the memory that ``used`` bytes of each host leave."""
        pairs = zip(self.hosts, used, strict=True)
        hosts = tuple(replace(host, memory=max(0.0, host.memory - taken)) for host, taken in pairs)
        return replace(self, hosts=hosts)


def balance_problem(layer: LayerStructure, loads: Loads, costs: LayerCosts, cluster: Cluster) -> Problem:
    """Return the problem of a layer under some loads, in tokens per step of each expert."""
    experts = [costs.expert(e.size, tokens) for e, tokens in zip(layer.experts, loads, strict=True)]
    return Problem(
        work=[expert.work for expert in experts],
        bytes=[expert.bytes for expert in experts],
        speed=[host.speed for host in cluster.hosts],
        memory=[host.memory for host in cluster.hosts],
        sync_seconds=[expert.size * costs.gradient_bytes / cluster.bandwidth for expert in layer.experts],
        update_seconds=[expert.bytes / cluster.update_bandwidth for expert in experts],
    )


def shares_of(layer: LayerStructure, num_hosts: int) -> Shares:
    """Return the shares that the route tables give to the copies of each expert."""
    return tuple(_expert_shares(expert, num_hosts) for expert in layer.experts)


def with_shares(layer: LayerStructure, shares: Shares, num_hosts: int) -> LayerStructure:
    """Return a layer with these hosts and shares, in whole buckets."""
    pairs = zip(layer.experts, shares, strict=True)
    return replace(layer, experts=tuple(_divided(expert, copies, num_hosts) for expert, copies in pairs))


def _expert_shares(expert: Expert, num_hosts: int) -> tuple[tuple[int, float], ...]:
    if len(expert.hosts) == 1:
        return ((expert.hosts[0], 1.0),)
    buckets = split_in_buckets(expert.split or (1,) * len(expert.hosts), num_hosts)
    total = sum(buckets)
    return tuple((host, count / total) for host, count in zip(expert.hosts, buckets, strict=True))


def _divided(expert: Expert, copies: Sequence[tuple[int, float]], num_hosts: int) -> Expert:
    hosts = tuple(host for host, _ in copies)
    if len(hosts) == 1:
        is_there = hosts == expert.hosts and not expert.split
        return expert if is_there else replace(expert, hosts=hosts, split=())
    return replace(expert, hosts=hosts, split=split_in_buckets([share for _, share in copies], num_hosts))


def used_memory(layers: Sequence[LayerStructure], costs: Sequence[LayerCosts], num_hosts: int) -> list[float]:
    """Return the bytes of the experts on each host."""
    used = [0.0] * num_hosts
    for layer, layer_costs in zip(layers, costs, strict=True):
        for expert in layer.experts:
            for host in expert.hosts:
                used[host] += expert.size * layer_costs.state_bytes
    return used
