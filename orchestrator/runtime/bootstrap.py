"""The preparation of every worker process before it trains, under either strategy.

The process checks that it sees the run folder, redirects its output into the run folder, enters the user's
working directory, loads the task and opens the event log."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray import cloudpickle

from orchestrator.errors import UserError
from orchestrator.redaction import Secrets, mask_error, masked_stream
from orchestrator.runtime.cluster.environment import set_variables, variable
from orchestrator.runtime.folder_link import FolderLink
from orchestrator.runtime.folder_server import DriverEnd

# The driver imports this module before it plans a run; torch is imported where it is needed.
if TYPE_CHECKING:
    from orchestrator.live.callbacks.callbacks import CallbackRunner
    from orchestrator.record.files.log import Log
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.train.group.requests import Requests
    from orchestrator.train.remote.node_folder import NodeStart
    from orchestrator.train.remote.remote_start import RemoteStart
    from orchestrator.train.worker.build import OpenStore
    from orchestrator.train.worker.resume import ResumeFrom

REQUESTS_FILE = "requests.json"
"""A file in ``logs/`` with the driver's requests to the workers."""
NONCE_FILE = "nonce"
"""A file in ``logs/`` by which a worker verifies that it sees the driver's run folder."""
LINKED_FILES = (f"logs/{NONCE_FILE}", f"logs/{REQUESTS_FILE}")
"""Files that a link brings from the driver's run folder to every worker."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Assignment:
    """The data that the driver sends to every worker."""

    prepared: PreparedRun
    """Its ``task`` is None if the worker can load the task by its name."""
    run_dir: Path
    working_dir: Path
    nonce: str
    resume: ResumeFrom | None
    """Where to resume; None at the first start of a run."""
    link: DriverEnd | None = None
    """The driver's end of a link to its run folder, if the nodes share no disk."""
    start: RemoteStart | None = None
    """The checkpoint of another remote run that this one begins with."""
    callbacks: tuple[str | bytes, ...] = ()
    """Callbacks that look at the model: their names, or the pickled objects of a Python program."""
    secret: str = field(default_factory=token_hex, repr=False)
    """The secret by which driver and workers recognise each other's values in the rendezvous store."""


@dataclass(frozen=True)
class WorkerFolder:
    """The run folder as one worker sees it."""

    assignment: Assignment
    """With the folder that this worker works in."""
    open_store: OpenStore
    """Opens the checkpoints of the run."""
    flush: Callable[[], None]
    """Waits until the driver can read what this worker has written."""


@contextmanager
def worker_folder(assignment: Assignment, rank: int) -> Iterator[WorkerFolder]:
    """Yield the folder that a worker works in: the driver's, or one of this node that is linked to it."""
    with ExitStack() as stack:
        start = None
        if assignment.start is not None:
            start = stack.enter_context(_opened_start(assignment.start, assignment.nonce))
            assignment = replace(assignment, prepared=start.prepared(assignment.prepared))
        yield stack.enter_context(_opened_folder(assignment, rank, start))


@contextmanager
def _opened_start(remote: RemoteStart, nonce: str) -> Iterator[NodeStart]:
    """Yield the checkpoint of another run that this one begins with, as this node finds it."""
    from orchestrator.train.remote.node_folder import NodeStart, used_node_folder

    with used_node_folder(nonce) as shared:
        start = NodeStart(remote, shared)
        with start.opened():
            yield start


@contextmanager
def _opened_folder(assignment: Assignment, rank: int, start: NodeStart | None) -> Iterator[WorkerFolder]:
    from orchestrator.checkpoint.store import CheckpointStore

    link = assignment.link
    if link is None:
        yield WorkerFolder(assignment, partial(CheckpointStore, start=start), lambda: None)
        return
    from orchestrator.storage.folder import RemoteFolder
    from orchestrator.train.remote.node_folder import WORKER, used_node_folder
    from orchestrator.train.remote.node_store import NodeStore

    with used_node_folder(assignment.nonce) as shared:
        # Nodes may share their folder for temporary files, though not the driver's run folder.
        run_dir = shared / f"{WORKER}{socket.gethostname()}-{os.getpid()}"
        folder_link = FolderLink(link, run_dir, rank)
        try:
            with folder_link:
                prepared = assignment.prepared
                if prepared.earlier == assignment.run_dir:
                    prepared = replace(prepared, earlier=run_dir)
                linked = replace(assignment, run_dir=run_dir, prepared=prepared)

                def open_store(folder: Path, **_: Any) -> NodeStore:
                    return NodeStore(folder, RemoteFolder(link.url), shared, folder_link.ask, start)

                yield WorkerFolder(linked, open_store, folder_link.flush)
        finally:
            if folder_link.is_complete:
                shutil.rmtree(run_dir, ignore_errors=True)


def prepare_worker(assignment: Assignment, rank: int) -> PreparedRun:
    """Make this process the worker of a rank. Return the run with its task loaded."""
    from orchestrator.tasks.load import load_task

    check_run_dir(assignment, f"worker {rank}")
    prepared = assignment.prepared
    config = prepared.resolved.config
    redirect_output(assignment.run_dir / "logs", rank, prepared.hidden)
    enter_working_dir(assignment.working_dir, config.parallel.nccl_debug, prepared.hidden)
    if prepared.task is not None:
        return prepared
    return replace(prepared, task=load_task(config, prepared.earlier))


def check_run_dir(assignment: Assignment, name: str) -> None:
    """Raise ``UserError`` if this process does not see the driver's run folder."""
    with suppress(OSError):
        nonce = (assignment.run_dir / "logs" / NONCE_FILE).read_text(encoding="utf-8")
        if nonce == assignment.nonce:
            return
    raise UserError(
        f"{name} on {ray.util.get_node_ip_address()} does not see the run folder {assignment.run_dir}; "
        "give a --run-dir on a drive that all nodes share, or on an object store (s3://bucket/run1)"
    )


def redirect_output(folder: Path, rank: int, secrets: Secrets) -> None:
    """Write this process's output to a log file of the run, with secrets masked."""
    (folder / f"worker_{rank}.pid").write_text(f"{os.getpid()}\n", encoding="utf-8")
    file = os.open(folder / f"worker_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    # The descriptors are redirected, so that the output of C++ libraries goes to the file too.
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        with suppress(Exception):
            stream.flush()
        os.dup2(file, descriptor)
    os.close(file)
    # ``closefd=False``: a host redirects its output again whenever it joins a group, and libraries keep the
    # earlier streams. Closing one of those must not close the descriptor.
    stdout, stderr = (
        os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)
        for descriptor in (1, 2)
    )
    sys.stdout = masked_stream(stdout, secrets)
    sys.stderr = masked_stream(stderr, secrets)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, force=True)


def enter_working_dir(folder: Path, nccl_debug: bool, secrets: Secrets) -> None:
    """Enter the user's working directory: relative paths and imports work as on the driver.

    From here on, secrets are masked in what their code prints, wherever the output goes."""
    sys.stdout = masked_stream(sys.stdout, secrets)
    sys.stderr = masked_stream(sys.stderr, secrets)
    set_variables(_network_variables(nccl_debug))
    if not variable("PYTORCH_ALLOC_CONF"):  # torch reads it when it first touches the GPU
        set_variables({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    with suppress(OSError):  # the folder may not exist on this node
        os.chdir(folder)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _network_variables(nccl_debug: bool) -> dict[str, str]:
    """Return variables that name this node's network interface to gloo and NCCL.

    It is the interface whose address the cluster knows; the host name may resolve to another one."""
    values = {"NCCL_DEBUG": "INFO"} if nccl_debug else {}
    address = ray.util.get_node_ip_address()
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            return values | {name: interface for name in names if variable(name) == ""}
    return values


def uses_cuda(prepared: PreparedRun) -> bool:
    """Return whether this worker trains on a GPU.

    torch decides: Ray may declare GPUs where there is no CUDA."""
    import torch

    return prepared.plan.device.value != "cpu" and torch.cuda.is_available()


@contextmanager
def open_log(assignment: Assignment, rank: int) -> Iterator[Log]:
    """Open the event log of the run. Only rank 0 writes to it."""
    from orchestrator.record.files.event_log import EventLog
    from orchestrator.record.files.log import SilentLog

    log: Log = SilentLog()
    if rank == 0:
        log = EventLog(assignment.run_dir / "events.jsonl", secrets=assignment.prepared.hidden)
    try:
        yield log
    finally:
        log.close()


def model_callbacks(assignment: Assignment, rank: int, log: Log) -> CallbackRunner:
    """Return the callbacks that look at the model in this process: none, but on the main worker.

    A worker that replaces a lost one makes them anew."""
    from orchestrator.live.callbacks.callbacks import CallbackRunner
    from orchestrator.tasks.named_object import make_named_object

    config = assignment.prepared.resolved.config
    sources = assignment.callbacks if rank == 0 else ()
    callbacks = [
        make_named_object("callback", source, config)
        if isinstance(source, str)
        else cloudpickle.loads(source)
        for source in sources
    ]
    runner = CallbackRunner(callbacks, config.watch.callback_errors == "raise")
    runner.bind(assignment.run_dir, config, log.write)
    return runner


@dataclass(frozen=True)
class DriverRequests:
    """The driver's requests to the workers, as they are in their file."""

    interrupt: bool = False
    end: str | None = None
    num_saves: int = 0
    """Checkpoints asked for since the run was started."""

    def write(self, logs: Path) -> None:
        """Write the file. A worker reads the whole of it, or the one before."""
        partial = logs / f".{REQUESTS_FILE}.writing"
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(partial, logs / REQUESTS_FILE)


class RequestReader:
    """Takes the driver's requests from their file.

    Rank 0 reads for all workers, which learn of them in the loop."""

    def __init__(self, assignment: Assignment, rank: int) -> None:
        self._logs = assignment.run_dir / "logs"
        self._is_reader = rank == 0
        self._looked_at = 0.0
        self._last = DriverRequests()
        if self._is_reader:
            # Skip saves that callbacks asked of an earlier group: they are done, or their step is repeated.
            self._last = DriverRequests(num_saves=self._read().num_saves)

    def __call__(self) -> Requests:
        """Return the requests since the last call; a request to end or to interrupt stays."""
        from orchestrator.train.group.requests import Requests

        now = monotonic()
        before = self._last
        # Looking at a network drive in every step would cost time.
        if self._is_reader and now - self._looked_at > _POLL_SECONDS:
            self._looked_at = now
            self._last = self._read()
        has_new_save = self._last.num_saves > before.num_saves
        return Requests(self._last.interrupt, self._last.end, has_new_save)

    def _read(self) -> DriverRequests:
        # No file yet, or a network drive on which it is just being replaced.
        with suppress(OSError, ValueError):
            text = (self._logs / REQUESTS_FILE).read_text(encoding="utf-8")
            return DriverRequests(**json.loads(text))
        return self._last


@contextmanager
def masked_errors(secrets: Secrets) -> Iterator[None]:
    """Mask secrets in exceptions that leave the block.

    They reach the driver and everyone who may see the cluster."""
    try:
        yield
    except BaseException as error:
        mask_error(error, secrets)
        raise
