"""What a host is at, told from beside its loop: a thread says so several times a second, whatever the loop is busy with."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from experts.membership import GroupMembership

_BEAT_SECONDS = 0.2

Phase = Literal["build", "rest", "data", "first step", "step", "evaluate", "save", "snapshot"]


class Heartbeat:
    """The phase and the step that a host is in. ``changes`` grows with every sign of progress."""

    def __init__(self) -> None:
        self.phase: Phase = "build"
        self.step = 0
        self.changes = 0

    def enter_phase(self, phase: Phase, step: int | None = None) -> None:
        self.phase = phase
        self.step = self.step if step is None else step
        self.changes += 1

    def encode(self, life: GroupMembership) -> str:
        """As text, for those who look on."""
        return json.dumps([self.phase, self.step, self.changes + life.completed_waits, life.waiting])


@contextmanager
def send_heartbeats(pulse: Heartbeat, life: GroupMembership, send: Callable[[str], None]) -> Iterator[None]:
    """Tell of the pulse for as long as the block lasts. A host whose word does not get through any more leaves the group: nobody is
    there to lead it."""
    over = threading.Event()

    def beat() -> None:
        for count in itertools.count():
            last = over.is_set()  # the last word tells where it ended
            try:
                send(f"{count} {pulse.encode(life)}")
            except Exception:
                life.leave()
                return
            if last:
                return
            over.wait(_BEAT_SECONDS)

    thread = threading.Thread(target=beat, name="pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
