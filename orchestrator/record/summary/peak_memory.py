"""The peak memory of a run and its parts, from the events of the run.

The summary, the text and the page of the report all take them from here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.record.files.events import Event
from orchestrator.record.files.validate import is_finite_number
from orchestrator.types import MEMORY_PARTS


@dataclass(frozen=True)
class PeakMemory:
    """The largest peak of a run in bytes: of the device on a GPU, of the process on a CPU."""

    allocated: float
    reserved: float | None
    parts: Mapping[str, float]
    """Bytes of that worker's memory by the names of ``MEMORY_PARTS``; empty if they were not measured."""
    worker: int | None
    """The worker with this peak, where there are several."""


class PeakSums:
    """The largest peak of the events of epochs and ends, event by event."""

    def __init__(self) -> None:
        self._largest: dict[str, Any] | None = None
        self._reserved: float | None = None

    def add(self, event: Event) -> None:
        """Take a valid event of any kind."""
        memory = event.get("memory") if event["event"] in ("epoch", "end") else None
        if not memory:
            return
        if self._largest is None or memory["allocated"] > self._largest["allocated"]:
            self._largest = memory
        reserved = memory.get("reserved")
        if is_finite_number(reserved):
            self._reserved = max(reserved, reserved if self._reserved is None else self._reserved)

    def peak(self) -> PeakMemory | None:
        """Return the largest peak; None if nothing was measured."""
        largest = self._largest
        if largest is None:
            return None
        found = largest.get("parts")
        parts = found if isinstance(found, dict) else {}
        worker = largest.get("worker")
        return PeakMemory(
            allocated=largest["allocated"],
            reserved=self._reserved,
            parts={name: parts[name] for name in MEMORY_PARTS if is_finite_number(parts.get(name))},
            worker=worker if isinstance(worker, int) else None,
        )

    def to_json(self) -> list[Any]:
        return [self._largest, self._reserved]

    def load(self, content: Sequence[Any]) -> None:
        """Continue from what ``to_json`` returned."""
        largest, reserved = content
        if largest is not None and not is_finite_number(largest["allocated"]):
            raise ValueError(f"{largest!r} is no measurement of the memory")
        self._largest = largest
        self._reserved = None if reserved is None else float(reserved)
