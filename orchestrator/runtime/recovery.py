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
    halvings: int
    """How often the micro-batch has been halved by now."""
    reason: str


@dataclass(frozen=True)
class GiveUp:
    reason: str


def decide(failure: Failure, *, failures: int, max_failures: int, workers: int, slots: int, halvings: int) -> Again | GiveUp:
    """After the ``failures``-th failure of a run on ``workers`` workers, where ``slots`` are to be had now."""
    if failure.kind == "error":
        return GiveUp(failure.message)
    if failures > max_failures:
        limit = "no restart is allowed (--max-failures 0)" if max_failures == 0 else f"--max-failures is {max_failures}"
        often = "once" if failures == 1 else f"{failures} times"
        return GiveUp(f"{failure.message}; it failed {often}, and {limit}. Go on from the newest checkpoint with --resume auto")
    if slots < 1:
        return GiveUp(f"{failure.message}; no device is left to go on with")
    if failure.kind == "memory":
        if failure.micro_batch == 1:
            return GiveUp(
                f"{failure.message}, which cannot be halved; try --activation-checkpointing on, more --workers, or a smaller model"
            )
        return Again(min(workers, slots), halvings + 1, f"{failure.message}; going on with half of it")
    if slots < workers:
        return Again(slots, halvings, f"{failure.message}; {slots} of {workers} workers can go on, with the same global batch")
    return Again(workers, halvings, failure.message)
