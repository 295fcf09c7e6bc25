"""Work for expert hosts that trains nothing: it puts snapshots, waits or fails on request.

Every host imports this module, so it imports little."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experts.hosts.actor_host import HostContext

SNAPSHOT_BYTES = 300_000
"""Large enough for the object store; Ray sends smaller results inside the reply."""


@dataclass(frozen=True)
class IdleHeader:
    """The fields of a snapshot's header that the driver reads."""

    generation: int
    step: int
    rank: int
    size: int
    stall_s: float = 0.25
    taken_at: float = 0.0


def preload_or_die(context: HostContext, deaths_file: str, store_address: tuple[str, int]) -> None:
    """Kill this process as long as the file has lines; each death removes one."""
    lines = Path(deaths_file).read_text(encoding="utf-8").splitlines()
    if lines:
        Path(deaths_file).write_text("\n".join(lines[1:]), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
    context.cache["store address"] = store_address


def rehearse_in_file(_: HostContext, deaths_file: str) -> None:
    """Add the id of this process to a file."""
    with Path(f"{deaths_file}.rehearsals").open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


def snapshot_value(generation: int, step: int, rank: int) -> int:
    """Return the byte that a snapshot is filled with."""
    return 100 * (generation % 2) + 10 * rank + step % 10


class IdleWorker:
    """Does what the segment says: wait, fail, or put the snapshot of a step."""

    def __init__(self, context: HostContext, generation: int, rank: int, size: int) -> None:
        self._context = context
        self._generation = generation
        self._rank = rank
        self._size = size

    def run_segment(self, segment: tuple[str, int]) -> Any:
        action, step = segment
        if action == "wait":
            self._context.membership.wait_until(lambda: False)
        if action == "fail":
            raise ValueError("of the work")
        if action == "put":
            self._context.outbox.wait_for_space(self._context.membership)
            header = IdleHeader(self._generation, step, self._rank, self._size)
            value = snapshot_value(self._generation, step, self._rank)
            own = np.full(SNAPSHOT_BYTES, value, np.uint8)
            # The main host alone has a dense part.
            dense = np.full(SNAPSHOT_BYTES if self._rank == 0 else 0, value, np.uint8)
            self._context.outbox.put(header, own, dense)
        return step


@contextmanager
def idle_worker(context: HostContext, generation: int, rank: int, size: int) -> Iterator[IdleWorker]:
    yield IdleWorker(context, generation, rank, size)
