"""The heartbeats of the hosts, as the driver reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

from orchestrator.runtime.expert_parallel.stuck import HostHealth
from orchestrator.train.group.heartbeat import SentHeartbeat, parse_heartbeat
from orchestrator.train.group.stores import unseal

_READ_SECONDS = 0.2
_LATE_SECONDS = 1.0
"""A driver that reads this late was itself away: the times it sees are not those of the hosts."""
_NUM_SILENCES = 50
_NUM_STEPS = 5
"""Steps that count as recent."""
_NUM_KNOWN_STEPS = 3
"""Until so many steps are known, the first step counts for them too."""
_MAX_BYTES = 1024
"""Limit of a heartbeat in the store."""


def heartbeat_key(generation: int, host_id: int) -> str:
    """Return the key in the driver's store under which a host writes its heartbeats."""
    return f"beat/{generation}/{host_id}"


@dataclass
class _LastBeat:
    """The last heartbeat of a host, and when parts of it last changed, by the driver's clock."""

    number: int = -1
    """The number of the last heartbeat in this generation; -1 before the first."""
    closing_number: int = -1
    """The number of the last heartbeat in the generation before."""
    phase: str = "join"
    step: int = 0
    progress: int = -1
    waiting: bool = False
    received_at: float = 0.0
    progressed_at: float = 0.0
    silences: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SILENCES))
    """Seconds between two heartbeats."""
    foreign: bytes | None = None
    """The last value under the host's key that the host did not write."""


class _Intervals:
    """The longest time between two signs of progress in each of the recent steps."""

    def __init__(self) -> None:
        self._by_step: dict[tuple[int, int], float] = {}
        """By generation and step, not by heartbeat: the many quick parts of a step must not displace its
        slow one."""

    def add(self, generation: int, step: int, seconds: float) -> None:
        key = generation, step
        self._by_step[key] = max(seconds, self._by_step.get(key, 0.0))
        while len(self._by_step) > _NUM_STEPS:
            self._by_step.pop(next(iter(self._by_step)))

    @property
    def num_steps(self) -> int:
        return len(self._by_step)

    @property
    def longest_s(self) -> float:
        return max(self._by_step.values(), default=0.0)


class Heartbeats:
    """Reads the heartbeats of the members of a generation from the driver's store.

    Others may reach the store too. A value that the host did not write counts as no heartbeat."""

    def __init__(
        self,
        store: Any,
        secret: str,
        warn: Callable[[str], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``warn`` is called once, if the store holds values that no host wrote."""
        self._store = store
        self._secret = secret
        self._warn = warn
        self._has_warned = False
        self._clock = clock
        self._beats: dict[int, _LastBeat] = {}
        self._generation = -1
        self._previous_generation = -1
        self._read_at = 0.0
        self._work: dict[str, _Intervals] = {}
        """The times between signs of progress of hosts at work, by phase, over all hosts."""
        self._waits: dict[str, _Intervals] = {}
        """The times between signs of progress of hosts that wait for their peers."""

    def follow(self, generation: int, members: tuple[int, ...]) -> None:
        """Read the heartbeats of a new group from now on."""
        now = self._clock()
        self._previous_generation = self._generation
        self._generation = generation
        self._read_at = now
        self._beats = {host_id: _LastBeat(received_at=now, progressed_at=now) for host_id in members}

    def read(self, immediately: bool = False) -> bool:
        """Read the store, unless it was read a moment ago. Return whether it was read."""
        now = self._clock()
        since_last_s = now - self._read_at
        if since_last_s < _READ_SECONDS and not immediately:
            return False
        self._read_at = now
        for host_id, beat in self._beats.items():
            data = self._last_data(self._generation, host_id)
            sent = self._heartbeat(self._generation, host_id, data)
            if sent is not None:
                self._update(beat, sent, now, is_late=since_last_s > _LATE_SECONDS)
            elif data is not None:
                self._pass_over(host_id, beat, data, since_last_s)
            elif self._previous_generation >= 0:
                data = self._last_data(self._previous_generation, host_id)
                self._observe_closing(beat, self._heartbeat(self._previous_generation, host_id, data), now)
        return True

    def _last_data(self, generation: int, host_id: int) -> bytes | None:
        """Return the value under the key of a host; None if there is none."""
        key = heartbeat_key(generation, host_id)
        try:
            return self._store.get(key) if self._store.check([key]) else None
        except Exception:  # another client has deleted the key meanwhile
            return None

    def _heartbeat(self, generation: int, host_id: int, data: bytes | None) -> SentHeartbeat | None:
        """Return the heartbeat that a host wrote; None if it did not write this."""
        if data is None or len(data) > _MAX_BYTES:
            return None
        text = unseal(data, heartbeat_key(generation, host_id), self._secret)
        return parse_heartbeat(text) if text is not None else None

    def _pass_over(self, host_id: int, beat: _LastBeat, data: bytes, since_last_s: float) -> None:
        """Count a value that the host did not write as no heartbeat.

        A new foreign value has replaced a heartbeat that would have been read, so the time since the last one
        is no silence. A foreign value that stays shows that the host has not written since."""
        if data == beat.foreign:
            return
        beat.foreign = data
        beat.received_at += since_last_s
        beat.progressed_at += since_last_s
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"the rendezvous store holds {len(data)} bytes under the key of host {host_id} that the host "
                "did not write; they are ignored. Another process reaches the store: see docs/security.md"
            )

    def _observe_closing(self, beat: _LastBeat, sent: SentHeartbeat | None, now: float) -> None:
        """Take the heartbeat of the last generation as a sign of life of a host that joins.

        Before it joins, it closes its part of the last group, and may have a checkpoint to write."""
        if sent is None or sent.number <= beat.closing_number:
            return
        # The first one is from before the regroup: only a change shows that the host lives.
        if beat.closing_number >= 0:
            beat.received_at = now
            if sent.progress != beat.progress:
                beat.progressed_at = now
        beat.progress = sent.progress
        beat.closing_number = sent.number

    def _update(self, beat: _LastBeat, sent: SentHeartbeat, now: float, is_late: bool) -> None:
        # A lower number is an old heartbeat that another client has written again.
        if sent.number <= beat.number:
            return
        is_measured = beat.phase != "join" and not is_late
        if is_measured:
            beat.silences.append(now - beat.received_at)
        if sent.progress != beat.progress:
            if is_measured:
                intervals = self._waits if beat.waiting else self._work
                of_phase = intervals.setdefault(beat.phase, _Intervals())
                of_phase.add(self._generation, beat.step, now - beat.progressed_at)
            beat.progress = sent.progress
            beat.progressed_at = now
        beat.number = sent.number
        beat.received_at = now
        beat.phase = sent.phase
        beat.step = sent.step
        beat.waiting = sent.waiting

    @property
    def last_step(self) -> int:
        """The number of steps done by the host that is furthest ahead."""
        return max((beat.step for beat in self._beats.values()), default=0)

    def last_seen(self) -> dict[int, float]:
        """Return the time of each host's last heartbeat, in unix seconds."""
        offset = time() - self._clock()
        return {host_id: beat.received_at + offset for host_id, beat in self._beats.items()}

    def health(self) -> list[HostHealth]:
        """Return the state of each member."""
        now = self._clock()
        return [
            HostHealth(
                host_id,
                beat.phase,
                beat.waiting,
                silent_s=now - beat.received_at,
                unchanged_s=now - beat.progressed_at,
                longest_silence_s=max(beat.silences, default=0.0),
                longest_work_s=_longest_s(self._work, beat.phase),
                longest_wait_s=_longest_s(self._waits, beat.phase),
            )
            for host_id, beat in self._beats.items()
        ]


def _longest_s(intervals: Mapping[str, _Intervals], phase: str) -> float:
    """Return the longest time that a phase has recently gone without progress."""
    of_phase = intervals.get(phase, _Intervals())
    if phase == "step" and of_phase.num_steps < _NUM_KNOWN_STEPS:
        first_step = intervals.get("first step", _Intervals())
        return max(of_phase.longest_s, first_step.longest_s)
    return of_phase.longest_s
