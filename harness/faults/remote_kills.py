"""Runs in a remote folder that are killed at random moments and resumed on "another machine": in
another, empty folder."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.hosts.ranks import Ranks, start_ranks
from harness.runs.cli_runs import run_in_rank
from harness.runs.small_flags import CPU, SMALL
from harness.storage.object_server import ObjectServer
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.storage.folder import RemoteFolder
from orchestrator.train.remote.checkpoints import RemoteCheckpoints

_NEVER = 10**6
_MORE_STEPS = 20
_MAX_SECONDS = 120.0
_EARLY = 0.3
"""The share of kills that do not wait for an upload: while a run starts, downloads or trains."""


@dataclass
class KilledRuns:
    """What the killed runs have told, and where the next ones began."""

    acknowledged: int = 0
    """The newest step that any of them has acknowledged."""
    begun_at: list[tuple[int, int]] = field(default_factory=list)
    """For each start after a kill: the newest step acknowledged before, and the step it began at."""
    losses: dict[int, set[float]] = field(default_factory=dict)
    """All losses recorded for a step, on any machine: more than one would be a wrong one."""

    def add(self, events: list[Event]) -> None:
        for event in of_kind(events, "step"):
            self.losses.setdefault(event["step"], set()).add(event["loss"])
        steps = [event["step"] for event in of_kind(events, "upload")]
        self.acknowledged = max([self.acknowledged, *steps])


def kill_and_resume(server: ObjectServer, folder: Path, num_kills: int, seed: int) -> KilledRuns:
    """Train, kill so many times, and let the last run end. The caller's environment leads to the server."""
    generator = random.Random(seed)
    url = server.url(f"killed-{seed}-{time.time_ns()}")
    runs = KilledRuns()
    for number in range(num_kills + 1):
        machine = folder / f"machine{number}"
        machine.mkdir(parents=True)
        began_at = time.time()
        is_last = number == num_kills
        steps = _newest_step(url) + _MORE_STEPS if is_last else _NEVER
        arguments = _arguments(url, steps)
        with start_ranks(run_in_rank, 1, arguments, str(machine), server.environment) as ranks:
            if is_last:
                ((code, output),) = ranks.results(_MAX_SECONDS)
                assert code == 0, output
            else:
                _kill_at_random(ranks, machine, began_at, generator)
        events = _events(machine)
        # The record of a machine holds the starts of those before it too; it may not have come that far.
        own_starts = _own(events, "start", began_at)
        if number and own_starts:
            runs.begun_at.append((runs.acknowledged, own_starts[0]["step"]))
        runs.add(events)
    return runs


def _arguments(url: str, max_steps: int) -> list[str]:
    flags = {
        "--samples": 512,
        "--epochs": _NEVER,
        "--max-steps": max_steps,
        "--checkpoint-every": 40,
        "--keep": 2,
        "--evaluate-every": _NEVER,
        "--schedule": "constant",
        "--warmup-steps": 0,
        "--gpu-log-interval": 0,
        "--log-every": 10,
        "--run-dir": url,
        "--resume": "auto",
    }
    texts = [text for name, value in flags.items() for text in (name, str(value))]
    return ["train", *SMALL, *CPU, *texts, "--trackers"]


def _kill_at_random(ranks: Ranks, machine: Path, began_at: float, generator: random.Random) -> None:
    _wait_until(lambda: bool(_events(machine)), ranks)
    if generator.random() >= _EARLY:
        _wait_until(lambda: bool(_own(_events(machine), "upload", began_at)), ranks)
    time.sleep(generator.uniform(0.0, 1.0))
    ranks.kill(0)
    ranks.results(_MAX_SECONDS)


def _own(events: list[Event], kind: str, began_at: float) -> list[Event]:
    """Return the events of this machine: the record that it downloaded holds older ones."""
    return [event for event in of_kind(events, kind) if event["time"] > began_at]


def _wait_until(condition: Callable[[], bool], ranks: Ranks) -> None:
    deadline = time.monotonic() + _MAX_SECONDS
    while not condition():
        assert ranks.processes[0].is_alive(), "the run has ended before it was killed"
        assert time.monotonic() < deadline, "the run does not come on"
        time.sleep(0.05)


def _events(machine: Path) -> list[Event]:
    """Return the events of the one run folder of a machine; none before there is one."""
    return [event for path in machine.glob("results/*/events.jsonl") for event in read_events(path)]


def _newest_step(url: str) -> int:
    published = RemoteCheckpoints(RemoteFolder(url) / "checkpoints").newest_first()
    return published[0].step if published else 0
