"""A data-parallel worker under Ray Train.

Ray starts the worker and gives it a rank and the address of the rendezvous; until the run has ended
there is no further call to Ray."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.train import get_context
from ray.train.backend import Backend, BackendConfig

from experts.hosts.actor_host import common_address, free_address
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.runtime.bootstrap import (
    Assignment,
    RequestReader,
    masked_errors,
    model_callbacks,
    open_log,
    prepare_worker,
    uses_cuda,
    worker_folder,
)
from orchestrator.runtime.cluster.environment import set_variables, variable
from orchestrator.runtime.cluster.prestart import request_successor

# The driver imports this module before it plans a run; torch is imported where it is needed.
if TYPE_CHECKING:
    import torch

    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.train.group.world import World
    from orchestrator.train.worker.run import WorkerRun


class _RendezvousBackend(Backend):
    """Sends the workers the address of their rendezvous; they form the process group themselves.

    A group that cannot be formed is then an error of a worker, after which Ray Train cleans up. If
    Ray Train formed the group, it would be an error of its own start, after which it does not."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:  # noqa: ARG002
        address, port = common_address(worker_group.execute(free_address))
        worker_group.execute(set_variables, {"MASTER_ADDR": address, "MASTER_PORT": str(port)})

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        pass


@dataclass
class RendezvousConfig(BackendConfig):
    """Ray Train's settings for a group of workers that form their process group themselves."""

    backend: str = "gloo"

    @property
    def backend_cls(self) -> type[Backend]:
        return _RendezvousBackend


def train_worker(config: dict[str, Any]) -> dict[str, Any]:
    """Run one worker to the end.

    The driver receives the result of rank 0, and the exception of any rank."""
    context = get_context()
    rank = context.get_world_rank()
    world_size = context.get_world_size()
    with masked_errors(secret_values()):
        assignment: Assignment = ray.get(config["assignment"])
    with masked_errors(assignment.prepared.hidden), _worker_run(assignment, rank, world_size) as run:
        if run.prepared.resolved.config.parallel.max_failures:
            request_successor()
        outcome = None
        while outcome is None:
            outcome = run.run_steps(sys.maxsize)
    return {"status": outcome.status, "reason": outcome.reason}


@contextmanager
def _worker_run(assignment: Assignment, rank: int, world_size: int) -> Iterator[WorkerRun]:
    """Form the process group and build this worker's part of the run."""
    from orchestrator.train.worker.observers import with_requests_of
    from orchestrator.train.worker.run import Supervision, WorkerRun

    with worker_folder(assignment, rank) as folder:
        assignment = folder.assignment
        prepared = prepare_worker(assignment, rank)
        with (
            open_log(assignment, rank) as log,
            form_world(prepared, rank, world_size, assignment.secret) as world,
        ):
            callbacks = model_callbacks(assignment, rank, log)
            take_requests = with_requests_of(callbacks, RequestReader(assignment, rank))
            supervision = Supervision(take_requests, callbacks=callbacks, open_store=folder.open_store)
            with WorkerRun(prepared, world, assignment.run_dir, log, supervision, assignment.resume) as run:
                yield run


@contextmanager
def form_world(prepared: PreparedRun, rank: int, world_size: int, secret: str) -> Iterator[World]:
    """Set torch's switches and form the process group, until the block has ended."""
    from orchestrator.train.group.stores import tcp_store
    from orchestrator.train.group.world import process_group_world
    from orchestrator.train.worker.torch_settings import torch_settings

    address = variable("MASTER_ADDR")
    port = int(variable("MASTER_PORT"))
    config = prepared.resolved.config
    timeout_s = config.parallel.step_timeout_s(hosts=False)
    store = tcp_store(address, port, rank == 0, timeout_s, secret)
    device = _device(prepared)
    backend = prepared.plan.backend.value
    with (
        torch_settings(config, prepared.plan, device),
        process_group_world(store, rank, world_size, device, backend, timeout_s, secret) as world,
    ):
        yield world


def _device(prepared: PreparedRun) -> torch.device:
    import torch

    if not uses_cuda(prepared):
        return torch.device("cpu")

    from ray.train.torch import get_device

    return get_device()
