"""An expert host's side: a member of one group after another, each for as long as all its members live. It trains in segments, says what
it is at from a thread beside, and begins where it is told to: afresh, from copies in memory, or from the newest checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from orchestrator.runtime.bootstrap import (
    STOP,
    Assignment,
    check_folder,
    closing_log,
    device_of,
    masked_errors,
    settled,
    stop_asked,
    work_in,
)
from orchestrator.runtime.cluster.prestart import leave_successors

if TYPE_CHECKING:
    from experts.actor_host import HostContext
    from experts.group import GroupFactory
    from orchestrator.record.log import Log
    from orchestrator.train.worker.run import WorkerRun
    from orchestrator.train.worker.run_dir import Prepared

_STORE_SECONDS = 60


@dataclass(frozen=True)
class Member:
    """A host's place in the group of an epoch, and where it begins."""

    generation: int
    host_id: int
    rank: int
    size: int
    place: tuple[str, int]
    """Where the driver keeps the store that they meet at."""
    again: bool = False
    halvings: int = 0
    copies: tuple[tuple[Any, Any], ...] = ()
    """References to the copies of all hosts' state."""


@dataclass(frozen=True)
class Segment:
    steps: int
    keep: bool = False


def _clients(side: HostContext, place: tuple[str, int]) -> tuple[Any, Any]:
    """Two ways to the driver's store: one for the group, one for the pulse, which must not wait for it. They are kept from one
    membership to the next: to open one may take seconds where names of hosts are looked up."""
    from orchestrator.train.parts.stores import tcp_store

    for name in ("store", "pulse store"):
        if name not in side.cache:
            side.cache[name] = tcp_store(*place, 1, False, _STORE_SECONDS)
    return side.cache["store"], side.cache["pulse store"]


@contextmanager
def _kept_client(side: HostContext, lines: GroupFactory) -> Iterator[None]:
    """A client is used again, unless a thread that connects in vain holds on to it, or its connection is broken."""
    try:
        yield
    finally:
        if lines.connecting or not _answers(lines.store):
            side.cache.pop("store", None)


def _answers(store: Any) -> bool:
    try:
        store.check(["anything"])
    except Exception:
        return False
    return True


def rehearse(side: HostContext, assignment: Assignment, place: tuple[str, int]) -> None:
    """Load all that a member needs, so that who stands by can step in at once: torch, with what it imports late, and the task. What is
    wrong with a task is told when it is to be trained."""
    import torch._dynamo

    import orchestrator.record.monitor
    import orchestrator.train.worker.run  # noqa: F401
    from orchestrator.tasks.load import load_task

    with masked_errors(assignment.prepared.hidden):
        check_folder(assignment, "a host")
    work_in(
        assignment.folder, assignment.prepared.resolved.config.parallel.nccl_debug, assignment.prepared.hidden
    )
    _clients(side, place)
    device = device_of(assignment.prepared)
    if device.type == "cuda":  # a context takes a second to make; what is to be deterministic begins later
        torch.zeros(1, device=device).add_(1).cpu()
    if assignment.prepared.task is None:
        with suppress(Exception):
            side.cache["task"] = task = load_task(assignment.prepared.resolved.config)
            task.train_data()


def succeed(side: HostContext) -> None:  # noqa: ARG001
    """Ask this node for a process that is ready when the next host is needed."""
    leave_successors()


def beat_key(epoch: int, seat: int) -> str:
    return f"beat/{epoch}/{seat}"


class HostWorker:
    """The work of a host in one epoch."""

    def __init__(self, stint: WorkerRun) -> None:
        self._stint = stint

    def advance(self, segment: Segment) -> tuple[str | None, int]:
        """How the run ended, if it did, and the steps that are done."""
        with masked_errors(self._stint.prepared.hidden):
            outcome = self._stint.advance(segment.steps, segment.keep)
        return outcome.status if outcome is not None else None, self._stint.loop.progress.step


@contextmanager
def host_worker(side: HostContext, assignment: Assignment, member: Member) -> Iterator[HostWorker]:
    """A member, from its joining to its leaving."""
    from experts.group import GroupFactory
    from orchestrator.record.events import EventLog
    from orchestrator.record.log import SilentLog
    from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
    from orchestrator.train.checkpoint.snapshots import SnapshotTarget
    from orchestrator.train.heartbeat import Heartbeat, beating
    from orchestrator.train.parts.memory import free_cached
    from orchestrator.train.parts.world import recoverable_world
    from orchestrator.train.worker.resume import ResumeFrom
    from orchestrator.train.worker.run import Supervision, WorkerRun

    secrets, life, rank = assignment.prepared.hidden, side.membership, member.rank
    with masked_errors(secrets):
        prepared = _prepared(side, assignment, member)
        store, beside = _clients(side, member.place)
        pulse, key = Heartbeat(), beat_key(member.generation, member.host_id)

        def beat(text: str) -> None:
            try:
                beside.set(key, text)
            except Exception:  # a way that is broken is not taken again
                side.cache.pop("pulse store", None)
                raise

        with beating(pulse, life, beat):
            log: Log = (
                EventLog(assignment.run_dir / "events.jsonl", secrets=secrets) if rank == 0 else SilentLog()
            )
            asked = stop_asked(assignment.run_dir / "logs" / STOP) if rank == 0 else lambda: False
            copies: Any = [(ray.get(header), ray.get(data)) for header, data in member.copies]
            member = replace(member, copies=())
            device, backend = device_of(prepared), prepared.plan.backend.value
            if (
                member.again and device.type == "cuda"
            ):  # what the last membership held must be gone before there is more
                free_cached(device)
            rooms = side.cache.setdefault("rooms", PinnedBuffers(device))
            lines = GroupFactory(store, f"epoch{member.generation}", rank, member.size, life)
            target = SnapshotTarget(side.outbox, rooms, member.generation)
            supervision = Supervision(asked, pulse, target)
            resume = ResumeFrom(copies, member.halvings) if member.again else None
            with (
                closing_log(log),
                _kept_client(side, lines),
                recoverable_world(lines, device, backend) as world,
                WorkerRun(prepared, world, assignment.run_dir, log, supervision, resume) as stint,
            ):
                copies.clear()  # what they held is restored: they need not stay in memory
                yield HostWorker(stint)


def _prepared(side: HostContext, assignment: Assignment, member: Member) -> Prepared:
    """What is to be trained. A host that has been a member before has the task still, with the data that it has read."""
    known = side.cache.get("task")
    if known is not None and assignment.prepared.task is None:
        assignment = replace(assignment, prepared=replace(assignment.prepared, task=known))
    prepared = settled(assignment, member.rank)
    side.cache["task"] = prepared.task
    return prepared
