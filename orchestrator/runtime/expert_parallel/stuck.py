"""Which hosts count as stuck, by their heartbeats.

A healthy host must never be taken for a stuck one, however long its steps take. Three things tell
them apart:

- Silence. A thread of its own sends the heartbeats, in every phase. A process that is stopped, or
  whose interpreter lock is held for ever, falls silent.
- A peer that waits. A host without progress is stuck only if a peer has waited for it for long. If
  all hosts compute, they are slow together, and no one is harmed.
- Measured limits. A host may go without progress for three times as long as it recently did.

Pure functions, without Ray and torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class HostHealth:
    """The state of a host as its heartbeats show it."""

    host_id: int
    phase: str
    waiting: bool
    """Whether the host waits for its peers."""
    silent_s: float
    """Seconds since the last heartbeat."""
    unchanged_s: float
    """Seconds since the last heartbeat that showed progress."""
    longest_silence_s: float = 0.0
    """The longest time between two of its recent heartbeats."""
    longest_work_s: float = 0.0
    """The longest time that this phase has recently gone without progress, on any host at work."""
    longest_wait_s: float = 0.0
    """The longest time without progress of hosts that waited for their peers."""


_PHASE_FACTORS = {"step": 1, "rest": 6, "compile": 360}
_OTHER_FACTOR = 60
"""Time limits of the phases, as multiples of the time limit of a step.

Building, the first step, data, evaluations, checkpoints and snapshots depend on disks, networks and
code of the user: their time is not known beforehand. A frozen host is found by its silence."""
_MEASURED_FACTOR = 3
_SILENCE_FACTOR = 0.95
"""Share of the time limit of a step: a frozen host must be found before its waiting peers exceed theirs."""
_OTHER_SILENCE_FACTOR = 3
"""Outside of steps, imports, first calls of libraries and the user's data may hold the interpreter lock."""
_JOIN_SILENCE_FACTOR = 6
"""A host that joins may have sent no heartbeat yet."""
_LONELY_FACTOR = 6
"""Times the limit of a phase, if no peer waits: for ever is too long for anyone."""


def phase_limit_s(phase: str, step_limit_s: float, longest_s: float = 0.0) -> float:
    """Return how long a phase may last without progress; ``longest_s`` is how long it recently did."""
    fixed_s = _PHASE_FACTORS.get(phase, _OTHER_FACTOR) * step_limit_s
    return max(fixed_s, _MEASURED_FACTOR * longest_s)


def silence_limit_s(host: HostHealth, step_limit_s: float) -> float:
    """Return how long a host may send no heartbeat."""
    factors = {"step": 1, "rest": 1, "join": _JOIN_SILENCE_FACTOR}
    factor = factors.get(host.phase, _OTHER_SILENCE_FACTOR)
    return max(_SILENCE_FACTOR * factor * step_limit_s, _MEASURED_FACTOR * host.longest_silence_s)


def find_stuck(
    health: Iterable[HostHealth], step_limit_s: float, waited_for: bool = False
) -> tuple[HostHealth, ...]:
    """Return the hosts that are frozen, unreachable, or without progress while a peer waits.

    A host that waits for its peers is not stuck, unless all of them wait. ``waited_for``: other
    hosts, which are not among these, wait for all of these."""
    hosts = tuple(health)

    def is_stuck(host: HostHealth) -> bool:
        if host.silent_s > silence_limit_s(host, step_limit_s):
            return True
        if host.waiting:
            return False
        limit_s = phase_limit_s(host.phase, step_limit_s, host.longest_work_s)
        # Peers arrive later than the host got stuck: half the limit shows that they wait for it.
        if waited_for or any(peer.waiting and peer.unchanged_s > limit_s / 2 for peer in hosts):
            return host.unchanged_s > limit_s
        # Between segments a host rests for as long as the driver likes.
        return host.phase != "rest" and host.unchanged_s > _LONELY_FACTOR * limit_s

    def has_waited_too_long(host: HostHealth) -> bool:
        longest_s = max(host.longest_work_s, host.longest_wait_s)
        return host.waiting and host.unchanged_s > phase_limit_s(host.phase, step_limit_s, longest_s)

    stuck = tuple(filter(is_stuck, hosts))
    return hosts if not stuck and all(map(has_waited_too_long, hosts)) else stuck
