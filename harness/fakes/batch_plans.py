"""Plans of batch sizes for tests: for one worker or several, and the memory that samples need."""

from __future__ import annotations

from typing import Any

from harness.fakes.inventories import model
from orchestrator.config.settings import Config
from orchestrator.plan.batching import Batching, plan_batches
from orchestrator.plan.estimate import ModelFacts, ModelSharding, estimate_memory
from orchestrator.types import GIB


def batches(
    facts: ModelFacts | None = None,
    memory_total: float | None = None,
    limit_bytes: float = 64.0 * GIB,
    **given: Any,
) -> Batching:
    """The sizes for one worker, with a GPU of ``memory_total`` bytes or without."""
    gpu_memory = None if memory_total is None else int(memory_total)
    return plan_batches(Config.of(**given), facts or model(), gpu_memory, limit_bytes, None)


def memory_of(samples: int, facts: ModelFacts | None = None) -> float:
    """Bytes that so many samples need."""
    return estimate_memory(facts or model(), samples, recompute=False, limit_bytes=None).total


def sizes(chosen: Batching) -> tuple[int, int, int]:
    """Micro-batch, accumulation steps and global batch."""
    return chosen.batch_size.value, chosen.accumulation.value, chosen.global_batch.value


def shared(
    workers: int, /, facts: ModelFacts | None = None, known: dict[str, int] | None = None, **given: Any
) -> Batching:
    """The sizes for so many workers with 64 GiB each; ``sharding`` and ``limit_bytes`` may be
    given too."""
    limit_bytes = given.pop("limit_bytes", 64.0 * GIB)
    sharding = given.pop("sharding", ModelSharding(workers))
    return plan_batches(Config.of(**given), facts or model(), 80 * 10**9, limit_bytes, known, sharding)
