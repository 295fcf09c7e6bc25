"""A data-parallel worker's side, under Ray Train. Ray starts it, tells it its rank and where the workers meet, and is not asked again
until the run has ended."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.train.backend import Backend, BackendConfig

from orchestrator.errors import UserError
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.redaction import Secrets, masked_stream, mask_error
from orchestrator.runtime.cluster.environment import set_variables, variable
from orchestrator.runtime.cluster.prestart import leave_successors
from orchestrator.runtime.ray_internals import train_context

# Ray Train's controller reads this file too, and has no use for torch: what only a worker needs is imported when it works.
if TYPE_CHECKING:
    import torch

    from orchestrator.record.log import Log
    from orchestrator.train.worker.resume import ResumeFrom
    from orchestrator.train.worker.run import WorkerRun
    from orchestrator.train.worker.run_dir import Prepared

_LOOK_SECONDS = 0.1  # between looks at the wish to stop
STOP, NONCE = (
    "stop",
    "nonce",
)  # files in logs/: the wish to stop; what shows that a worker sees the driver's folder


@dataclass(frozen=True)
class Assignment:
    """What every worker is handed. ``prepared.task`` is None for a task that is loaded by its name."""

    prepared: Prepared
    run_dir: Path
    folder: Path
    nonce: str
    resume: ResumeFrom | None
    """Where to resume; None at the first start of a run."""


class _Place(Backend):
    """Tells the workers where to meet. They form their group themselves: a group that cannot be formed is then an error of
    a worker, which Ray Train cleans up after, and not of its own start, which it does not."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:  # noqa: ARG002
        address, port = worker_group.execute_single(0, _free_place)
        worker_group.execute(set_variables, {"MASTER_ADDR": address, "MASTER_PORT": str(port)})

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:  # noqa: ARG002
        if backend_config.again:
            leave_successors(2)  # the next controller, and an actor of Ray Train's for its reports

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        pass


@dataclass
class Meeting(BackendConfig):
    """Brings workers together without waiting for them. Ray Train's own would form the group before the workers run."""

    backend: str = "gloo"
    again: bool = True
    """Whether there may be another group after this one."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _Place


def _free_place() -> tuple[str, int]:
    import socket

    address = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        probe.bind(("", 0))
        return address, probe.getsockname()[1]


def worker(config: dict[str, Any]) -> dict[str, Any]:
    """A data-parallel worker's whole life, under Ray Train. What it returns reaches the driver from rank 0; what it raises, from
    any."""
    context = train_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    place = variable("MASTER_ADDR"), int(variable("MASTER_PORT"))
    with masked_errors(secret_values()):
        assignment: Assignment = ray.get(config["assignment"])
    with masked_errors(assignment.prepared.hidden), _at_work(assignment, place, rank, size) as stint:
        if stint.prepared.resolved.config.parallel.max_failures:
            leave_successors()
        ended = None
        while ended is None:
            ended = stint.advance(sys.maxsize)
    return {"status": ended.status, "reason": ended.reason}


@contextmanager
def _at_work(assignment: Assignment, place: tuple[str, int], rank: int, size: int) -> Iterator[WorkerRun]:
    """A worker of a group, from its start to its end. ``place`` is where they meet."""
    from orchestrator.record.events import EventLog
    from orchestrator.record.log import SilentLog
    from orchestrator.train.parts.stores import tcp_store
    from orchestrator.train.parts.world import process_group_world
    from orchestrator.train.worker.run import Supervision, WorkerRun

    prepared = settled(assignment, rank)
    patience = prepared.resolved.config.parallel.patience(hosts=False)
    store = tcp_store(*place, size, rank == 0, patience)
    log: Log = (
        EventLog(assignment.run_dir / "events.jsonl", secrets=prepared.hidden) if rank == 0 else SilentLog()
    )
    asked = stop_asked(assignment.run_dir / "logs" / STOP) if rank == 0 else lambda: False
    backend = prepared.plan.backend.value
    with (
        closing_log(log),
        process_group_world(store, rank, size, device_of(prepared), backend, patience) as world,
        WorkerRun(prepared, world, assignment.run_dir, log, Supervision(asked), assignment.resume) as stint,
    ):
        yield stint


def settled(assignment: Assignment, rank: int) -> Prepared:
    """Make this process the worker of that rank: where it writes, where it stands, and what it is to train."""
    from orchestrator.tasks.load import load_task

    check_folder(assignment, f"worker {rank}")
    prepared = assignment.prepared
    speak_into(assignment.run_dir / "logs", rank, prepared.hidden)
    work_in(assignment.folder, prepared.resolved.config.parallel.nccl_debug, prepared.hidden)
    return (
        prepared if prepared.task is not None else replace(prepared, task=load_task(prepared.resolved.config))
    )


def work_in(folder: Path, nccl_debug: bool, secrets: Secrets) -> None:
    """Where the user is, so that relative paths of their code mean the same; a node may not have it. What their code says is masked
    from here on, wherever it goes: to Ray's own logs, unless it was told otherwise."""
    sys.stdout, sys.stderr = (masked_stream(stream, secrets) for stream in (sys.stdout, sys.stderr))
    set_variables(_network(nccl_debug))
    if not variable("PYTORCH_ALLOC_CONF"):  # read by torch when it first touches the GPU
        set_variables({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    with suppress(OSError):
        os.chdir(folder)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def device_of(prepared: Prepared) -> torch.device:
    """From torch, not from what the cluster declares: GPUs without CUDA are CPUs."""
    import torch

    if prepared.plan.device.value == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if prepared.plan.strategy.value == "expert_parallel":
        return torch.device("cuda", 0)  # an actor sees its own GPU alone

    from ray.train.torch import get_device

    return get_device()


def check_folder(assignment: Assignment, who: str) -> None:
    with suppress(OSError):
        if (assignment.run_dir / "logs" / NONCE).read_text(encoding="utf-8") == assignment.nonce:
            return
    raise UserError(
        f"{who} on {ray.util.get_node_ip_address()} does not see the run folder {assignment.run_dir}; "
        "give a --run-dir on a drive that all nodes share"
    )


@contextmanager
def masked_errors(secrets: Secrets) -> Iterator[None]:
    """What is raised here reaches the driver, and all who may look at the cluster."""
    try:
        yield
    except BaseException as error:
        mask_error(error, secrets)
        raise


def speak_into(folder: Path, rank: int, secrets: Secrets) -> None:
    """What this process says goes to a file of the run, not to the user's screen; without the secrets that it knows."""
    (folder / f"worker_{rank}.pid").write_text(f"{os.getpid()}\n", encoding="utf-8")
    file = os.open(folder / f"worker_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        with suppress(Exception):
            stream.flush()
        os.dup2(file, number)
    os.close(file)
    opened = [os.fdopen(os.dup(number), "w", buffering=1, errors="backslashreplace") for number in (1, 2)]
    sys.stdout, sys.stderr = (masked_stream(stream, secrets) for stream in opened)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, force=True)


def _network(nccl_debug: bool) -> dict[str, str]:
    """The interface that owns the address by which the cluster knows this node: a host name may mean another one."""
    address = ray.util.get_node_ip_address()
    owner = next(
        (
            name
            for name, entries in psutil.net_if_addrs().items()
            if any(e.address == address for e in entries)
        ),
        None,
    )
    values = {
        name: owner for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if owner and variable(name) == ""
    }
    return values | ({"NCCL_DEBUG": "INFO"} if nccl_debug else {})


def stop_asked(path: Path) -> Callable[[], bool]:
    """Whether the driver wants the run to end, looked up now and then."""
    seen, looked = False, 0.0

    def asked() -> bool:
        nonlocal seen, looked
        now = monotonic()
        if not seen and now - looked > _LOOK_SECONDS:
            looked, seen = now, path.exists()
        return seen

    return asked


@contextmanager
def closing_log(log: Log) -> Iterator[None]:
    try:
        yield
    finally:
        log.close()
