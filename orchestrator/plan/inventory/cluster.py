"""What a cluster has, as plain values: the nodes that Ray counts, or this machine alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import ResourceError
from orchestrator.plan.inventory.hardware import Gpu, Inventory

HERE = "127.0.0.1"


@dataclass(frozen=True)
class Node:
    """One machine of a cluster. ``cpus`` and ``gpus`` are what Ray may hand out there, ``cores``
    what the machine has."""

    address: str
    cpus: int
    gpus: int
    cores: int


@dataclass(frozen=True)
class Cluster:
    """The machines a run may use. ``joined``: it ran before us, so its slots are what they are;
    one that we start is ours to declare. ``most_gpus`` and ``most_cpus`` are what an autoscaler
    may reach; None: what is there is all there will be."""

    nodes: tuple[Node, ...]
    joined: bool
    most_gpus: int | None = None
    most_cpus: int | None = None

    @classmethod
    def of(cls, inventory: Inventory, devices: Sequence[int] = ()) -> Cluster:
        """This machine alone, with all its GPUs or those of ``--devices``."""
        return cls(
            (Node(HERE, inventory.cores, len(chosen_gpus(inventory, devices)), inventory.cores),),
            joined=False,
        )

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def cpus(self) -> int:
        return sum(node.cpus for node in self.nodes)

    @property
    def autoscaling(self) -> bool:
        return self.most_gpus is not None or self.most_cpus is not None

    @property
    def reachable_gpus(self) -> int:
        """GPUs there are, or will be once the autoscaler has brought all it may."""
        return max(self.gpus, self.most_gpus or 0)

    @property
    def reachable_cpus(self) -> int:
        return max(self.cpus, self.most_cpus or 0)

    def workers_on_node(self, workers: int, on_gpu: bool) -> int:
        """The most workers that share a node's cores and memory: all on our own machine; elsewhere
        as many as the node has GPUs, and on CPUs an even part, for they are spread over the
        nodes."""
        if not self.joined or not self.nodes:
            return workers
        if on_gpu:
            return max(1, min(workers, max((node.gpus for node in self.nodes), default=0) or workers))
        return -(-workers // len(self.nodes))

    def text(self, kind: str) -> str:
        """Its ``GPUs`` or ``CPUs`` for messages: ``the cluster has 6 GPUs (2 nodes: 4 + 2)``."""
        counts = [node.gpus if kind == "GPUs" else node.cpus for node in self.nodes]
        whole = f"{sum(counts)} {kind if sum(counts) != 1 else kind[:-1]}"
        if not self.joined:
            return f"this machine has {whole}"
        nodes = f"{len(counts)} node{'s' * (len(counts) != 1)}"
        each = (
            f" × {counts[0]}"
            if len(set(counts)) == 1
            else f": {' + '.join(map(str, counts))}"
            if counts
            else ""
        )
        return f"the cluster has {whole} ({nodes}{each})"


def chosen_gpus(inventory: Inventory, devices: Sequence[int]) -> tuple[Gpu, ...]:
    """The GPUs that ``--devices`` names, in its order; all of them where it is left out."""
    if not devices:
        return inventory.gpus
    found = {gpu.index: gpu for gpu in inventory.gpus}
    missing = [index for index in devices if index not in found]
    if missing:
        raise ResourceError(_missing(devices, missing, inventory))
    return tuple(found[index] for index in devices)


def _missing(devices: Sequence[int], missing: Sequence[int], inventory: Inventory) -> str:
    asked, count = ",".join(map(str, devices)), len(inventory.gpus)
    there = f"this machine has {count} GPU{'s' * (count != 1)}" + (
        f", counted from 0 to {count - 1}" if count > 1 else ""
    )
    why = f": {inventory.gpu_error}" if not count and inventory.gpu_error else ""
    number = (
        f"; for a number of GPUs use --workers {devices[0]}"
        if len(devices) == 1 and 0 < devices[0] <= count
        else ""
    )
    named = ", ".join(map(str, missing))
    instead = "Choose among those" if count else "Leave it out"
    return f"--devices {asked} names GPU {named}, but {there}{why}. {instead}{number}, or see 'orchestrator check'"
