"""The peak memory of a run and its parts, from the events of the run.

The summary, the text and the page of the report all take them from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.record.files.events import Event
from orchestrator.record.files.validate import is_finite_number, is_valid
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


def peak_memory(recorded: Iterable[Event]) -> PeakMemory | None:
    """Return the largest peak that the events of epochs and ends have; None if nothing was measured."""
    kinds = ("epoch", "end")
    events = [event for event in recorded if event["event"] in kinds and event.get("memory")]
    measured = [event["memory"] for event in events if is_valid(event)]
    if not measured:
        return None
    largest = max(measured, key=lambda memory: memory["allocated"])
    reserved = [memory["reserved"] for memory in measured if is_finite_number(memory.get("reserved"))]
    found = largest.get("parts")
    parts = found if isinstance(found, dict) else {}
    worker = largest.get("worker")
    return PeakMemory(
        allocated=largest["allocated"],
        reserved=max(reserved, default=None),
        parts={name: parts[name] for name in MEMORY_PARTS if is_finite_number(parts.get(name))},
        worker=worker if isinstance(worker, int) else None,
    )
