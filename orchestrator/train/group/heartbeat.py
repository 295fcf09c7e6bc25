"""The heartbeat of a host: a thread reports its phase and step several times a second."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

from experts.hosts.membership import GroupMembership

_INTERVAL_SECONDS = 0.2
_LARGEST_COUNT = 2**53

Phase = Literal["build", "rest", "data", "first step", "step", "compile", "evaluate", "save", "snapshot"]


class SentHeartbeat(NamedTuple):
    """One heartbeat of a host, as the driver reads it."""

    number: int
    """Counts the host's heartbeats in this generation, from 0."""
    phase: Phase
    step: int
    progress: int
    waiting: bool


def parse_heartbeat(text: str) -> SentHeartbeat | None:
    """Return the heartbeat that ``send_heartbeats`` wrote; None if the text is no heartbeat."""
    number, _, fields = text.partition(" ")
    try:
        phase, step, progress, waiting = json.loads(fields)
        heartbeat = SentHeartbeat(int(number), phase, step, progress, waiting)
    except (ValueError, TypeError, RecursionError):
        return None
    counts = heartbeat.number, step, progress
    if not all(type(count) is int and 0 <= count <= _LARGEST_COUNT for count in counts):
        return None
    return heartbeat if phase in get_args(Phase) and type(waiting) is bool else None


class Heartbeat:
    """The phase and the step of a host, set by its loop.

    ``num_changes`` grows with every sign of progress: a phase, a micro-batch, a batch of an
    evaluation, a piece of a checkpoint."""

    def __init__(self) -> None:
        self.phase: Phase = "build"
        self.step = 0
        self.num_changes = 0

    def enter_phase(self, phase: Phase, step: int | None = None) -> None:
        self.phase = phase
        if step is not None:
            self.step = step
        self.num_changes += 1

    def beat(self) -> None:
        """Show progress within a phase."""
        self.num_changes += 1

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Be in another phase for as long as the block lasts."""
        before = self.phase
        self.enter_phase(phase)
        try:
            yield
        finally:
            self.enter_phase(before)

    def encode(self, membership: GroupMembership) -> str:
        """Return the heartbeat as text for the driver.

        A completed wait for the peers is progress too."""
        waits = membership.observe()
        progress = self.num_changes + waits.num_completed
        return json.dumps([self.phase, self.step, progress, waits.waiting])


@contextmanager
def send_heartbeats(
    heartbeat: Heartbeat, membership: GroupMembership, send: Callable[[str], None]
) -> Iterator[None]:
    """Send heartbeats from a thread for as long as the block lasts, and a last one when it ends.

    A host whose heartbeat cannot be sent leaves its group: the driver is gone or out of reach."""
    ended = threading.Event()

    def send_until_ended() -> None:
        for number in itertools.count():
            # Read before the heartbeat is made: the last one then shows the final phase.
            is_last = ended.is_set()
            try:
                # The number makes each text a new one, so that the driver sees that the host is
                # alive.
                send(f"{number} {heartbeat.encode(membership)}")
            except Exception:
                membership.leave()
                return
            if is_last:
                return
            ended.wait(_INTERVAL_SECONDS)

    thread = threading.Thread(target=send_until_ended, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
