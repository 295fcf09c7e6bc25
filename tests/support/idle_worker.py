"""Work for expert hosts that trains nothing: it puts out copies, waits or fails, as it is told. Light, for every host loads it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experts.actor_host import Side

LARGE = 300_000  # bytes: what is smaller travels in the answer itself


@dataclass(frozen=True)
class Told:
    """As much of a header as the driver looks at."""

    epoch: int
    step: int
    rank: int
    size: int


def rehearse(side: Side, deaths: str, place: tuple[str, int]) -> None:
    """Die, for as long as there are lines in a file: each death takes one."""
    lines = Path(deaths).read_text(encoding="utf-8").splitlines()
    if lines:
        Path(deaths).write_text("\n".join(lines[1:]), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
    side.memory["place"] = place


class Worker:
    """Does what the segment says."""

    def __init__(self, side: Side, epoch: int, rank: int, size: int) -> None:
        self.side, self._place = side, (epoch, rank, size)

    def advance(self, segment: tuple[str, int]) -> Any:
        what, number = segment
        if what == "wait":
            self.side.membership.wait_until(lambda: False)
        if what == "fail":
            raise ValueError("of the work")
        if what == "put":
            self.side.outbox.make_room(self.side.membership)
            epoch, rank, size = self._place
            self.side.outbox.put(
                Told(epoch, number, rank, size), np.full(LARGE, 10 * rank + number % 10, np.uint8)
            )
        return number


@contextmanager
def working(side: Side, epoch: int, rank: int, size: int) -> Iterator[Worker]:
    yield Worker(side, epoch, rank, size)
