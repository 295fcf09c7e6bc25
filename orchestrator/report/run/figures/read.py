"""Reader of a run folder: everything in the report comes from here, without the process that ran.

The run may have been killed, have failed at once or still be running, so every file except the
events may be missing. A file that exists but cannot be read is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar

import yaml

from orchestrator.config.reading.safe_yaml import safe_content
from orchestrator.errors import UserError
from orchestrator.record.events import kinds
from orchestrator.record.events.decoding import finite
from orchestrator.record.events.kinds import Event, decode_event
from orchestrator.record.events.sessions import (
    by_step,
    has_trained,
    last_end,
    last_of,
    of_type,
    split_sessions,
)
from orchestrator.record.experts.expert_changes import expert_changes, expert_graphs
from orchestrator.record.files.reading import is_shallow, stream_events
from orchestrator.record.summary.index import read_fold
from orchestrator.record.summary.totals import Totals
from orchestrator.storage.local_files import read_regular

T = TypeVar("T")
E = TypeVar("E", bound=Event)

EVENTS = "events.jsonl"
UNFINISHED = "unfinished"

_NUM_LISTED = 6


def section(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a mapping within a JSON or YAML tree; empty if it is missing or of another type."""
    part = tree.get(name)
    return part if isinstance(part, dict) else {}


def entries(tree: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the mappings of a list within a JSON tree; empty if it is missing or of another type."""
    part = tree.get(name)
    return [item for item in part if isinstance(item, dict)] if isinstance(part, list) else []


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder. In the lists by step a replayed step occurs once, by its last line."""

    folder: Path
    config: dict[str, Any]
    plan: dict[str, Any]
    summary: dict[str, Any]
    events: list[Event]
    """All that count of a short run. Of a long one the few that plots need; ``totals`` has sums over all."""
    totals: Totals
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """Results of functions with ``cached_on_record``."""

    def of(self, cls: type[E]) -> list[E]:
        return of_type(self.events, cls)

    @cached_property
    def steps(self) -> list[kinds.Step]:
        return by_step(self.events, kinds.Step)

    @cached_property
    def evaluations(self) -> list[kinds.Evaluation]:
        return by_step(self.events, kinds.Evaluation)

    @cached_property
    def phases(self) -> list[kinds.Phases]:
        return by_step(self.events, kinds.Phases)

    @cached_property
    def exchanges(self) -> list[kinds.Exchange]:
        return by_step(self.events, kinds.Exchange)

    @cached_property
    def loads(self) -> list[kinds.Load]:
        return by_step(self.events, kinds.Load)

    @cached_property
    def expert_changes(self) -> list[kinds.ExpertChange]:
        """The changes of the experts that count, in order."""
        return expert_changes(self.events)

    @cached_property
    def expert_graphs(self) -> list[kinds.ExpertGraph]:
        """The graphs of the experts in order of steps."""
        return expert_graphs(self.events)

    @cached_property
    def monitors(self) -> list[kinds.Monitor]:
        return by_step(self.events, kinds.Monitor)

    @cached_property
    def epochs(self) -> list[kinds.Epoch]:
        """The last line of each epoch, in order: a replayed epoch counts once."""
        last = {event.epoch: event for event in self.of(kinds.Epoch)}
        return [last[epoch] for epoch in sorted(last)]

    @cached_property
    def sessions(self) -> list[list[Event]]:
        """The events from each start or resume by the user; restarts of workers begin no session."""
        return split_sessions(self.events)

    @cached_property
    def start(self) -> kinds.Start:
        return last_of(self.events, kinds.Start) or kinds.Start()

    @cached_property
    def end(self) -> kinds.End | None:
        """The end of the last session that trained; an earlier one says nothing about the present state."""
        return last_end(self.sessions)

    @cached_property
    def final(self) -> kinds.Final | None:
        """The step whose weights the last session ended with; None if it has not ended."""
        return last_of(self.sessions[-1], kinds.Final) if self.sessions else None

    @cached_property
    def status(self) -> str:
        """completed, stopped, failed, or unfinished: killed, or still running."""
        if self.end is not None:
            return self.end.status
        # With several sessions the summary may be that of an earlier one.
        if len(self.sessions) <= 1 and self.summary.get("status"):
            return str(self.summary["status"])
        return UNFINISHED

    @cached_property
    def name(self) -> str:
        return str(section(self.config, "run").get("name") or self.folder.resolve().name)

    def fact(self, name: str) -> Any:
        """Return a fact of the run from the start event, else the summary, the plan's hardware or
        the config."""
        for source in (vars(self.start), self.summary, section(self.plan, "hardware"), self.config):
            if source.get(name) is not None:
                return source[name]
        return None

    def setting(self, part: str, name: str) -> Any:
        """Return the value a setting had: the plan's choice, else the configured value."""
        choice = section(section(self.plan, "choices"), name).get("value")
        return choice if choice is not None else section(self.config, part).get(name)

    def takes(self, name: str) -> bool:
        """Return whether the run can take a setting of its model, experts, data or optimizer."""
        taken = section(self.plan, "model").get("settings")
        return isinstance(taken, list) and name in taken

    def rejects(self, name: str, option: str) -> bool:
        """Return whether the plan has considered an option and not chosen it."""
        choice = section(section(self.plan, "choices"), name)
        return any(rejected.get("option") == option for rejected in entries(choice, "rejected"))

    @cached_property
    def on_gpu(self) -> bool:
        device = self.fact("device")
        if device is None:
            return any(event.devices for event in self.monitors)
        return not str(device).lower().startswith("cpu")

    @cached_property
    def recoveries(self) -> list[kinds.Recovery]:
        return self.of(kinds.Recovery)

    @cached_property
    def resumes(self) -> list[kinds.Resume]:
        """Resumes by the user: those before the first step of a session. Recoveries read checkpoints too."""
        ends = kinds.Resume | kinds.Failure
        firsts: list[Event | None] = []
        for session in self.sessions:
            found = (event for event in session if isinstance(event, ends) or has_trained(event))
            firsts.append(next(found, None))
        return [event for event in firsts if isinstance(event, kinds.Resume)]

    @cached_property
    def workers(self) -> int | None:
        """The number of workers at the end of the run; None if it is unknown."""
        recorded = [event.workers for event in self.events if isinstance(event, kinds.Start | kinds.Recovery)]
        known = [count for count in (*recorded, self.summary.get("workers")) if isinstance(count, int)]
        return known[-1] if known else None

    @cached_property
    def replayed_steps(self) -> int:
        """The number of step lines written again after a restart: work that was done twice."""
        return self.totals.num_recorded_steps - self.totals.num_steps

    @cached_property
    def seconds(self) -> float | None:
        """The duration of all sessions, without the pauses between them."""
        recorded = finite(self.summary.get("seconds"))
        if recorded is not None and len(self.sessions) <= 1:
            return recorded
        durations = [_duration(session) for session in self.sessions]
        return sum(durations) if any(durations) else None


def cached_on_record(function: Callable[[RunRecord], T]) -> Callable[[RunRecord], T]:
    """Cache a function's result on the record: text, page and verdict share figures of up to
    100,000 steps."""

    @wraps(function)
    def cached(record: RunRecord) -> T:
        if function not in record.cache:
            record.cache[function] = function(record)
        return record.cache[function]

    return cached


def read_run_record(folder: Path, whole: bool = False) -> RunRecord:
    """Read a run folder; a UserError says what is missing or which file cannot be read.

    ``whole``: with all events of a long run too, whose memory they may fill."""
    _check_folder(folder)
    fold = read_fold(folder / EVENTS)
    events = map(decode_event, stream_events(folder / EVENTS)) if whole else fold.events()
    return RunRecord(
        folder=folder,
        config=read_tree(folder / "config.yaml", safe_content),
        plan=read_tree(folder / "plan.json", json.loads),
        summary=read_tree(folder / "summary.json", json.loads),
        events=[event for event in events if event is not None],
        totals=fold.totals,
    )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {problem}; give the folder of a run, such as results/NAME")
    if (folder / EVENTS).is_file():
        return
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    content = ", ".join(names[:_NUM_LISTED])
    if len(names) > _NUM_LISTED:
        content += f" and {len(names) - _NUM_LISTED} more"
    runs = sorted(path.parent.name for path in folder.glob(f"*/{EVENTS}"))
    hint = f"\nRuns inside it: {', '.join(runs[:_NUM_LISTED])}; give one of these." if runs else ""
    raise UserError(
        f"{folder} holds no {EVENTS}, which every run writes; it holds {content or 'nothing'}.\n"
        f"A report needs a run folder: give the one a training wrote (results/NAME, or its --run-dir).{hint}"
    )


def read_tree(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Return the mapping in a file; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        tree = parse(read_regular(path).decode())
        if not is_shallow(tree):
            raise ValueError("it is nested too deeply")
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        # ValueError includes broken JSON and broken UTF-8.
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} cannot be read: {reason}\nRepair the file, or move it away: the report does not need it."
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(
            f"{path} holds a {type(tree).__name__}; a mapping of names to values is needed.\n"
            "Repair the file, or move it away: the report does not need it."
        )
    return tree


def _duration(session: list[Event]) -> float:
    times = [event.time for event in session if event.time is not None]
    return max(times) - min(times) if times else 0.0
