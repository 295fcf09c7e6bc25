"""The devices of a sweep, the share of each worker, and which points they are enough for."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from orchestrator.config.settings import Config
from orchestrator.config.sweep.space import MAX_POINTS, Point, Space, Values
from orchestrator.config.sweep.sweep import Sweep, requested_workers
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.compute import choose_precision
from orchestrator.plan.device import choose_worker_device
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.workers import check_cpu, choose_backend, choose_workers, trains_in_process, uses_gpus
from orchestrator.record.files.ledger import TrialRow
from orchestrator.runtime.cluster.session import joins_cluster
from orchestrator.runtime.sweep.optuna_search import import_optuna


@dataclass(frozen=True)
class SweepDevices:
    """The devices of a sweep, and the share of them that each worker of a trial gets."""

    inventory: Inventory
    cluster: Cluster
    on_gpu: bool
    cores: int
    """Cores of each worker."""

    @classmethod
    def of(cls, config: Config, space: Space, inventory: Inventory, cluster: Cluster) -> SweepDevices:
        """Return a GPU for each worker, or an equal number of cores.

        The cores of a worker are as many as let the largest possible number of workers run. So
        the workers of all trials are alike, and their results compare.
        """
        if uses_gpus(config, cluster) and inventory.gpus:
            # Concurrent trials share the cores of a node, one share for each of its GPUs.
            gpus_per_node = max(1, *(node.gpus for node in cluster.nodes))
            return cls(inventory, cluster, True, max(1, inventory.cores // gpus_per_node))
        nodes = [node for node in cluster.nodes if node.cpus] or list(cluster.nodes)
        most_workers = max(_possible_workers(config, space, inventory, cluster))
        workers_per_node = -(-most_workers // len(nodes))  # rounded up: workers are spread over the nodes
        slots = max(node.cpus for node in nodes)
        cores = max(node.cores for node in nodes)
        return cls(inventory, cluster, False, max(1, min(slots, cores) // workers_per_node))

    @property
    def devices(self) -> int:
        """The number of workers that can run at a time."""
        if self.on_gpu:
            return self.cluster.gpus
        return sum(node.cpus // self.cores for node in self.cluster.nodes)

    @property
    def name(self) -> str:
        return self.inventory.gpus[0].name if self.on_gpu else self.inventory.cpu_name

    def num_workers(self, config: Config) -> int:
        """Return the number of workers of a trial. ResourceError if the devices cannot run it."""
        count = 1
        if not trains_in_process(config, self.inventory, self.cluster.joined):
            count = choose_workers(config, self.cluster, self.inventory).value
            check_cpu(config, self.on_gpu)
            choose_backend(config, self.on_gpu, count)
        if count > self.devices:
            share = "a GPU" if self.on_gpu else f"{self.cores} core{'s' * (self.cores > 1)}"
            present = self.cluster.text("GPUs" if self.on_gpu else "CPUs")
            raise ResourceError(f"{count} workers with {share} each were asked for; {present}")
        self._check_precision(config)
        return count

    def _check_precision(self, config: Config) -> None:
        """Raise ResourceError for a precision that the workers' devices cannot compute in."""
        device = "cpu"
        if self.on_gpu:
            device = choose_worker_device(config, self.inventory, self.cluster.gpus).value
        choose_precision(config, self.inventory, device)

    def workers_or_refusal(self, config: Config, point: Point) -> int | TrialRow:
        """Return the number of workers of a point's trial; the row of the ledger if it cannot be tried."""
        try:
            return self.num_workers(config.but(**point))
        except ResourceError as error:
            return TrialRow(0, point, "infeasible", _one_line(error))
        except UserError as error:
            return TrialRow(0, point, "failed", _one_line(error))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _possible_workers(config: Config, space: Space, inventory: Inventory, cluster: Cluster) -> list[int]:
    """Return the numbers of workers that trials may have on this cluster."""
    requested = [count for count in requested_workers(space, config) if count <= cluster.cpus]
    if not requested:
        return _planned_workers(config, space, inventory, cluster)
    if any("workers" not in point for point in space.given):
        # Some of the given points leave the number to the plan.
        with suppress(ResourceError):
            return requested + _planned_workers(config, space, inventory, cluster)
    return requested


def _planned_workers(config: Config, space: Space, inventory: Inventory, cluster: Cluster) -> list[int]:
    """Return the numbers of workers that the plan would choose, for each strategy of the space."""
    domain = space.domains.get("parallel_strategy")
    configs = [config]
    if isinstance(domain, Values):
        configs = [config.but(parallel_strategy=strategy) for strategy in domain.values]
    counts: list[int] = []
    for variant in configs:
        single = trains_in_process(variant, inventory, cluster.joined)
        counts.append(1 if single else choose_workers(variant, cluster, inventory).value)
    return counts


def check_feasible(sweep: Sweep, config: Config, inventory: Inventory) -> None:
    """Raise the errors that are certain before a cluster starts.

    If the cluster is to be started on this machine, one of the points must fit it.
    """
    if config.batch.batch_size == "auto" and "batch_size" not in sweep.space.domains:
        raise UserError(
            "--batch-size auto measures a batch size by itself; sweep over sizes: "
            "--sweep batch-size=16..256:x2"
        )
    if sweep.search == "optuna":
        import_optuna()
    if not sweep.space.listed or sweep.space.size > MAX_POINTS or joins_cluster(config):
        return
    local = Cluster.of(inventory, config.parallel.devices)
    workers = config.parallel.workers if isinstance(config.parallel.workers, int) else 0
    # A cluster that we start declares a slot for each requested worker.
    nodes = tuple(replace(node, cpus=max(node.cpus, workers)) for node in local.nodes)
    devices = SweepDevices.of(config, sweep.space, inventory, replace(local, nodes=nodes))
    first_reason = ""
    points = sweep.space.grid()
    for point in points:
        refusal = devices.workers_or_refusal(config, point)
        if not isinstance(refusal, TrialRow) or refusal.status != "infeasible":
            return  # a point that fails for another reason may run after all: the task decides
        first_reason = first_reason or refusal.reason
    raise ResourceError(f"none of the {len(points)} points can be tried here; the first: {first_reason}")
