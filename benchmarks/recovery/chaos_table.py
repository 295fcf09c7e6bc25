"""The cost of a killed host, from the record of a run and the times of the kills: pure functions
over events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.support import markdown_table
from harness.faults.fault_schedule import FiredFault
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import of_kind

LATE_STEPS = 3  # that may still be recorded between a kill and its detection
GAPS_S = (1, 5, 15)
PARTS = ("detect_seconds", "regroup_seconds", "restore_seconds", "replay_seconds", "total_seconds")


@dataclass(frozen=True)
class Cost:
    """The cost of one kill, in seconds from the kill. None where the run ended first."""

    fired: FiredFault
    next_step: float | None
    """To the first step done after the kill."""
    back: float | None
    """To the first step that had not been done before."""
    recovery: Event | None
    """The recovery event that belongs to the kill."""


def costs(fired: Sequence[FiredFault], events: Sequence[Event]) -> list[Cost]:
    return [
        Cost(kill, _next_step(kill.time, events), _back(kill.time, events), _recovery(kill.time, events))
        for kill in fired
    ]


def _next_step(killed: float, events: Sequence[Event]) -> float | None:
    _, after = _around(killed, events)
    return after[0]["time"] - killed if after else None


def _back(killed: float, events: Sequence[Event]) -> float | None:
    before, after = _around(killed, events)
    highest = max((event["step"] for event in before), default=0)
    return next((event["time"] - killed for event in after if event["step"] > highest), None)


def _around(killed: float, events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """Return the steps before a kill took effect, and those after.

    Steps that were done already may be recorded after the kill; they stand before the failure
    event. A host that was killed before its group was formed has no failure event of its own: then
    many steps stand before the next one.
    """
    place = next(
        (at for at, event in enumerate(events) if event["event"] == "failure" and event["time"] >= killed),
        len(events),
    )
    before = of_kind(events[:place], "step")
    after = [event for event in of_kind(events[place:], "step") if event["time"] > killed]
    late = [event for event in before if event["time"] > killed]
    if len(late) > LATE_STEPS:
        return before[: len(before) - len(late)], late
    return before, after


def _recovery(killed: float, events: Sequence[Event]) -> Event | None:
    """Return the first recovery after the kill.

    Of several events of one attempt the last is complete.
    """
    recoveries = of_kind(events, "recovery")
    first = next((event for event in recoveries if event["time"] > killed), None)
    if first is None:
        return None
    return [event for event in recoveries if event["attempt"] == first["attempt"]][-1]


def goodput(events: Sequence[Event]) -> float | None:
    """Return the part of the time from the first step to the last that went into steps that count.

    A step counts as long as it took the last time it was done, at most twice the median: more than
    that is a recovery, or the machine.
    """
    steps = of_kind(events, "step")
    if len(steps) < 2:
        return None
    usual = median(event["seconds"] for event in steps)
    last = {event["step"]: min(event["seconds"], 2 * usual) for event in steps}
    return min(1.0, sum(last.values()) / (steps[-1]["time"] - steps[0]["time"]))


def time_kept(kills: Sequence[Cost], events: Sequence[Event]) -> float | None:
    """Return the part of the time from the first step to the last that no kill cost.

    A kill costs the time until the run is past its former step. A kill during the recovery from
    another one costs only what it adds.
    """
    steps = of_kind(events, "step")
    if len(steps) < 2:
        return None
    lost = 0.0
    until = 0.0
    for cost in kills:
        begin = max(until, cost.fired.time)
        end = cost.fired.time + (cost.back or 0.0)
        lost += max(0.0, end - begin)
        until = max(until, end)
    return 1 - lost / (steps[-1]["time"] - steps[0]["time"])


def spread(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    """Return median, 95th percentile (the value that 95% do not exceed) and worst."""
    present = sorted(value for value in values if value is not None)
    if not present:
        return None
    return median(present), present[math.ceil(0.95 * len(present)) - 1], present[-1]


def recovery_table(kills: Sequence[Cost]) -> str:
    """Return a row for each kill."""
    names = [part.removesuffix("_seconds") for part in PARTS]
    columns = ["kill", "rank", "phase", "at step", *names, "kill to next step", "lost steps", "from"]
    rows: list[list[object]] = []
    for number, cost in enumerate(kills, 1):
        rank = "–" if cost.fired.rank is None else cost.fired.rank
        rows.append([number, rank, cost.fired.phase, cost.fired.step, *_parts(cost)])
    return markdown_table(columns, rows)


def _parts(cost: Cost) -> list[str]:
    recovery: dict[str, Any] = cost.recovery or {}
    return [
        *(_seconds(recovery.get(part)) for part in PARTS),
        _seconds(cost.next_step),
        str(recovery.get("lost_steps", "–")),
        str(recovery.get("source", "–")),
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def spread_table(kills: Sequence[Cost], plain: Sequence[float]) -> str:
    """Return median, 95th percentile and worst of each part, and of the kills of plain Ray Train."""
    rows = [_spread_row("kill to next step done", [cost.next_step for cost in kills])]
    recoveries = [cost.recovery or {} for cost in kills]
    rows += [
        _spread_row(part.replace("_", " "), [recovery.get(part) for recovery in recoveries])
        for part in (*PARTS, "lost_steps")
    ]
    if plain:
        rows.append(_spread_row("plain TorchTrainer, kill to next step done", list(plain)))
    return markdown_table(["seconds", "kills", "median", "p95", "worst"], rows)


def _spread_row(name: str, values: Sequence[float | None]) -> list[object]:
    present = sum(value is not None for value in values)
    return [name, present, *map(_seconds, spread(values) or (None, None, None))]


def by_phase(kills: Sequence[Cost]) -> str:
    """Return the time from kill to next step, by the phase in which the kill came."""
    return _grouped(kills, lambda cost: cost.fired.phase, "phase")


def by_rank(kills: Sequence[Cost]) -> str:
    return _grouped(kills, lambda cost: f"rank {cost.fired.rank}", "victim")


def by_gap(kills: Sequence[Cost]) -> str:
    """Group by the time since the kill before: soon after one there is no standby yet."""
    gaps = {later.fired: later.fired.time - earlier.fired.time for earlier, later in pairwise(kills)}

    def key(cost: Cost) -> str:
        gap = gaps.get(cost.fired)
        if gap is None:
            return "first"
        return next((f"under {limit} s" for limit in GAPS_S if gap < limit), f"{GAPS_S[-1]} s and more")

    return _grouped(kills, key, "since the kill before")


def _grouped(kills: Sequence[Cost], key: Callable[[Cost], str], title: str) -> str:
    names = sorted({key(cost) for cost in kills})
    rows: list[list[object]] = []
    for name in names:
        values = [cost.next_step for cost in kills if key(cost) == name]
        rows.append([name, len(values), *map(_seconds, spread(values) or (None, None, None))])
    return markdown_table([title, "kills", "median", "p95", "worst"], rows)
