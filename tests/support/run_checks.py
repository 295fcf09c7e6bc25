"""What must hold after a run that was disturbed. Each check returns what it found wrong, in words; nothing: all is well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from orchestrator.record.events import Event, by_step, of_kind, read_events
from tests.support.cluster import Cluster
from tests.support.fault_injector import alive
from tests.support.faults import Post

_GRACE_SECONDS = 10.0  # for processes that were told to go
_MISSED_SECONDS = 60.0
_BLIND = "the cluster could not be looked at"


def told(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))


def wrong_steps(events: Sequence[Event], steps: int) -> list[str]:
    """Every step is there, and none beyond."""
    found = [event["step"] for event in by_step(events)]
    missing, extra = (
        sorted(set(range(1, steps + 1)) - set(found)),
        sorted(set(found) - set(range(1, steps + 1))),
    )
    return [
        f"{what} steps {numbers[:10]}"
        for what, numbers in (("missing", missing), ("unexpected", extra))
        if numbers
    ]


def wrong_losses(events: Sequence[Event], calm: Sequence[Event], relative: float = 0.0) -> list[str]:
    """Losses and norms of all steps against the undisturbed run's: to the last bit, or so close."""
    pairs = list(zip(by_step(events), by_step(calm), strict=False))
    wrong = [
        f"step {mine['step']}: {name} {mine[name]!r}, undisturbed {theirs[name]!r}"
        for mine, theirs in pairs
        for name in ("loss", "grad_norm")
        if abs(mine[name] - theirs[name]) > relative * abs(theirs[name])
    ]
    return [f"{len(wrong)} figures of {2 * len(pairs)} differ, first: {wrong[0]}"] if wrong else []


def newest_checkpoint(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step_*"))


def wrong_weights(run_dir: Path, calm: Path) -> list[str]:
    """The last checkpoints of two runs, tensor by tensor and bit by bit: weights, buffers and what the optimizer keeps."""
    mine, theirs = newest_checkpoint(run_dir), newest_checkpoint(calm)
    if mine.name != theirs.name:
        return [f"the last checkpoint is {mine.name}, undisturbed {theirs.name}"]
    wrong: list[str] = []
    for file in ("model.safetensors", "optimizer.safetensors"):
        a, b = load_file(mine / file), load_file(theirs / file)
        wrong += [f"{file}: {name} is in one only" for name in sorted(set(a) ^ set(b))]
        wrong += [
            f"{file}: {name} differs"
            for name in sorted(set(a) & set(b))
            if _bytes(a[name]) != _bytes(b[name])
        ]
    return wrong


def _bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


# --- each sample once per epoch


def wrong_counts(events: Sequence[Event], samples: int) -> list[str]:
    """By the run's own record: the samples of an epoch's steps add up."""
    sums: Counter[int] = Counter()
    for event in by_step(events):
        sums[event["epoch"]] += event["samples"]
    last = max(sums, default=0)
    return [
        f"epoch {epoch}: {count} samples of {samples}"
        for epoch, count in sums.items()
        if epoch != last and count != samples
    ] + [f"epoch {last}: {sums[last]} samples, more than {samples}" for _ in range(sums[last] > samples)]


def wrong_samples(events: Sequence[Event], post: Post, samples: int) -> list[str]:
    """By what every rank saw: each sample once in a whole epoch, none twice in the last, which may be cut short."""
    epoch_of = {event["step"]: event["epoch"] for event in by_step(events)}
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for step, ids in final_attempts(events, post).items():
        if step in epoch_of:
            seen[epoch_of[step]].update(ids)
    last, wrong = max(seen, default=0), list[str]()
    for epoch, counts in sorted(seen.items()):
        often = [number for number, count in counts.items() if count > 1]
        if often or (epoch != last and len(counts) != samples):
            wrong.append(
                f"epoch {epoch}: {len(counts)} of {samples} samples seen, {len(often)} of them more than once"
            )
    return wrong or ([] if seen else ["no record of any sample"])


def final_attempts(events: Sequence[Event], post: Post) -> dict[int, list[int]]:
    """The samples of each step, of the attempt that counted: what ranks saw after the last failure before the step was last begun,
    and of each rank its last go."""
    records: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(post.folder.glob("seen/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # a killed writer's last line
                record = json.loads(line)
                records[record["step"]].append(record)
    cuts = [event["time"] for event in events if event["event"] in ("failure", "start")]
    return {step: _last_go(found, cuts) for step, found in records.items()}


def _last_go(records: list[dict[str, Any]], cuts: list[float]) -> list[int]:
    latest = max(record["time"] for record in records)
    since = max((cut for cut in cuts if cut < latest), default=0.0)
    goes: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for record in sorted(
        (record for record in records if record["time"] > since), key=lambda record: record["time"]
    ):
        goes[record["rank"]].append(record)
    return [
        number
        for of_rank in goes.values()
        for record in of_rank
        if (record["pid"], record["attempt"]) == (of_rank[-1]["pid"], of_rank[-1]["attempt"])
        for number in record["ids"]
    ]


def wrong_run(run_dir: Path, calm: Path, steps: int, samples: int) -> list[str]:
    """All of the above, for a run that went through to the end on as many hosts as the undisturbed one."""
    events, theirs = read_events(run_dir / "events.jsonl"), read_events(calm / "events.jsonl")
    status = told(run_dir)["status"]
    return [
        *([] if status == "completed" else [f"status is {status}"]),
        *wrong_steps(events, steps),
        *wrong_losses(events, theirs),
        *wrong_weights(run_dir, calm),
        *wrong_counts(events, samples),
        *wrong_samples(events, Post.beside(run_dir), samples),
    ]


def recoveries(events: Sequence[Event]) -> list[Event]:
    """One event for each attempt: its last line."""
    return list({event["attempt"]: event for event in of_kind(events, "recovery")}.values())


# --- nothing is left behind


def left_processes(pids: Iterable[int]) -> list[str]:
    """Processes of the run that outlive it, once they have had time to go."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"process {pid} is left: {_command(pid)}" for pid in left]


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "?"


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


def left_memory(before: set[str]) -> list[str]:
    """Shared memory that is new, stays, and that no process has open: others on the machine may have some of their own."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (left := shared_memory() - before) and (left := left - _mapped()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"shared memory {name} is left" for name in sorted(left)]


def _mapped() -> set[str]:
    """Names of the shared memory that processes have open."""
    used: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            mapped = (
                line.partition("/dev/shm/")[2] for line in maps.read_text(errors="replace").splitlines()
            )
            used |= {name.removesuffix(" (deleted)") for name in mapped if name}
    return used


_LOOK = """
import json, re, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
from ray._private.internal_api import memory_summary
from ray._private.state import actors, state
from ray.util import placement_group_table
left = [f"actor {a['ActorClassName']} is {a['State']}" for a in actors().values()
        if a["State"] != "DEAD" and "Coordinator" not in a["ActorClassName"]]
left += [f"placement group {g['placement_group_id']} is {g['state']}" for g in placement_group_table().values() if g["state"] != "REMOVED"]
stored = re.search(r"(\\d+) objects", memory_summary(sys.argv[1], stats_only=True))
left += [f"{stored[1]} objects are left in the store"] if stored and int(stored[1]) else []
print("LEFT" + json.dumps(left))
"""


def left_in(here: Cluster) -> list[str]:
    """Actors, placement groups and objects that a cluster still holds, once Ray has had time to see that the driver is gone. A node that
    was killed is asked too, until Ray misses it."""
    begun, left = time.monotonic(), ["never looked"]
    while left and time.monotonic() - begun < (
        _MISSED_SECONDS if left[0].startswith(_BLIND) else _GRACE_SECONDS
    ):
        command = [sys.executable, "-c", _LOOK, here.address]
        done = subprocess.run(command, env=here.environment, capture_output=True, text=True, timeout=90)
        found = [line for line in done.stdout.splitlines() if line.startswith("LEFT")]
        left = json.loads(found[-1][4:]) if found else [f"{_BLIND}: {done.stderr[-500:]}"]
    return left
