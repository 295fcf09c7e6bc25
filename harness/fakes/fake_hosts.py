"""A run on expert hosts without Ray: the test answers the calls to the hosts, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError, RayTaskError

from harness.fakes.inventories import model
from orchestrator.config.settings import Config
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.runtime.driver import AttemptResult
from orchestrator.runtime.expert_parallel import calls as calls_module
from orchestrator.runtime.expert_parallel import group as group_module
from orchestrator.runtime.expert_parallel import run as run_module
from orchestrator.runtime.expert_parallel.host_worker import SegmentResult
from orchestrator.runtime.expert_parallel.run import ExpertParallelRun
from orchestrator.runtime.expert_parallel.segments import SnapshotCost
from orchestrator.runtime.expert_parallel.snapshot_references import SnapshotReferences
from orchestrator.runtime.expert_parallel.states import Running
from orchestrator.runtime.expert_parallel.stuck import HostHealth
from orchestrator.runtime.recovery_log import RecoveryLog
from orchestrator.types import Choice


@dataclass(eq=False)
class FakeCall:
    """A call to an actor, which returns when the test says so."""

    name: str
    arguments: tuple[Any, ...]
    result: Any = None
    done: bool = False

    def finish(self, result: Any = None) -> None:
        self.result = result
        self.done = True


class FakeActor:
    """Accepts any method call and remembers it."""

    def __init__(self) -> None:
        self.calls: list[FakeCall] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> FakeCall:
            self.calls.append(FakeCall(name, arguments))
            return self.calls[-1]

        return SimpleNamespace(remote=remote)

    def last_call(self, name: str) -> FakeCall:
        return next(call for call in reversed(self.calls) if call.name == name)

    def finish(self, name: str, result: Any = None) -> None:
        """Finish the oldest open call of a name.

        After an error or the end of the run, the calls behind it return at once, as in a host."""
        first, *behind = [call for call in self.calls if call.name == name and not call.done]
        first.finish(result)
        is_error = isinstance(result, Exception)
        if is_error or (isinstance(result, SegmentResult) and result.status is not None):
            for call in behind:
                call.finish(None if is_error and not isinstance(result, RayError) else result)


def _wait(
    calls: Sequence[FakeCall],
    num_returns: int = 1,
    timeout: float = 0.0,
) -> tuple[list[FakeCall], list[FakeCall]]:
    return [call for call in calls if call.done], [call for call in calls if not call.done]


def _get(call: FakeCall) -> Any:
    error = call.result
    if isinstance(error, RayError):
        raise error
    if isinstance(error, Exception):
        # As Ray does: the exception of the actor is the cause, and has lost its traceback.
        raise RayTaskError(call.name, "Traceback …", error, "ray::host", 1, "127.0.0.1").as_instanceof_cause()
    return call.result


FAKE_RAY = SimpleNamespace(
    wait=_wait,
    get=_get,
    put=lambda value: value,
    util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
)


class FakePool:
    """All hosts are ready as soon as they are started, except ``late`` ones."""

    def __init__(self, size: int, *_: Any) -> None:
        self.size = size
        self.actors: dict[int, FakeActor] = {}
        self.excluded: set[int] = set()
        self.failed_joins: list[int] = []
        self.late: set[int] = set()
        self.last_error: BaseException | None = None
        self.killed_frozen: list[int] = []

    def reserve(self, timeout_s: float) -> bool:
        for host_id in range(self.size):
            self.start(host_id)
        return True

    def start(self, host_id: int) -> None:
        self.actors[host_id] = FakeActor()

    def stop(self, host_id: int, frozen: bool = False) -> None:
        self.actors.pop(host_id, None)
        if frozen:
            self.killed_frozen.append(host_id)

    def exclude(self, host_id: int, error: BaseException) -> None:
        self.stop(host_id)
        self.excluded.add(host_id)

    def join_failed(self, host_id: int, error: BaseException) -> None:
        self.failed_joins.append(host_id)

    def joined(self, host_ids: Sequence[int]) -> None:
        self.failed_joins = [host_id for host_id in self.failed_joins if host_id not in host_ids]

    def actor(self, host_id: int) -> FakeActor:
        return self.actors[host_id]

    def poll(self, busy: Sequence[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ready = tuple(host_id for host_id in sorted(self.actors) if host_id not in self.late)
        return ready, tuple(sorted(self.late & self.actors.keys()))

    def startable(self, host_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(host_id for host_id in host_ids if host_id not in self.excluded)

    def close(self) -> None:
        self.actors = {}


class FakeSnapshots:
    """A snapshot store whose contents the test sets."""

    def __init__(self, *_: Any, backups: bool = True) -> None:
        self.backups = backups
        self.costs: list[SnapshotCost] = []
        self.step = -1
        self.dead_hosts: set[int] = set()
        self.is_readable = True
        self.expected_steps: set[int] = set()
        self.cleared = False

    def collect(self) -> None: ...

    def pending_calls(self, all_hosts: bool) -> list[Any]:
        return []

    def follow(self, generation: int, members: tuple[int, ...]) -> None:
        self.dead_hosts = set()

    def clear(self) -> None:
        self.cleared = True

    def take_costs(self) -> list[SnapshotCost]:
        costs = self.costs
        self.costs = []
        return costs

    def expects(self, step: int) -> bool:
        return step in self.expected_steps

    def references(self) -> tuple[Any, ...]:
        header = SimpleNamespace(generation=-1, size=3)
        one_host = SnapshotReferences(header, "own", "dense")
        return (one_host,) if self.is_readable and self.step >= 0 else ()


class FakeHeartbeats:
    """Heartbeats that the test sets. Each host was seen a quarter of a second ago."""

    def __init__(self, *_: Any) -> None:
        self.last_step = 7
        self.hosts: list[HostHealth] = []

    def follow(self, *_: Any) -> None: ...

    def read(self, immediately: bool = False) -> bool:
        return True

    def last_seen(self) -> dict[int, float]:
        return {host_id: time.time() - 0.25 for host_id in range(8)}

    def health(self) -> list[HostHealth]:
        return self.hosts


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeRun:
    """A run on fake hosts."""

    run: ExpertParallelRun
    clock: Clock
    run_dir: Path
    pool: Any = field(init=False)
    snapshots: Any = field(init=False)
    heartbeats: Any = field(init=False)

    def __post_init__(self) -> None:
        self.pool = self.run._pool
        self.snapshots = self.run._group.snapshots
        self.heartbeats = self.run._group.heartbeats

    @property
    def state(self) -> Any:
        return self.run._state

    def poll(self) -> AttemptResult | None:
        return self.run.wait(0.0)

    def finish(self, name: str, result: Any = None, *host_ids: int) -> None:
        """Finish the oldest open call of a name on these hosts, or on all members.

        For a segment, ``result`` is its (status, step) or (status, step, seconds), or an error."""
        if name == "run_segment" and isinstance(result, tuple):
            result = SegmentResult(*result)
        for host_id in host_ids or self.state.members:
            self.pool.actor(host_id).finish(name, result)
        self.poll()

    def begin_first_segment(self) -> None:
        self.poll()
        self.finish("join")
        assert isinstance(self.state, Running)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return of_kind(read_events(self.run_dir / "events.jsonl"), kind)


MakeRun = Callable[..., FakeRun]


def fake_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Replace Ray and the classes that use it.

    Return a function ``(hosts=3, **settings) -> FakeRun``."""
    clock = Clock()
    for module in (run_module, group_module, calls_module):
        monkeypatch.setattr(module, "ray", FAKE_RAY)
    monkeypatch.setattr(run_module, "HostPool", FakePool)
    monkeypatch.setattr(run_module, "SnapshotStore", FakeSnapshots)
    monkeypatch.setattr(run_module, "Heartbeats", FakeHeartbeats)
    monkeypatch.setattr(run_module, "perf_counter", clock)
    monkeypatch.setattr(run_module, "host_variables", lambda config: {})
    monkeypatch.setattr(run_module, "open_store", lambda address, secret: (None, (address, 1)))
    monkeypatch.setattr(run_module, "started_cluster", lambda: True)
    monkeypatch.setattr(run_module.time, "sleep", lambda seconds: None)

    def make_run(hosts: int = 3, snapshots: Choice[str] | None = None, **settings: Any) -> FakeRun:
        config = Config.of(run_dir=folder, **settings)
        plan = SimpleNamespace(
            snapshots=snapshots or Choice("on", "they fit"),
            workers=Choice(hosts, "the test"),
            expert_replicas=Choice(config.evolution.expert_replicas, "the test"),
            memory=SimpleNamespace(limit=None),
        )
        facts = model(experts=7, moe_layers=1)
        prepared = SimpleNamespace(resolved=SimpleNamespace(config=config), plan=plan, facts=facts)
        assignment: Any = SimpleNamespace(prepared=prepared, run_dir=folder, link=None, secret="")
        log = EventLog(folder / "events.jsonl")
        run = ExpertParallelRun(assignment, hosts, False, log, RecoveryLog(log, folder))
        return FakeRun(run, clock, folder)

    return make_run
