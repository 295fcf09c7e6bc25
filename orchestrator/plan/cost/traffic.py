"""Seconds of the communication of a step: gradient all-reduces and the token exchange. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from experts.copy_costs import piece_count, ring_factor
from orchestrator.plan.cost.machine import Link, Machine, Parallelism
from orchestrator.plan.cost.ops import MessageOp, MicroBatchOps
from orchestrator.plan.estimate import ShardingForm

_BUCKET_BYTES = 25 * 2**20  # as in DDP
_BACKWARD_SHARE = 2 / 3  # of the arithmetic of a micro-batch
_PEER_S = 0.5e-6  # to hand one more message to a link that is busy with others
_SMALL_ALL_REDUCES = 1  # next to the gradients: counts and losses of a step
_SMALL_BYTES = 512
_GATHERS: Mapping[ShardingForm, int] = {"none": 0, "experts": 0, "zero2": 1, "zero3": 2}
"""Times that a micro-batch gathers sharded parameters: before the forward pass, and before the backward."""


def traffic_seconds(
    ops: MicroBatchOps, machine: Machine, parallelism: Parallelism, compute_s: float
) -> dict[str, float]:
    """Return the seconds of all-reduces, of the token exchange, of the gathering of sharded parameters,
    and (negative) of their overlap with computation.

    ``compute_s`` is the time of the step without communication. On CPUs nothing overlaps, because
    messages take the same cores.
    """
    devices = parallelism.devices
    first_bytes = parallelism.strategy_facts.first_bucket_bytes
    other_buckets = math.ceil(max(0.0, ops.gradient_bytes - first_bytes) / _BUCKET_BYTES)
    buckets = max(1, (first_bytes > 0) + other_buckets)
    bucket_s = all_reduce_seconds(ops.gradient_bytes / buckets, machine, devices)
    small_s = _SMALL_ALL_REDUCES * all_reduce_seconds(_SMALL_BYTES, machine, devices)
    gathers = _GATHERS[parallelism.sharding] * parallelism.micro_batches
    if gathers:  # each micro-batch reduces and scatters gradients, which is half of an all-reduce
        bucket_s *= parallelism.micro_batches / 2
    gradients = buckets * bucket_s + small_s + copies_seconds(ops.expert_gradient_bytes, machine, parallelism)
    gather_s = gathers * all_reduce_seconds(ops.replicated_bytes, machine, devices) / 2
    exchange = parallelism.micro_batches * sum(
        exchange_seconds(message, machine, devices // parallelism.expert_replicas) * message.times
        for message in ops.messages
    )
    overlap = 0.0
    if machine.device.asynchronous:
        backward_s = _BACKWARD_SHARE * compute_s / parallelism.micro_batches
        # The last bucket is reduced after the backward pass.
        overlap = min((buckets - 1) * bucket_s, backward_s)
        if parallelism.chunks > 1:
            chunked_exchange = exchange * (parallelism.chunks - 1) / parallelism.chunks
            overlap += min(chunked_exchange, max(0.0, compute_s - overlap))
        # The next block's parameters are gathered while a block computes; the first block's are waited for.
        overlap += min(gather_s * (buckets - 1) / buckets, max(0.0, compute_s - overlap))
    return {"gradients": gradients, "exchange": exchange, "gathering": gather_s, "overlap": -overlap}


def all_reduce_seconds(size_bytes: float, machine: Machine, devices: int) -> float:
    """Return the seconds of an all-reduce: first within nodes, then between them, and back.

    The bandwidth is that of a ring, the latency that of a tree.
    """
    devices_per_node = min(devices, machine.per_node)
    nodes = math.ceil(devices / machine.per_node)
    within_nodes = _ring_seconds(size_bytes, machine.inner.sums, devices_per_node)
    return within_nodes + _ring_seconds(size_bytes, machine.outer.sums, nodes)


def _ring_seconds(size_bytes: float, link: Link, members: int) -> float:
    if members < 2:
        return 0.0
    latency_s = math.ceil(math.log2(members)) * link.latency_s
    return latency_s + 2 * (members - 1) / members * size_bytes / link.bytes_per_s


def copies_seconds(gradient_bytes: float, machine: Machine, parallelism: Parallelism) -> float:
    """Return the seconds in which the copies of a device's experts sum their gradients, piece by piece.

    A group has neighbouring devices, so that the copies are on other nodes where there are several."""
    replicas = parallelism.expert_replicas
    if replicas < 2 or not gradient_bytes:
        return 0.0
    near = parallelism.devices <= machine.per_node
    link = (machine.inner if near else machine.outer).exchange
    message_s = link.latency_s + (replicas - 2) * _PEER_S
    sent_s = ring_factor(replicas) * gradient_bytes / link.bytes_per_s
    return 2 * piece_count(gradient_bytes) * message_s + sent_s


def exchange_seconds(message: MessageOp, machine: Machine, devices: int) -> float:
    """Return the seconds of an all-to-all: the parts within the node and those between nodes run
    side by side."""
    if devices < 2:
        return 0.0
    near_peers = min(devices, machine.per_node) - 1
    far_peers = devices - 1 - near_peers
    near_s = _send_seconds(message.bytes, near_peers, devices, machine.inner.exchange)
    far_s = _send_seconds(message.bytes, far_peers, devices, machine.outer.exchange)
    return max(near_s, far_s) + (devices - 2) * _PEER_S


def _send_seconds(size_bytes: float, peers: int, devices: int, link: Link) -> float:
    """Return the seconds to send these peers their part of the bytes for all other devices."""
    if not peers:
        return 0.0
    return link.latency_s + size_bytes * peers / (devices - 1) / link.bytes_per_s
