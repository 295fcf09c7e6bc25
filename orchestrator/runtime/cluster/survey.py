"""What a cluster has: nodes, slots, and the hardware of the nodes that will train."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.plan.inventory.cluster import Cluster, Node
from orchestrator.plan.inventory.hardware import Inventory, inventory
from orchestrator.runtime.cluster.session import answers
from orchestrator.runtime.ray_internals import autoscaler_limits

_SURVEY_SECONDS = 60


def survey(found: Inventory, joined: bool) -> tuple[Cluster, Inventory]:
    """The cluster, and the inventory of its weakest training node. ``found`` is this machine; other nodes with GPUs are
    asked for theirs."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    with_gpus = [node for node in alive if node["Resources"].get("GPU", 0) >= 1]
    elsewhere = [node for node in with_gpus if node["NodeID"] != here]
    inventories = {here: found} | _ask(elsewhere)
    most = _reachable(alive) if joined else {}
    nodes = tuple(_node(node, inventories.get(node["NodeID"])) for node in alive)
    cluster = Cluster(nodes, joined, most_gpus=most.get("GPU"), most_cpus=most.get("CPU"))
    trained_on = [inventories[node["NodeID"]] for node in with_gpus if node["NodeID"] in inventories] or [
        found
    ]
    return cluster, min(trained_on, key=lambda one: (not one.gpus, one.min_gpu_memory))


def _node(node: dict[str, Any], known: Inventory | None) -> Node:
    resources = node["Resources"]
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    return Node(node["NodeManagerAddress"], cpus, gpus, known.cores if known else cpus)


def _ask(nodes: list[dict[str, Any]]) -> dict[str, Inventory]:
    """The inventories of other nodes, from a short task on each."""
    if not nodes:
        return {}
    task = ray.remote(num_cpus=0, max_retries=0)(inventory)
    asked = {
        node["NodeID"]: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    }
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_SURVEY_SECONDS)
    return {name: ray.get(reference) for name, reference in asked.items() if reference in done}


def _reachable(alive: list[dict[str, Any]]) -> dict[str, int]:
    """What an autoscaler may bring the cluster to, by kind; empty where there is none."""
    limits = autoscaler_limits()
    if not limits:
        return {}
    there = {kind: sum(int(node["Resources"].get(kind, 0)) for node in alive) for kind in ("CPU", "GPU")}
    return {kind: max(there[kind], int(limits.get(kind, 0))) for kind in there}


def resources_now() -> dict[str, int]:
    """Whole GPUs and CPUs of the nodes that are alive and answer: Ray takes half a minute to miss one that was killed."""
    alive = [
        node
        for node in ray.nodes()
        if node["Alive"] and answers(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    ]
    return {kind: sum(int(node["Resources"].get(kind, 0)) for node in alive) for kind in ("CPU", "GPU")}
