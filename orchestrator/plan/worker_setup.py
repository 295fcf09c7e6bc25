"""The workers of a run: one process, or a group with devices, a backend and a sharding. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.device import USABLE_RAM, choose_device, choose_worker_device, usable_bytes
from orchestrator.plan.estimate import ModelFacts, ModelSharding, ShardingForm, estimate_memory
from orchestrator.plan.evolution import Growth, choose_rebalance
from orchestrator.plan.experts import divided_experts, settle_strategy
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.workers import (
    check_data_tasks,
    choose_backend,
    choose_dense_sharding,
    choose_sharding,
    choose_workers,
    num_spares,
    uses_gpus,
    whole_models,
)
from orchestrator.strategies import STRATEGIES, StrategyName
from orchestrator.types import NOT_USED, Choice, bytes_text


@dataclass(frozen=True)
class WorkerSetup:
    """The workers of a run, their devices, and each worker's part of the machine."""

    strategy: Choice[StrategyName]
    device: Choice[str]
    workers: Choice[int]
    backend: Choice[str]
    sharding: Choice[ShardingForm]
    model_sharding: ModelSharding
    workers_on_node: int
    limit_bytes: float
    object_store_bytes: int | None = None


def single_process(config: Config, inventory: Inventory, strategy: Choice[StrategyName]) -> WorkerSetup:
    """Return the setup of a run in this process."""
    if config.parallel.cpu_offload:
        raise UserError(
            f"--cpu-offload keeps the shards of data-parallel workers in host memory, and this run is one "
            f"process ({strategy.reason}); leave it out, or add --parallel-strategy data_parallel"
        )
    device = choose_device(config, inventory)
    no_sharding = f"{NOT_USED}one process has nothing to shard"
    if config.parallel.sharding not in ("auto", "none"):
        no_sharding += f", instead of --sharding {config.parallel.sharding}"
    return WorkerSetup(
        strategy,
        device,
        workers=Choice(1, "the run is one process"),
        backend=Choice("none", f"{NOT_USED}one process has no peers"),
        sharding=Choice("none", no_sharding),
        model_sharding=ModelSharding(),
        workers_on_node=1,
        limit_bytes=usable_bytes(config, inventory, device.value, 1),
    )


def worker_group(
    config: Config, inventory: Inventory, growth: Growth, strategy: Choice[StrategyName], cluster: Cluster
) -> WorkerSetup:
    """Return the setup of a run on the workers of a cluster, with their strategy settled."""
    # Memory must suffice for all experts that may be born.
    facts = growth.largest
    evolves = growth.rules is not None
    workers = choose_workers(config, cluster, inventory)
    count = workers.value
    device = choose_worker_device(config, inventory, cluster.gpus)
    on_gpu = device.value != "cpu"
    check_data_tasks(facts, count + num_spares(config), cluster, on_gpu)
    workers_on_node = cluster.workers_on_node(count, uses_gpus(config, cluster))
    limit_bytes = usable_bytes(config, inventory, device.value, workers_on_node)
    # The strategy depends on the memory of a worker, which depends on the devices.
    strategy = settle_strategy(config, facts, strategy, count, limit_bytes, on_gpu, evolves)
    backend = choose_backend(config, on_gpu, count)
    if STRATEGIES[strategy.value].divides_experts:
        on_hosts = divided_experts(config, count)
        sharding = choose_dense_sharding(config, facts, on_hosts, limit_bytes, on_gpu)
        moves = choose_rebalance(config, None, count, growth.evolution.value).value
        copies = count > 1 and (on_hosts.expert_replicas > 1 or moves)
        model_sharding = replace(on_hosts, dense=sharding.value, copies=copies)
    else:
        sharding = choose_sharding(config, facts, count, limit_bytes, on_gpu, evolves)
        model_sharding = whole_models(config, count, sharding.value)
    if model_sharding.offload:
        _check_host_memory(facts, inventory, workers_on_node / count)
    return WorkerSetup(
        strategy,
        device,
        workers,
        backend,
        sharding,
        model_sharding,
        workers_on_node,
        limit_bytes,
        cluster.object_store,
    )


def _check_host_memory(facts: ModelFacts, inventory: Inventory, share: float) -> None:
    """Raise ResourceError if a node has too little memory for its share of offloaded state."""
    whole = estimate_memory(facts, 1, False, None)
    needed = (whole.total - whole.activations) * share
    usable = inventory.ram_free * USABLE_RAM
    if needed > usable:
        raise ResourceError(
            f"--cpu-offload keeps {bytes_text(needed)} of weights, gradients and optimizer state in the "
            f"memory of a node, and {bytes_text(usable)} is usable there; add nodes, or leave it out"
        )
