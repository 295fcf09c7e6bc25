"""Checks of a run that was disturbed by faults. Each returns the problems that it found, as text."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from harness.faults.fault_injector import is_alive
from harness.faults.fault_schedule import FaultFolder
from harness.hosts.cluster import RayCluster, connected
from harness.runs.cli_runs import read_summary
from harness.runs.records import by_step, decoded
from orchestrator.checkpoint.files import KINDS, load
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.experts.expert_changes import expert_changes
from orchestrator.record.files.reading import of_kind, read_events

_EXIT_SECONDS = 10.0
"""How long processes may take to exit after the run."""
_DEAD_NODE_SECONDS = 60.0
"""How long Ray may take to notice a dead node; until then the cluster's state cannot be read."""
_UNREADABLE = "the state of the cluster cannot be read"
_DETACHED_ACTORS = ("Coordinator", "_StatsActor")
"""Actors which Ray's libraries keep for the whole cluster; another test may have started them."""


# Steps, losses and weights


def check_steps(events: Sequence[Event], steps: int) -> list[str]:
    """Every step is recorded, and none beyond the last."""
    expected = set(range(1, steps + 1))
    recorded = {event["step"] for event in by_step(events)}
    problems: list[str] = []
    if missing := sorted(expected - recorded):
        problems.append(f"missing steps {missing[:10]}")
    if unexpected := sorted(recorded - expected):
        problems.append(f"unexpected steps {unexpected[:10]}")
    return problems


def check_losses(events: Sequence[Event], calm: Sequence[Event], relative: float = 0.0) -> list[str]:
    """Losses and gradient norms equal those of the undisturbed run: to the last bit, or within a
    tolerance."""
    pairs = list(zip(by_step(events), by_step(calm), strict=False))
    differing = [
        f"step {step['step']}: {name} {step[name]!r}, undisturbed {calm_step[name]!r}"
        for step, calm_step in pairs
        for name in ("loss", "grad_norm")
        if abs(step[name] - calm_step[name]) > relative * abs(calm_step[name])
    ]
    if not differing:
        return []
    return [f"{len(differing)} values of {2 * len(pairs)} differ, first: {differing[0]}"]


def newest_checkpoint(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step_*"))


def check_weights(run_dir: Path, calm: Path) -> list[str]:
    """The last checkpoints of two runs are equal bit by bit: weights, buffers and optimizer state."""
    checkpoint = newest_checkpoint(run_dir)
    calm_checkpoint = newest_checkpoint(calm)
    if checkpoint.name != calm_checkpoint.name:
        return [f"the last checkpoint is {checkpoint.name}, undisturbed {calm_checkpoint.name}"]
    problems: list[str] = []
    contents = load(checkpoint)
    calm_contents = load(calm_checkpoint)
    for kind in sorted(KINDS):
        tensors = contents.tensors[kind]
        calm_tensors = calm_contents.tensors[kind]
        problems += [f"{kind}: {name} is in one only" for name in sorted(set(tensors) ^ set(calm_tensors))]
        for name in sorted(set(tensors) & set(calm_tensors)):
            if _content(tensors[name]) != _content(calm_tensors[name]):
                problems.append(f"{kind}: {name} differs")
    return problems


def _content(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), data


# Each sample once per epoch


def check_sample_counts(events: Sequence[Event], samples: int) -> list[str]:
    """The recorded samples of each epoch add up; the last epoch may be cut short."""
    counts: Counter[int] = Counter()
    for event in by_step(events):
        counts[event["epoch"]] += event["samples"]
    last = max(counts, default=0)
    problems = [
        f"epoch {epoch}: {count} samples of {samples}"
        for epoch, count in counts.items()
        if epoch != last and count != samples
    ]
    if counts[last] > samples:
        problems.append(f"epoch {last}: {counts[last]} samples, more than {samples}")
    return problems


def check_samples(events: Sequence[Event], folder: FaultFolder, samples: int) -> list[str]:
    """By the ranks' own records, each sample is seen once per epoch; the last epoch may be cut
    short."""
    epoch_of = {event["step"]: event["epoch"] for event in by_step(events)}
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for step, ids in samples_by_step(events, folder).items():
        if step in epoch_of:
            seen[epoch_of[step]].update(ids)
    if not seen:
        return ["no record of any sample"]
    last = max(seen)
    problems: list[str] = []
    for epoch, counts in sorted(seen.items()):
        repeated = [number for number, count in counts.items() if count > 1]
        if repeated or (epoch != last and len(counts) != samples):
            problems.append(
                f"epoch {epoch}: {len(counts)} of {samples} samples seen, {len(repeated)} of them "
                f"more than once"
            )
    return problems


def samples_by_step(events: Sequence[Event], folder: FaultFolder) -> dict[int, list[int]]:
    """Return the samples of each step in the attempt that counted."""
    records: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.folder.glob("seen/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # the last line of a killed process may be torn
                record = json.loads(line)
                records[record["step"]].append(record)
    interruptions = [event["time"] for event in events if event["event"] in ("failure", "start")]
    return {step: _last_attempt(of_step, interruptions) for step, of_step in records.items()}


def _last_attempt(records: list[dict[str, Any]], interruptions: list[float]) -> list[int]:
    """Return the samples that count: recorded after the last interruption of the step, and in each
    rank's last attempt."""
    latest = max(record["time"] for record in records)
    since = max((at for at in interruptions if at < latest), default=0.0)
    recent = [record for record in records if record["time"] > since]
    by_rank: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for record in sorted(recent, key=lambda record: record["time"]):
        by_rank[record["rank"]].append(record)
    ids: list[int] = []
    for of_rank in by_rank.values():
        last = of_rank[-1]["pid"], of_rank[-1]["attempt"]
        for record in of_rank:
            if (record["pid"], record["attempt"]) == last:
                ids += record["ids"]
    return ids


def check_survivors(folder: FaultFolder, hosts: int) -> list[str]:
    """Only killed hosts are replaced: all others keep their processes.

    By the ranks' own records, each kill brings at most one process more."""
    pids = {path.stem for path in folder.folder.glob("seen/*.jsonl")}
    num_killed = sum(fault.kind == "sigkill" for fault in folder.fired())
    if len(pids) <= hosts + num_killed:
        return []
    return [f"{len(pids)} processes trained, where {hosts} hosts and {num_killed} kills explain fewer"]


def check_run(run_dir: Path, calm: Path, steps: int, samples: int) -> list[str]:
    """All of the above, for a completed run on as many hosts as the undisturbed one."""
    events = read_events(run_dir / "events.jsonl")
    calm_events = read_events(calm / "events.jsonl")
    status = read_summary(run_dir)["status"]
    return [
        *([] if status == "completed" else [f"status is {status}"]),
        *check_steps(events, steps),
        *check_losses(events, calm_events),
        *check_weights(run_dir, calm),
        *check_sample_counts(events, samples),
        *check_samples(events, FaultFolder.of_run(run_dir), samples),
    ]


def check_experts(events: Sequence[Event], calm: Sequence[Event]) -> list[str]:
    """Experts change as in the undisturbed run, and no id is given to two experts."""
    changes = [_change(vars(change)) for change in expert_changes(decoded(events))]
    calm_changes = [_change(vars(change)) for change in expert_changes(decoded(calm))]
    problems: list[str] = []
    for change, calm_change in zip_longest(changes, calm_changes):
        if change != calm_change:
            problems.append(f"the change {change} is {calm_change} in the undisturbed run")
            break
    given = Counter(
        (change["layer"], expert)
        for change in changes
        if change["change"] in ("born", "merged")
        for expert in change["ids"]
    )
    repeated = [f"layer {layer}, id {expert}" for (layer, expert), count in given.items() if count > 1]
    return [*problems, *(f"an id is given twice: {name}" for name in repeated)]


def _change(event: Event) -> dict[str, Any]:
    """Return the fields of a change that a fault must not alter."""
    return {name: value for name, value in event.items() if name not in ("time", "seconds")}


def recoveries(events: Sequence[Event]) -> list[Event]:
    """Return the last ``recovery`` event of each attempt."""
    return list({event["attempt"]: event for event in of_kind(events, "recovery")}.values())


# Leftovers


def leftover_processes(pids: Iterable[int]) -> list[str]:
    """No process of the run outlives it."""
    alive = [pid for pid in pids if is_alive(pid)]
    deadline = time.monotonic() + _EXIT_SECONDS
    while alive and time.monotonic() < deadline:
        time.sleep(0.1)
        alive = [pid for pid in alive if is_alive(pid)]
    return [f"process {pid} is left: {_command(pid)}" for pid in alive]


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "?"


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def leftover_shared_memory(before: set[str]) -> list[str]:
    """No new shared memory stays that no process has open.

    Other programs on the machine may open some of their own, and other tests may have semaphores of
    multiprocessing: Python removes them when the last process of their tree ends."""

    def found() -> set[str]:
        names = shared_memory() - before - _open_shared_memory()
        return {name for name in names if not name.startswith("sem.mp-")}

    deadline = time.monotonic() + _EXIT_SECONDS
    left = found()
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = found()
    return [f"shared memory {name} is left" for name in sorted(left)]


def _open_shared_memory() -> set[str]:
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            lines = maps.read_text(errors="replace").splitlines()
            mapped = [line.partition("/dev/shm/")[2] for line in lines]
            names |= {name.removesuffix(" (deleted)") for name in mapped if name}
    return names


def leftovers_in_cluster(cluster: RayCluster) -> list[str]:
    """No actor, placement group or object stays in the cluster, once Ray has noticed that the
    driver is gone.

    While a killed node is not noticed, reading the state fails, and is tried again."""
    begun = time.monotonic()
    left = _list_leftovers(cluster)
    while left:
        limit_s = _DEAD_NODE_SECONDS if left[0].startswith(_UNREADABLE) else _EXIT_SECONDS
        if time.monotonic() - begun >= limit_s:
            break
        left = _list_leftovers(cluster)
    return left


def _list_leftovers(cluster: RayCluster) -> list[str]:
    try:
        with connected(cluster):
            return [*_leftover_actors(), *_leftover_placement_groups(), *_leftover_objects(cluster)]
    except Exception as error:  # ConnectionError, RpcError and others, depending on what is unreadable
        return [f"{_UNREADABLE}: {error}"]


def _leftover_actors() -> list[str]:
    from ray._private.state import actors

    # Ray declares the fields of one actor, which it returns where an id is given.
    known: dict[str, Any] = actors()
    return [
        f"actor {actor['ActorClassName']} is {actor['State']}"
        for actor in known.values()
        if actor["State"] != "DEAD" and not any(name in actor["ActorClassName"] for name in _DETACHED_ACTORS)
    ]


def _leftover_placement_groups() -> list[str]:
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return [f"placement group {group['placement_group_id']} is {group['state']}" for group in groups]


def _leftover_objects(cluster: RayCluster) -> list[str]:
    from ray._private.internal_api import memory_summary

    stored = re.search(r"(\d+) objects", memory_summary(cluster.address, stats_only=True))
    return [f"{stored[1]} objects are left in the store"] if stored and int(stored[1]) else []
