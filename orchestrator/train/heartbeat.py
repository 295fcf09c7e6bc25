"""The heartbeat of a host: a thread reports its phase and step several times a second."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from experts.membership import GroupMembership

_INTERVAL_SECONDS = 0.2

Phase = Literal["build", "rest", "data", "first step", "step", "compile", "evaluate", "save", "snapshot"]


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

    def advance(self) -> None:
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
