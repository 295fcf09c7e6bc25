"""The device that trains, and the memory and threads that a worker may use. Pure."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.config.settings import Config
from orchestrator.plan.inventory.cluster import chosen_gpus
from orchestrator.plan.inventory.gpus import Gpu
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.workers import check_gpu_mode
from orchestrator.strategies import StrategyFacts
from orchestrator.types import GIB, Choice, Rejected, bytes_text

USABLE_RAM = 0.8  # share of the free RAM that the plan may use


def choose_device(config: Config, inventory: Inventory) -> Choice[str]:
    """Choose the device of a run in one process.

    The first of ``--devices``, or the GPU with the most free memory, or the CPU.
    """
    devices = config.parallel.devices
    if config.device.gpu_mode == "cpu":
        return Choice("cpu", "set by --gpu-mode cpu")
    gpus = chosen_gpus(inventory, devices)
    check_gpu_mode(config, len(gpus), inventory.gpu_error)
    if not gpus:
        reason = inventory.gpu_error or "no GPU was found"
        return Choice("cpu", reason, (Rejected("cuda:0", "there is none"),))
    if devices:
        best = gpus[0]
        reason = f"set by --devices {','.join(map(str, devices))}"
    else:
        # Whole GiB: a few MiB of a desktop must not decide between two idle GPUs.
        best = max(gpus, key=lambda gpu: (gpu.memory_free // GIB, -gpu.index))
        reason = "it is the only GPU" if len(gpus) == 1 else "it is the GPU with the most free memory"
    rejected = ()
    if len(gpus) > 1:
        rejected = (Rejected(f"the other {len(gpus) - 1} GPUs", "one process trains on one device"),)
    return Choice(f"cuda:{best.index}", f"{reason}: {best.name}, {bytes_text(best.memory_total)}", rejected)


def choose_worker_device(config: Config, inventory: Inventory, declared_gpus: int = 0) -> Choice[str]:
    """Choose the device of each worker on a node like ``inventory``: ``cuda``, a GPU of its own,
    or the CPU.

    The CPU trains if the cluster counts ``declared_gpus`` that CUDA does not show.
    """
    if config.device.gpu_mode == "cpu":
        return Choice("cpu", "set by --gpu-mode cpu")
    gpus = inventory.gpus
    if not gpus:
        reason = "no GPU was found"
        if declared_gpus:
            reason = f"the cluster counts {declared_gpus} GPUs, but CUDA shows none"
        return Choice("cpu", inventory.gpu_error or reason, (Rejected("cuda", "there is none"),))
    smallest = min(gpus, key=lambda gpu: gpu.memory_total)
    mixed = "" if inventory.same_model else "; planned for the smallest of them"
    return Choice(
        "cuda", f"each worker has a GPU: {smallest.name}, {bytes_text(smallest.memory_total)}{mixed}"
    )


def gpu_of(inventory: Inventory, device: str) -> Gpu:
    """Return the GPU of that name; for ``cuda``, a GPU with the least of each property of all
    GPUs."""
    if device != "cuda":
        return next(gpu for gpu in inventory.gpus if f"cuda:{gpu.index}" == device)
    smallest = min(inventory.gpus, key=lambda gpu: gpu.memory_total)
    memory_free = min(gpu.memory_free for gpu in inventory.gpus)
    capability = min(gpu.capability for gpu in inventory.gpus)
    return replace(smallest, memory_free=memory_free, capability=capability)


def usable_bytes(config: Config, inventory: Inventory, device: str, workers_on_node: int) -> float:
    """Return the memory that a worker may use.

    On a GPU the configured fraction, at most the free memory; on a CPU the worker's part of the
    free RAM.
    """
    if device == "cpu":
        return inventory.ram_free * USABLE_RAM / workers_on_node
    gpu = gpu_of(inventory, device)
    return min(gpu.memory_total * config.batch.gpu_memory_fraction, gpu.memory_free)


def share_cores(inventory: Inventory, workers_on_node: int) -> Choice[int]:
    """Choose the cores of a worker: those of its node, divided among the workers there."""
    cores = inventory.cores
    if workers_on_node == 1:
        return Choice(cores, f"the process may use {cores} cores")
    return Choice(
        max(1, cores // workers_on_node), f"{workers_on_node} workers on a node share {cores} usable cores"
    )


def choose_threads(
    config: Config, inventory: Inventory, strategy: StrategyFacts, cores: Choice[int]
) -> Choice[int]:
    """Choose a thread for each core of the worker, unless the user has set their number."""
    if config.run.reproducible:
        return Choice(1, "sums on several threads may depend on their number (--reproducible)")
    given = inventory.omp_threads
    if not strategy.in_process or given is None:
        return cores
    return Choice(given, f"set by OMP_NUM_THREADS={given}")
