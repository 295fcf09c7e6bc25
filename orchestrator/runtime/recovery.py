"""What to do after a failure. Pure: decisions are values, and one place carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["worker", "memory", "resources", "communication", "error"]


@dataclass(frozen=True)
class Failure:
    """What went wrong in an attempt. ``error`` is the run's own doing (a user's exception, a loss that diverged): it would
    happen again."""

    kind: Kind
    message: str
    rank: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True)
class Again:
    """Begin again from the newest checkpoint."""

    workers: int
    micro_batch: int
    reason: str


@dataclass(frozen=True)
class GiveUp:
    reason: str


def decide(failure: Failure, *, failures: int, max_failures: int, workers: int, slots: int, micro_batch: int) -> Again | GiveUp:
    """After the ``failures``-th failure of a run on ``workers`` workers, where ``slots`` are to be had now."""
    if failure.kind == "error":
        return GiveUp(failure.message)
    if failures > max_failures:
        limit = "no restart is allowed (--max-failures 0)" if max_failures == 0 else f"--max-failures is {max_failures}"
        return GiveUp(f"{failure.message}; it failed {failures} times, and {limit}")
    if slots < 1:
        return GiveUp(f"{failure.message}; no device is left to go on with")
    if failure.kind == "memory":
        held = failure.micro_batch or micro_batch
        if held <= 1:
            return GiveUp(f"{failure.message}, which cannot be halved; try --activation-checkpointing on, or --sharding zero3")
        return Again(workers, -(-held // 2), f"{failure.message}; going on with a micro-batch of {-(-held // 2)}")
    if slots < workers:
        return Again(slots, micro_batch, f"{failure.message}; {slots} of {workers} workers can go on, with the same global batch")
    return Again(workers, micro_batch, failure.message)
