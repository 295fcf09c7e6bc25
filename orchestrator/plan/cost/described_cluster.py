"""A cluster that need not exist as the plan sees one: nodes, GPUs, and assumed cores and memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from orchestrator.plan.cost.cluster_spec import MAX_DEVICES, ClusterSpec
from orchestrator.plan.cost.devices import known_gpu
from orchestrator.plan.inventory.cluster import Cluster, Node
from orchestrator.plan.inventory.gpus import Gpu
from orchestrator.plan.inventory.hardware import Inventory

CORES_PER_GPU = 16
RAM_PER_GPU_MEMORY = 2
"""Assumed of a node: cores for each GPU, and RAM as a multiple of the memory of its GPUs."""
_MULTIPROCESSORS = 100
_USUAL_GPUS_PER_NODE = 8


def inventory_of(spec: ClusterSpec) -> Inventory:
    """Return a node of the cluster."""
    sheet = known_gpu(spec.gpu)
    memory = int(sheet.memory_gb * 1e9)
    gpus = tuple(
        Gpu(index, sheet.names[0], memory, memory, sheet.capability, _MULTIPROCESSORS)
        for index in range(spec.gpus)
    )
    ram = RAM_PER_GPU_MEMORY * memory * spec.gpus
    return Inventory(
        gpus=gpus,
        cores=CORES_PER_GPU * spec.gpus,
        ram_total=ram,
        ram_free=ram,
        cpu_name="assumed",
        architecture="assumed",
        cpu_bf16=False,
        driver=None,
        versions={},
        gpu_error=None,
        disk_free=ram,
    )


def cluster_of(spec: ClusterSpec) -> Cluster | None:
    """Return the nodes of the cluster; None for one GPU, on which one process trains."""
    if spec.devices == 1:
        return None
    cores = CORES_PER_GPU * spec.gpus
    nodes = [Node(f"node {number}", cores, spec.gpus, cores) for number in range(spec.nodes)]
    return Cluster(tuple(nodes), joined=True, described=True)


def larger_clusters(spec: ClusterSpec) -> Iterator[ClusterSpec]:
    """Yield clusters of the same GPUs with more of them: first on one node, then on more nodes."""
    per_node = max(_USUAL_GPUS_PER_NODE, spec.gpus)
    if spec.nodes == 1:
        for gpus in range(spec.gpus + 1, per_node + 1):
            yield replace(spec, gpus=gpus)
    nodes = spec.nodes + 1
    while nodes * per_node <= MAX_DEVICES:
        yield replace(spec, nodes=nodes, gpus=per_node)
        nodes += max(1, nodes // 8)  # coarser and coarser: a rough answer for large clusters
