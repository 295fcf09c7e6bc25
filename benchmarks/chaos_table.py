"""What a killed host cost, from the record of a run and the times of the kills: pure functions over events."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.support import markdown_table
from orchestrator.record.events import Event, of_kind
from tests.support.faults import Fired

STRAGGLERS = 3  # steps that may still be recorded between a kill and the moment it is noticed
GAPS = (1, 5, 15)  # seconds
PARTS = ("detect_seconds", "regroup_seconds", "restore_seconds", "replay_seconds", "total_seconds")


@dataclass(frozen=True)
class Cost:
    """One kill. ``next_step``: seconds from the kill to the first step done after it; ``back``: to the first step that was not done
    before; None where the run ended first. ``told`` is the recovery event that goes with it."""

    fired: Fired
    next_step: float | None
    back: float | None
    told: Event | None


def costs(fired: Sequence[Fired], events: Sequence[Event]) -> list[Cost]:
    return [
        Cost(one, _next_step(one.time, events), _back(one.time, events), _recovery(one.time, events))
        for one in fired
    ]


def _next_step(killed: float, events: Sequence[Event]) -> float | None:
    _, after = _around(killed, events)
    return after[0]["time"] - killed if after else None


def _back(killed: float, events: Sequence[Event]) -> float | None:
    """Until the run is past where it was."""
    before, after = _around(killed, events)
    highest = max((event["step"] for event in before), default=0)
    return next((event["time"] - killed for event in after if event["step"] > highest), None)


def _around(killed: float, events: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """Steps before a kill took effect and after. Those that were done already may be recorded after the kill: they lie before the
    failure. A host that was killed before its group stood has no failure of its own: then many steps lie before the next one."""
    place = next(
        (at for at, event in enumerate(events) if event["event"] == "failure" and event["time"] >= killed),
        len(events),
    )
    before, after = (
        of_kind(events[:place], "step"),
        [event for event in of_kind(events[place:], "step") if event["time"] > killed],
    )
    late = [event for event in before if event["time"] > killed]
    return (before[: len(before) - len(late)], late) if len(late) > STRAGGLERS else (before, after)


def _recovery(killed: float, events: Sequence[Event]) -> Event | None:
    """The first one that was told after the kill, in its last words."""
    first = next((event for event in of_kind(events, "recovery") if event["time"] > killed), None)
    if first is None:
        return None
    return [event for event in of_kind(events, "recovery") if event["attempt"] == first["attempt"]][-1]


def goodput(events: Sequence[Event]) -> float | None:
    """Of the time from the first step to the last, the part that went into steps that count: each as long as it took the last time it
    was done, at most twice the median (what is more is a recovery, or the machine)."""
    steps = of_kind(events, "step")
    if len(steps) < 2:
        return None
    usual = median(event["seconds"] for event in steps)
    last = {event["step"]: min(event["seconds"], 2 * usual) for event in steps}
    return min(1.0, sum(last.values()) / (steps[-1]["time"] - steps[0]["time"]))


def kept(found: Sequence[Cost], events: Sequence[Event]) -> float | None:
    """The part of the time from the first step to the last that was not lost between a kill and being past it again. Kills that fall
    into the recovery from another cost what is left of it once."""
    steps = of_kind(events, "step")
    if len(steps) < 2:
        return None
    lost, until = 0.0, 0.0
    for cost in found:
        begin, end = max(until, cost.fired.time), cost.fired.time + (cost.back or 0.0)
        lost, until = lost + max(0.0, end - begin), max(until, end)
    return 1 - lost / (steps[-1]["time"] - steps[0]["time"])


def spread(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    """Median, 95th percentile (the value that so many do not exceed) and worst."""
    there = sorted(value for value in values if value is not None)
    return (median(there), there[math.ceil(0.95 * len(there)) - 1], there[-1]) if there else None


def recovery_table(found: Sequence[Cost]) -> str:
    """A row for each kill."""
    named = [part.removesuffix("_seconds") for part in PARTS]
    columns = ["kill", "rank", "phase", "at step", *named, "kill to next step", "lost steps", "from"]
    rows = [
        [
            number,
            "–" if cost.fired.rank is None else cost.fired.rank,
            cost.fired.phase,
            cost.fired.step,
            *_parts(cost),
        ]
        for number, cost in enumerate(found, 1)
    ]
    return markdown_table(columns, rows)


def _parts(cost: Cost) -> list[str]:
    told: dict[str, Any] = cost.told or {}
    return [
        *(_s(told.get(part)) for part in PARTS),
        _s(cost.next_step),
        str(told.get("lost_steps", "–")),
        str(told.get("source", "–")),
    ]


def _s(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def spread_table(found: Sequence[Cost], plain: Sequence[float]) -> str:
    """Seconds: median, 95th percentile and worst of each part, and of the plain peer's kills beside them."""
    named: list[tuple[str, Sequence[float | None]]] = [
        ("kill to next step done", [cost.next_step for cost in found])
    ]
    named += [(part.replace("_", " "), [(cost.told or {}).get(part) for cost in found]) for part in PARTS]
    named += [("lost steps", [(cost.told or {}).get("lost_steps") for cost in found])]
    named += [("plain TorchTrainer, kill to next step done", list(plain))] if plain else []
    rows = [
        [name, len([v for v in values if v is not None]), *map(_s, spread(values) or (None,) * 3)]
        for name, values in named
    ]
    return markdown_table(["seconds", "kills", "median", "p95", "worst"], rows)


def by_phase(found: Sequence[Cost]) -> str:
    """Kill to next step, by the moment that the kill came at."""
    return _grouped(found, lambda cost: cost.fired.phase, "phase")


def by_rank(found: Sequence[Cost]) -> str:
    return _grouped(found, lambda cost: f"rank {cost.fired.rank}", "victim")


def by_gap(found: Sequence[Cost]) -> str:
    """Soon after another kill there is no spare yet: its place is taken when another process has been started."""
    times = [cost.fired.time for cost in found]
    gaps = {cost.fired: at - before for cost, at, before in zip(found[1:], times[1:], times, strict=False)}

    def key(cost: Cost) -> str:
        gap = gaps.get(cost.fired)
        return (
            "first"
            if gap is None
            else next((f"under {limit} s" for limit in GAPS if gap < limit), f"{GAPS[-1]} s and more")
        )

    return _grouped(found, key, "since the kill before")


def _grouped(found: Sequence[Cost], key: Callable[[Cost], str], title: str) -> str:
    names = sorted({key(cost) for cost in found})
    groups = {name: [cost.next_step for cost in found if key(cost) == name] for name in names}
    rows = [[name, len(values), *map(_s, spread(values) or (None,) * 3)] for name, values in groups.items()]
    return markdown_table([title, "kills", "median", "p95", "worst"], rows)
