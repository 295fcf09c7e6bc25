"""The host of each token of a copied expert.

A rank numbers its tokens; the hash of a token's number is its bucket. The table of a rank gives the host
for each expert and bucket. It is computed from the structure of the layer alone, in whole numbers, so all
hosts agree on it without a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experts.structure import Expert, LayerStructure

_BUCKET_BITS = 6
BUCKETS = 2**_BUCKET_BITS

RouteTable = tuple[tuple[int, ...], ...]
"""The host of each expert and bucket."""


def route_table(layer: LayerStructure, rank: int, num_hosts: int) -> RouteTable:
    """Return the hosts that a rank sends its tokens to.

    The copies of an expert get the shares of its ``split``. A rank keeps as many tokens as the share of
    its own copy allows. The others go to the copies in the order of ranks, so that neighbours, which
    are often on one node, share a copy."""
    if not 0 <= rank < num_hosts:
        raise ValueError(f"rank {rank} does not exist; there are {num_hosts} hosts")
    return tuple(_hosts_of_buckets(expert, rank, num_hosts) for expert in layer.experts)


def split_in_buckets(weights: Sequence[float], num_hosts: int) -> tuple[int, ...]:
    """Divide all buckets of all ranks by weights: the largest remainders are rounded up."""
    total_buckets = BUCKETS * num_hosts
    total_weight = sum(weights)
    if not total_weight:
        weights = [1] * len(weights)
        total_weight = len(weights)
    whole = [int(weight * total_buckets // total_weight) for weight in weights]
    remainders = [
        weight * total_buckets - count * total_weight for weight, count in zip(weights, whole, strict=True)
    ]
    left = total_buckets - sum(whole)
    for copy in sorted(range(len(weights)), key=lambda copy: (-remainders[copy], copy))[:left]:
        whole[copy] += 1
    return tuple(whole)


def _hosts_of_buckets(expert: Expert, rank: int, num_hosts: int) -> tuple[int, ...]:
    if len(expert.hosts) == 1:
        return expert.hosts * BUCKETS
    weights = expert.split or (1,) * len(expert.hosts)
    quota = dict(zip(expert.hosts, split_in_buckets(weights, num_hosts), strict=True))
    kept = min(BUCKETS, quota.get(rank, 0))
    hosts = [rank] * kept
    for host, count in _sent(quota, rank, num_hosts):
        hosts += [host] * count
    return tuple(hosts[_reversed_bits(bucket)] for bucket in range(BUCKETS))


def _sent(quota: dict[int, int], rank: int, num_hosts: int) -> Iterator[tuple[int, int]]:
    """Yield the hosts, and numbers of buckets, that a rank sends tokens to.

    All buckets that no rank keeps lie in a row, by rank. The copies take them in that order."""
    own = [min(BUCKETS, quota.get(each, 0)) for each in range(num_hosts)]
    first = sum(BUCKETS - kept for kept in own[:rank])
    last = first + BUCKETS - own[rank]
    begin = 0
    for host, total in quota.items():
        end = begin + total - own[host]
        count = min(end, last) - max(begin, first)
        if count > 0:
            yield host, count
        begin = end


def _reversed_bits(bucket: int) -> int:
    """Spread the hosts over the buckets, so that the first few tokens go to all of them."""
    return int(f"{bucket:0{_BUCKET_BITS}b}"[::-1], 2)
