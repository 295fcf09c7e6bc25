"""The peak memory of a run and its parts, from the events of the run.

The summary, the text and the page of the report all take them from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestrator.record.events.decoding import decode, measure
from orchestrator.record.events.kinds import Memory
from orchestrator.types import MEMORY_PARTS


class PeakSums:
    """The largest peak of the events of epochs and ends, one by one."""

    def __init__(self) -> None:
        self._largest: Memory | None = None
        self._reserved: float | None = None

    def add(self, memory: Memory | None) -> None:
        if memory is None:
            return
        if self._largest is None or memory.allocated > self._largest.allocated:
            self._largest = memory
        if memory.reserved is not None:
            self._reserved = max(memory.reserved, self._reserved or 0.0)

    def peak(self) -> Memory | None:
        """Return the largest peak, with the most that was reserved; None if nothing was measured."""
        if self._largest is None:
            return None
        parts = self._largest.parts
        known = {name: parts[name] for name in MEMORY_PARTS if name in parts}
        return replace(self._largest, reserved=self._reserved, parts=known)

    def to_json(self) -> list[Any]:
        return [self._largest, self._reserved]

    def load(self, content: Sequence[Any]) -> None:
        """Continue from what ``to_json`` returned."""
        largest, reserved = content
        self._largest = decode(Memory, largest)
        self._reserved = measure(reserved)
