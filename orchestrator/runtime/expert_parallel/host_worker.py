"""A host's part of a run, inside the actor.

A host is a member of one group after another, each for as long as all its members live. It trains
in segments, sends heartbeats from a thread of its own, and begins afresh, from snapshots in memory,
or from the newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from orchestrator.runtime.bootstrap import (
    Assignment,
    RequestReader,
    check_run_dir,
    enter_working_dir,
    masked_errors,
    model_callbacks,
    open_log,
    prepare_worker,
    uses_cuda,
    worker_folder,
)
from orchestrator.runtime.cluster.environment import set_variables
from orchestrator.runtime.cluster.prestart import request_successor
from orchestrator.runtime.expert_parallel.heartbeats import heartbeat_key
from orchestrator.runtime.expert_parallel.snapshot_references import ReferencedSnapshots, SnapshotReferences

if TYPE_CHECKING:
    import torch

    from experts.hosts.actor_host import HostContext, Outbox
    from experts.hosts.group import GroupFactory, GroupMembership
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.train.worker.run import WorkerRun

_STORE_TIMEOUT_S = 60
_NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
"""Settings of torch's NCCL watchdog, read when the first group is formed.

By default it ends the process of a survivor a minute after a peer was lost, and leaves the error in
the store, where later groups find it. Here the driver decides, and aborts the group."""


@dataclass(frozen=True)
class JoinRequest:
    """A host's place in the group of a generation, and the state that it begins with."""

    generation: int
    host_id: int
    rank: int
    world_size: int
    store_address: tuple[str, int]
    """The address of the driver's store, where the hosts form their group."""
    resumed: bool = False
    """Whether the run has begun before."""
    halvings: int = 0
    snapshots: tuple[SnapshotReferences, ...] = ()
    """References to the snapshots that the host may need; without any, a checkpoint is read."""
    checkpoint_is_newer: bool = False
    """Whether there is a checkpoint newer than the snapshots, which is read if it is good."""


@dataclass(frozen=True)
class Segment:
    """A number of steps to train, and when to take snapshots."""

    steps: int
    snapshot_at_end: bool = False
    """Whether to take a snapshot after the last step."""
    snapshot_every: int = 0
    """Steps between snapshots, the same for all hosts; 0 takes none."""


@dataclass(frozen=True)
class SegmentResult:
    """The report of a host at the end of a segment."""

    status: str | None
    """How the run ended; None if it goes on."""
    step: int
    """The steps done."""
    seconds: float = 0.0
    """How long the segment took."""


class HostWorker:
    """The work of a host in one generation."""

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self._end: SegmentResult | None = None

    def run_segment(self, segment: Segment) -> SegmentResult:
        """Train for a segment."""
        if self._end is not None:
            return self._end  # the segment was granted before the end of the run was known
        began_s = perf_counter()
        with masked_errors(self._run.prepared.hidden):
            self._run.loop.set_snapshot_interval(segment.snapshot_every)
            outcome = self._run.run_steps(segment.steps, segment.snapshot_at_end)
        status = outcome.status if outcome is not None else None
        result = SegmentResult(status, self._run.loop.progress.step, perf_counter() - began_s)
        if outcome is not None:
            self._end = result
        return result


def preload(context: HostContext, assignment: Assignment, store_address: tuple[str, int]) -> None:
    """Load torch, its late imports and the task, so that a standby host joins immediately."""
    import torch._dynamo

    import orchestrator.record.machine.monitor
    import orchestrator.train.worker.run  # noqa: F401
    from orchestrator.tasks.load import load_task

    prepared = assignment.prepared
    config = prepared.resolved.config
    if assignment.link is None:
        with masked_errors(prepared.hidden):
            check_run_dir(assignment, "a host")
    enter_working_dir(assignment.working_dir, config.parallel.nccl_debug, prepared.hidden)
    _store_clients(context, store_address, assignment.secret)
    if uses_cuda(prepared):
        # Creating the CUDA context takes a second. Settings for determinism follow later.
        torch.zeros(1, device=_device(prepared)).add_(1).cpu()
    # The files of an earlier start come with the run folder, where the nodes share no disk.
    sees_files = prepared.earlier is None or prepared.earlier.is_dir()
    if prepared.task is None and sees_files:
        # A task that fails to load raises its error when it is trained.
        with suppress(Exception):
            task = load_task(config, prepared.earlier)
            context.cache["task"] = task
            task.train_data()


def rehearse(context: HostContext, assignment: Assignment) -> None:  # noqa: ARG001
    """Let a standby load what its first step on a GPU needs.

    It changes nothing else: a failure shows again when the host joins."""
    from orchestrator.train.worker.rehearsal import rehearse_steps

    prepared = assignment.prepared
    if uses_cuda(prepared):
        with suppress(Exception):
            rehearse_steps(prepared, _device(prepared))


def prestart_successor(context: HostContext) -> None:  # noqa: ARG001
    """Ask this node for a process that is ready when the next host is started."""
    request_successor()


@contextmanager
def host_worker(context: HostContext, assignment: Assignment, request: JoinRequest) -> Iterator[HostWorker]:
    """Join a group and build this host's part of the run; leave the group at the end."""
    from experts.hosts.group import GroupFactory
    from orchestrator.train.checkpoint.pinned_buffers import PinnedBuffers
    from orchestrator.train.checkpoint.snapshots import SnapshotTarget
    from orchestrator.train.device.compiling import report_compilation
    from orchestrator.train.device.memory import free_cached
    from orchestrator.train.group.heartbeat import Heartbeat, send_heartbeats
    from orchestrator.train.group.world import recoverable_world
    from orchestrator.train.worker.observers import with_requests_of
    from orchestrator.train.worker.resume import ResumeFrom
    from orchestrator.train.worker.run import Supervision, WorkerRun
    from orchestrator.train.worker.torch_settings import torch_settings

    rank = request.rank
    membership = context.membership
    with masked_errors(assignment.prepared.hidden), worker_folder(assignment, rank) as folder:
        assignment = folder.assignment
        prepared = _prepare(context, assignment, rank)
        store, heartbeat_store = _store_clients(context, request.store_address, assignment.secret)
        heartbeat = Heartbeat()
        with send_heartbeats(
            heartbeat, membership, _sender(context, heartbeat_store, request, assignment.secret)
        ):
            snapshots = ReferencedSnapshots(request.snapshots) if request.snapshots else None
            # The request outlives the join, and must not keep the snapshots in memory.
            request = replace(request, snapshots=())
            device = _device(prepared)
            if request.resumed and device.type == "cuda":
                # The memory of the last membership must be free before the new model takes its own.
                free_cached(device)
            buffers = context.cache.setdefault("pinned buffers", PinnedBuffers(device))
            factory = GroupFactory(
                store, f"generation{request.generation}", rank, request.world_size, membership
            )
            sink = _FlushedOutbox(context.outbox, folder.flush) if rank == 0 else context.outbox
            target = SnapshotTarget(sink, buffers, request.generation)
            resume = None
            if request.resumed:
                resume = ResumeFrom(snapshots, request.halvings, request.checkpoint_is_newer)
            with (
                open_log(assignment, rank) as log,
                _reusing_client(context, factory),
                torch_settings(prepared.resolved.config, prepared.plan, device),
                recoverable_world(factory, device, prepared.plan.backend.value, assignment.secret) as world,
                report_compilation(heartbeat),
            ):
                callbacks = model_callbacks(assignment, rank, log)
                take_requests = with_requests_of(callbacks, RequestReader(assignment, rank))
                supervision = Supervision(take_requests, heartbeat, target, callbacks, folder.open_store)
                with WorkerRun(prepared, world, assignment.run_dir, log, supervision, resume) as run:
                    if snapshots is not None:
                        snapshots.release()
                    yield HostWorker(run)


@dataclass(frozen=True)
class _FlushedOutbox:
    """Hands over the main host's snapshots once the driver has the events of their steps.

    A run that resumes from a snapshot does not repeat these steps: their events would be missing."""

    outbox: Outbox
    flush: Callable[[], None]

    def wait_for_space(self, membership: GroupMembership) -> None:
        self.outbox.wait_for_space(membership)

    def put(self, header: Any, own: Any, dense: Any) -> None:
        self.flush()
        self.outbox.put(header, own, dense)


def _prepare(context: HostContext, assignment: Assignment, rank: int) -> PreparedRun:
    """Prepare this process for a rank. The task of an earlier membership, with the data it has
    read, is used again."""
    task = context.cache.get("task")
    if task is not None and assignment.prepared.task is None:
        assignment = replace(assignment, prepared=replace(assignment.prepared, task=task))
    set_variables(_NCCL_VARIABLES)
    prepared = prepare_worker(assignment, rank)
    context.cache["task"] = prepared.task
    return prepared


def _device(prepared: PreparedRun) -> torch.device:
    import torch

    # An actor sees its own GPU alone, as number 0.
    return torch.device("cuda", 0) if uses_cuda(prepared) else torch.device("cpu")


def _store_clients(context: HostContext, store_address: tuple[str, int], secret: str) -> tuple[Any, Any]:
    """Return two clients of the driver's store: one for the group, one for heartbeats, which must
    not wait for it.

    They serve one membership after the other: opening one may take seconds where host names are
    slow to resolve."""
    from orchestrator.train.group.stores import tcp_store

    for name in ("store", "heartbeat store"):
        if name not in context.cache:
            context.cache[name] = tcp_store(*store_address, False, _STORE_TIMEOUT_S, secret)
    return context.cache["store"], context.cache["heartbeat store"]


@contextmanager
def _reusing_client(context: HostContext, factory: GroupFactory) -> Iterator[None]:
    """Keep the store's client for the next membership, unless it is broken or still in use.

    A thread that connects in vain may hold on to it."""
    try:
        yield
    finally:
        if factory.connecting or not _is_connected(factory.store):
            context.cache.pop("store", None)


def _is_connected(store: Any) -> bool:
    try:
        store.check(["anything"])
    except Exception:
        return False
    return True


def _sender(context: HostContext, store: Any, request: JoinRequest, secret: str) -> Callable[[str], None]:
    """Return a function that writes a heartbeat to the driver's store."""
    from orchestrator.train.group.stores import seal

    key = heartbeat_key(request.generation, request.host_id)

    def send(text: str) -> None:
        try:
            store.set(key, seal(text, key, secret))
        except Exception:  # a broken connection is not used again
            context.cache.pop("heartbeat store", None)
            raise

    return send
