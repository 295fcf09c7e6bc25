"""The course of a run: how samples are fetched, how many steps it has, and how often one looks at it. Pure."""

from __future__ import annotations

from orchestrator.config.settings import Config
from orchestrator.plan.batching import Batching
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.workers import PLAIN
from orchestrator.types import GIB, Choice, Rejected, bytes_text

_PLAIN_LOG_EVERY = 10


def choose_loader_workers(config: Config, facts: ModelFacts, device: str, cores: Choice[int]) -> Choice[int]:
    """One rule: a process per core of this worker beyond the one that trains, at most eight; none where batches come from
    memory."""
    if config.data.loader_workers >= 0:
        return Choice(
            config.data.loader_workers, f"asked for by --loader-workers {config.data.loader_workers}"
        )
    if not config.run.auto:
        return Choice(0, PLAIN)
    if facts.gathered_bytes is not None:
        return Choice(
            0,
            "the data hands out whole batches from memory",
            (Rejected("loader processes", "nothing to load"),),
        )
    if device == "cpu":
        return Choice(
            0,
            "the CPU trains: loader processes would take its cores",
            (Rejected("loader processes", "try --loader-workers 1"),),
        )
    count = max(0, min(8, cores.value - 1))
    return Choice(count, f"one per core beyond the one that trains, at most 8; {cores.reason}")


def choose_prefetch(config: Config, inventory: Inventory, loaders: int, on_one_node: int) -> Choice[int]:
    if not loaders:
        return Choice(2, "not used: no loader processes")
    if not config.run.auto:
        return Choice(2, PLAIN)
    deep = inventory.ram_free > 8 * GIB * loaders * on_one_node
    return Choice(4 if deep else 2, f"batches per loader process; {bytes_text(inventory.ram_free)} RAM free")


def choose_data_on_device(config: Config, facts: ModelFacts, gpu_memory: int | None) -> Choice[bool]:
    """``gpu_memory`` is None where the device is the CPU."""
    if gpu_memory is None:
        return Choice(False, "the device is the CPU")
    if facts.gathered_bytes is None:
        return Choice(False, "the data is read sample by sample")
    if not config.run.auto:
        return Choice(False, PLAIN)
    share = facts.gathered_bytes / gpu_memory
    text = f"the training data is {bytes_text(facts.gathered_bytes)}, {share:.1%} of the GPU's memory"
    small = share < 0.05
    return Choice(
        small,
        text if small else f"{text}: more than 5%",
        () if small else (Rejected("on the device", "too large"),),
    )


def choose_total_steps(config: Config, facts: ModelFacts, batching: Batching) -> Choice[int]:
    per_epoch = -(-facts.samples // batching.global_batch.value)
    steps = per_epoch * config.run.epochs
    reason = f"{config.run.epochs} epochs × {per_epoch} steps ({facts.samples} samples in batches of {batching.global_batch.value})"
    if config.run.debug:
        return Choice(min(steps, 4, config.run.max_steps or 4), "--debug")
    if config.run.max_steps is not None and config.run.max_steps < steps:
        return Choice(config.run.max_steps, f"--max-steps; {reason} would be {steps}")
    return Choice(steps, reason)


def choose_warmup(config: Config, steps: int) -> Choice[int]:
    if config.optim.warmup_steps is not None:
        return Choice(config.optim.warmup_steps, "asked for by --warmup-steps")
    if not config.run.auto:
        return Choice(0, PLAIN)
    return Choice(min(1000, steps // 20), "a twentieth of the run, at most 1000 steps")


def choose_log_every(config: Config, steps: int, device: str) -> Choice[int]:
    if config.watch.log_every is not None:
        return Choice(config.watch.log_every, "asked for by --log-every")
    if config.run.debug:
        return Choice(1, "--debug")
    if not config.run.auto:
        return Choice(_PLAIN_LOG_EVERY, PLAIN)
    if device == "cpu":
        return Choice(max(1, min(10, steps // 20)), "often enough to watch")
    return Choice(
        max(10, min(50, steps // 20)),
        "losses are fetched this rarely, so that the device need not wait for the host",
    )
