"""The nodes of a cluster as plain values: those that Ray counts, or this machine alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import ResourceError
from orchestrator.plan.inventory.gpus import Gpu
from orchestrator.plan.inventory.hardware import Inventory

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Node:
    """One machine of a cluster. ``cpus`` and ``gpus`` are Ray's slots on it, ``cores`` those of
    the machine."""

    address: str
    cpus: int
    gpus: int
    cores: int
    object_store: int | None = None
    """Bytes of Ray's object store; None before Ray is started."""
    ram_free: int | None = None
    """Bytes of free memory, the object store's included; None if it is not known."""


@dataclass(frozen=True)
class Cluster:
    """The machines that a run may use.

    ``joined`` means that the cluster was already running, so that its slots are given; a cluster
    that the run starts declares its own. ``most_gpus`` and ``most_cpus`` are the limits of an
    autoscaler; None without one. ``described`` means that the user described the cluster for a plan
    (``--cluster``), and that no Ray runs on it.
    """

    nodes: tuple[Node, ...]
    joined: bool
    most_gpus: int | None = None
    most_cpus: int | None = None
    described: bool = False

    @classmethod
    def of(cls, inventory: Inventory, devices: Sequence[int] = ()) -> Cluster:
        """Return this machine alone, with all of its GPUs or those of ``--devices``."""
        num_gpus = len(chosen_gpus(inventory, devices))
        node = Node(LOCALHOST, inventory.cores, num_gpus, inventory.cores)
        return cls((node,), joined=False)

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def cpus(self) -> int:
        return sum(node.cpus for node in self.nodes)

    @property
    def training_nodes(self) -> tuple[Node, ...]:
        """The nodes that have devices for workers: GPUs where there are any, else CPUs."""
        with_gpus = tuple(node for node in self.nodes if node.gpus)
        return with_gpus or tuple(node for node in self.nodes if node.cpus)

    @property
    def object_store(self) -> int | None:
        """Bytes of the smallest object store of a training node; None if it is not known."""
        sizes = [node.object_store for node in self.training_nodes]
        return min((size for size in sizes if size is not None), default=None)

    @property
    def ram_free(self) -> int | None:
        """Bytes of free memory of the training node that has the least; None if it is not known."""
        sizes = [node.ram_free for node in self.training_nodes]
        return min((size for size in sizes if size is not None), default=None)

    @property
    def autoscaling(self) -> bool:
        return self.most_gpus is not None or self.most_cpus is not None

    @property
    def reachable_gpus(self) -> int:
        """GPUs of the cluster after the autoscaler has added all it may."""
        return max(self.gpus, self.most_gpus or 0)

    @property
    def reachable_cpus(self) -> int:
        return max(self.cpus, self.most_cpus or 0)

    def workers_on_node(self, workers: int, on_gpu: bool) -> int:
        """Return the most workers that share the cores and the memory of one node.

        On this machine alone that is all of them. In a cluster it is the number of GPUs of a node;
        workers on CPUs are spread evenly over the nodes.
        """
        if not self.joined or not self.nodes:
            return workers
        if on_gpu:
            most_gpus_of_a_node = max((node.gpus for node in self.nodes), default=0)
            return max(1, min(workers, most_gpus_of_a_node or workers))
        return -(-workers // len(self.nodes))

    def text(self, kind: str) -> str:
        """Return the ``GPUs`` or ``CPUs`` for messages: ``the cluster has 6 GPUs (2 nodes: 4 +
        2)``."""
        counts = [node.gpus if kind == "GPUs" else node.cpus for node in self.nodes]
        total = f"{sum(counts)} {kind if sum(counts) != 1 else kind[:-1]}"
        if not self.joined:
            return f"this machine has {total}"
        nodes = f"{len(counts)} node{'s' * (len(counts) != 1)}"
        if len(set(counts)) == 1:
            nodes += f" × {counts[0]}"
        elif counts:
            nodes += f": {' + '.join(map(str, counts))}"
        return f"the cluster has {total} ({nodes})"


def chosen_gpus(inventory: Inventory, devices: Sequence[int]) -> tuple[Gpu, ...]:
    """Return the GPUs that ``--devices`` names, in its order; all of them without it."""
    if not devices:
        return inventory.gpus
    by_index = {gpu.index: gpu for gpu in inventory.gpus}
    missing = [index for index in devices if index not in by_index]
    if missing:
        raise ResourceError(_missing_gpus_text(devices, missing, inventory))
    return tuple(by_index[index] for index in devices)


def _missing_gpus_text(devices: Sequence[int], missing: Sequence[int], inventory: Inventory) -> str:
    count = len(inventory.gpus)
    found = f"this machine has {count} GPU{'s' * (count != 1)}"
    if count > 1:
        found += f", counted from 0 to {count - 1}"
    elif not count and inventory.gpu_error:
        found += f": {inventory.gpu_error}"
    instead = "Choose among those" if count else "Leave it out"
    # Other trainers' --devices is a count.
    if len(devices) == 1 and 0 < devices[0] <= count:
        instead += f"; for a number of GPUs use --workers {devices[0]}"
    flag = f"--devices {','.join(map(str, devices))}"
    named = ", ".join(map(str, missing))
    return f"{flag} names GPU {named}, but {found}. {instead}, or see 'orchestrator check'"
