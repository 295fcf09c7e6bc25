"""A run folder, read once: everything the report says comes from here, and nothing of it needs the process that ran.

A folder may stem from a run that was killed, failed at once or is still going, so every part but the events may be
missing. What is there but cannot be read is the reader's business to know: it is named, not skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar

import yaml

from orchestrator.config.safe_yaml import safe_content
from orchestrator.errors import UserError
from orchestrator.record.events import Event, by_step, is_shallow, of_kind, read_events, split_sessions

T = TypeVar("T")

EVENTS = "events.jsonl"
UNFINISHED = "unfinished"

_STEPPED = frozenset({"step", "phases", "exchange", "load", "evaluate", "monitor"})


def number(value: Any) -> float | None:
    """A figure of the record, or None. JSON cannot carry nan and inf: they come as text."""
    if type(value) is float:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else None
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def finite(value: Any) -> float | None:
    """Like ``number``, without the values no axis can show."""
    figure = number(value)
    return figure if figure is not None and math.isfinite(figure) else None


def section(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of a JSON or YAML tree; empty when it is missing or of another shape."""
    part = tree.get(name)
    return part if isinstance(part, dict) else {}


def entries(tree: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects of a list in a JSON tree; empty when it is missing or of another shape."""
    part = tree.get(name)
    return [item for item in part if isinstance(item, dict)] if isinstance(part, list) else []


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds. Replayed steps are already resolved in the lists that go by step."""

    folder: Path
    config: dict[str, Any]
    plan: dict[str, Any]
    summary: dict[str, Any]
    events: list[Event]
    answers: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What ``remembered`` functions said of this record."""

    def of(self, kind: str) -> list[Event]:
        return of_kind(self.events, kind)

    @cached_property
    def steps(self) -> list[Event]:
        return by_step(self.events)

    @cached_property
    def evaluations(self) -> list[Event]:
        return by_step(self.events, "evaluate")

    @cached_property
    def phases(self) -> list[Event]:
        return by_step(self.events, "phases")

    @cached_property
    def exchanges(self) -> list[Event]:
        return by_step(self.events, "exchange")

    @cached_property
    def loads(self) -> list[Event]:
        return by_step(self.events, "load")

    @cached_property
    def monitors(self) -> list[Event]:
        return by_step(self.events, "monitor")

    @cached_property
    def epochs(self) -> list[Event]:
        """The last line of each epoch, in order: a replayed epoch counts once."""
        last = {epoch: event for event in self.of("epoch") if isinstance(epoch := event.get("epoch"), int)}
        return [last[epoch] for epoch in sorted(last)]

    @cached_property
    def sessions(self) -> list[list[Event]]:
        """The events of each time the run was begun or taken up; workers that were restarted on the way make no new one."""
        return split_sessions(self.events)

    @cached_property
    def start(self) -> Event:
        starts = self.of("start")
        return starts[-1] if starts else {"event": "start"}

    @cached_property
    def end(self) -> Event | None:
        """The end of the last session; an earlier session's end says nothing about how the run stands now."""
        ends = of_kind(self.sessions[-1], "end") if self.sessions else []
        return ends[-1] if ends else None

    @cached_property
    def status(self) -> str:
        """completed, stopped, failed, or unfinished: killed, or still running."""
        if self.end is not None:
            return str(self.end.get("status", UNFINISHED))
        # With several sessions the summary may be an earlier one's.
        if len(self.sessions) <= 1 and self.summary.get("status"):
            return str(self.summary["status"])
        return UNFINISHED

    @cached_property
    def name(self) -> str:
        return str(section(self.config, "run").get("name") or self.folder.resolve().name)

    def fact(self, name: str) -> Any:
        """A fact of the run as the start event has it, else the summary, else the plan's hardware."""
        for source in (self.start, self.summary, section(self.plan, "hardware"), self.config):
            if source.get(name) is not None:
                return source[name]
        return None

    def setting(self, part: str, name: str) -> Any:
        """What a setting was in the end: the plan's choice where there is one, else what was asked."""
        choice = section(section(self.plan, "choices"), name).get("value")
        return choice if choice is not None else section(self.config, part).get(name)

    @cached_property
    def on_gpu(self) -> bool:
        device = self.fact("device")
        if device is None:
            return any(event.get("devices") for event in self.monitors)
        return not str(device).lower().startswith("cpu")

    @cached_property
    def recoveries(self) -> list[Event]:
        return self.of("recovery")

    @cached_property
    def resumes(self) -> list[Event]:
        """Where the run was taken up by its user: before the first step of a sitting. Recoveries read checkpoints too."""
        found = []
        for session in self.sessions:
            first = next(
                (event for event in session if event["event"] in ("resume", "step", "failure")), None
            )
            found += [first] if first is not None and first["event"] == "resume" else []
        return found

    @cached_property
    def workers(self) -> int | None:
        """How many worked on the run in the end; None where it is not told."""
        told = [event.get("workers") for event in self.events if event["event"] in ("start", "recovery")]
        counts = [
            count
            for count in (*told, self.summary.get("workers"))
            if isinstance(count, int) and not isinstance(count, bool)
        ]
        return counts[-1] if counts else None

    @cached_property
    def replayed_steps(self) -> int:
        """Step lines written again after a restart: work that was done twice."""
        return len(self.of("step")) - len(self.steps)

    @cached_property
    def seconds(self) -> float | None:
        """Time the run took over all its sessions, the pauses between them left out."""
        told = finite(self.summary.get("seconds"))
        if told is not None and len(self.sessions) <= 1:
            return told
        spans = [_span(session) for session in self.sessions]
        return sum(spans) if any(spans) else None


def remembered(ask: Callable[[RunRecord], T]) -> Callable[[RunRecord], T]:
    """Asks once per record: text, page and verdict want the same figures, and a record may have 100,000 steps."""

    @wraps(ask)
    def answer(record: RunRecord) -> T:
        if ask not in record.answers:
            record.answers[ask] = ask(record)
        return record.answers[ask]

    return answer


def read_run_record(folder: Path) -> RunRecord:
    """The record of a run folder; a UserError says what is missing or which file cannot be read."""
    _check_folder(folder)
    return RunRecord(
        folder=folder,
        config=_tree(folder / "config.yaml", safe_content),
        plan=_tree(folder / "plan.json", json.loads),
        summary=_tree(folder / "summary.json", json.loads),
        events=[event for event in read_events(folder / EVENTS) if _has_step(event)],
    )


def _has_step(event: Event) -> bool:
    """Whether an event that goes by step says which: one without would stop every reader."""
    step = event.get("step")
    return event["event"] not in _STEPPED or (
        isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**53
    )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {what}; give the folder of a run, such as results/NAME")
    if (folder / EVENTS).is_file():
        return
    found = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    inside = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
    runs = sorted(path.parent.name for path in folder.glob(f"*/{EVENTS}"))
    hint = f"\nRuns inside it: {', '.join(runs[:6])}; give one of these." if runs else ""
    raise UserError(
        f"{folder} holds no {EVENTS}, the record every run writes; found {inside or 'nothing'}.\n"
        f"A report needs a run folder: give the one a training wrote (results/NAME, or its --run-dir).{hint}"
    )


def _tree(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The object a file holds; empty when there is no file."""
    if not path.exists():
        return {}
    if not path.is_file():
        raise UserError(
            f"{path} is no file; a report reads what a run wrote.\nMove it away: the report does without it."
        )
    try:
        tree = parse(path.read_text(encoding="utf-8"))
        if not is_shallow(tree):
            raise ValueError("it is nested too deeply")
    except (
        ValueError,
        yaml.YAMLError,
        RecursionError,
    ) as error:  # ValueError covers broken JSON and broken UTF-8
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} cannot be read: {reason}\nMend the file, or move it away: the report does without it."
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(
            f"{path} holds a {type(tree).__name__}; a mapping of names to values is needed.\nMend the file, or move it away."
        )
    return tree


def _span(session: list[Event]) -> float:
    times = [time for event in session if (time := finite(event.get("time"))) is not None]
    return max(times) - min(times) if times else 0.0
