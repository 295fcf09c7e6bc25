"""The resources of a cluster: its nodes, their slots, and the hardware of the nodes that will train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.plan.inventory.cluster import Cluster, Node
from orchestrator.plan.inventory.hardware import Inventory, inventory
from orchestrator.runtime.cluster.session import answers
from orchestrator.runtime.ray_internals import autoscaler_limits

_ANSWER_TIMEOUT_S = 60
_KINDS = ("CPU", "GPU")

RayNode = dict[str, Any]
"""A node as ``ray.nodes()`` describes it."""


def survey(local: Inventory, joined: bool) -> tuple[Cluster, Inventory]:
    """Return the cluster, and the inventory of its weakest training node.

    ``local`` is the inventory of this machine; other nodes with GPUs are asked for theirs. The free
    memory is that of the training node that has the least, which may be another one.
    """
    node_id = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    with_gpus = [node for node in alive if node["Resources"].get("GPU", 0) >= 1]
    remote = [node for node in with_gpus if node["NodeID"] != node_id]
    asked = {node["NodeID"]: found for node, found in ask_nodes(remote, inventory)}
    inventories: dict[str, Inventory] = {node_id: local} | asked
    limits = _reachable_resources(alive) if joined else {}
    nodes = tuple(_node(node, inventories.get(node["NodeID"])) for node in alive)
    cluster = Cluster(nodes, joined, most_gpus=limits.get("GPU"), most_cpus=limits.get("CPU"))
    training = [inventories[node["NodeID"]] for node in with_gpus if node["NodeID"] in inventories]
    weakest = min(training or [local], key=lambda entry: (not entry.gpus, entry.min_gpu_memory))
    ram_free = cluster.ram_free
    return cluster, weakest if ram_free is None else replace(weakest, ram_free=ram_free)


def _node(node: RayNode, known: Inventory | None) -> Node:
    cpus = int(node["Resources"].get("CPU", 0))
    gpus = int(node["Resources"].get("GPU", 0))
    cores = known.cores if known else cpus
    object_store = node["Resources"].get("object_store_memory")
    memory = node["Resources"].get("memory")
    ram_free = known.ram_free if known else None
    if known is None and memory is not None:
        # As Ray saw it when the node started: what it leaves to workers, and its object store.
        ram_free = int(memory + (object_store or 0))
    return Node(
        node["NodeManagerAddress"],
        cpus,
        gpus,
        cores,
        int(object_store) if object_store is not None else None,
        ram_free,
    )


def ask_nodes(
    nodes: Iterable[RayNode], function: Callable[..., Any], *arguments: str
) -> list[tuple[RayNode, Any]]:
    """Return the answer of each node to a function, from a short task on it.

    Nodes that do not answer are left out."""
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    calls: dict[Any, RayNode] = {}
    for node in nodes:
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        calls[task.options(scheduling_strategy=on_node).remote(*arguments)] = node
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_TIMEOUT_S) if calls else ([], [])
    answers: list[tuple[RayNode, Any]] = []
    for call in done:
        try:
            answers.append((calls[call], ray.get(call)))
        except RayTaskError:
            raise
        except RayError:
            continue  # the node has been lost since; no worker will be placed on it
    return answers


def _reachable_resources(alive: Iterable[RayNode]) -> dict[str, int]:
    """Return the CPUs and GPUs that an autoscaler may bring the cluster to; empty without an autoscaler."""
    limits = autoscaler_limits()
    if not limits:
        return {}
    present = _sum_resources(alive)
    return {kind: max(present[kind], int(limits.get(kind, 0))) for kind in _KINDS}


def resources_now() -> dict[str, int]:
    """Return the CPUs and GPUs of the nodes that are alive and answer.

    Ray takes half a minute to notice that a node was killed; a connection to its raylet fails at
    once.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    answering = [node for node in alive if answers(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")]
    return _sum_resources(answering)


def _sum_resources(nodes: Iterable[RayNode]) -> dict[str, int]:
    nodes = list(nodes)
    return {kind: sum(int(node["Resources"].get(kind, 0)) for node in nodes) for kind in _KINDS}
