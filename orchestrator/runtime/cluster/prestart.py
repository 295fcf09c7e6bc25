"""Worker processes that start before they are needed.

A new actor takes an idle process of its node that has the same environment, if there is one.
Then the actor waits neither for a process nor for its imports. So every process of a group
requests its own successor once it is at work, and all of them import what they need as they
start: beside work at the lowest priority, so that it costs no step.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

import ray

from orchestrator.plan.inventory.cpu import usable_memory
from orchestrator.runtime.cluster.import_hook import make_importer, marked_as_working
from orchestrator.runtime.ray_internals import (
    TRAIN_CONTROLLER_MODULES,
    export_setup_hook,
    prestart_request,
    send_prestart_request,
)
from orchestrator.types import GIB

_CONTROLLER_MODULES = (*TRAIN_CONTROLLER_MODULES, "orchestrator.runtime.data_parallel.worker")
_WORKER_MODULES = (
    *_CONTROLLER_MODULES,
    # The code that wraps a model, or steps an optimizer, imports the next two late.
    "torch.distributed.fsdp",
    "torch._dynamo",
    "orchestrator.train.worker.run",
)
_HOST_MODULES = (
    "torch._dynamo",
    "orchestrator.train.worker.run",
    "orchestrator.record.monitor",
    "orchestrator.runtime.expert_parallel.host_worker",
)
_TASK_MODULES = {
    "digits": ("sklearn.datasets", "orchestrator.tasks.digits"),
    "text": ("orchestrator.tasks.text",),
}
_KEEP_ALIVE_S = 6 * 3600
"""Life of an idle process. Ray would end it after a second; at the end of the job it ends all of them."""
_REQUEST_TIMEOUT_S = 10
_DELAY_S = 2.0
"""Time between the start of the work and the request, so that the imports of successors do not
slow the start."""
_MIN_FREE_BYTES = 2 * GIB
"""Memory that a node must have left; an idle process with torch takes 0.3 GiB."""


def controller_hook() -> dict[str, str]:
    """Return the variables by which a process of Ray Train's controller imports its modules as it starts."""
    return _export_hook(_CONTROLLER_MODULES)


def worker_hook(task: str) -> dict[str, str]:
    """Return the same for a data-parallel worker that trains the named task."""
    return _export_hook((*_WORKER_MODULES, *_TASK_MODULES.get(task, ())))


def host_hook(task: str) -> dict[str, str]:
    """Return the same for an expert host."""
    return _export_hook((*_HOST_MODULES, *_TASK_MODULES.get(task, ())))


def _export_hook(modules: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of the hook; empty if the user's environment has a hook.

    They are equal for all attempts of a run: Ray reuses a process only for an identical
    environment.
    """
    package = str(Path(__file__).parents[2] / "__init__.py")
    return export_setup_hook(make_importer(modules, package, _run_marker()), _REQUEST_TIMEOUT_S)


def _run_marker() -> str:
    """Return a name that the processes of this job share, on every node of its cluster."""
    context = ray.get_runtime_context()
    return f"expert-orchestrator/{context.get_session_name()}/{context.get_job_id()}"


def prestart_successors(processes: int = 1) -> None:
    """Request idle processes like this one from its node, a little later and from a background thread.

    Failures are not reported: without successors the next group starts like the first.
    """
    with suppress(Exception):
        arguments = (_raylet_address(), prestart_request(processes, _KEEP_ALIVE_S), _run_marker())
        threading.Thread(target=_repeat_request, args=arguments, name="prestart", daemon=True).start()


def _repeat_request(address: str, request: Any, marker: str) -> None:
    """Send the request, and again when the processes have reached the end of their life."""
    sleep(_DELAY_S)
    with marked_as_working(marker):
        while True:
            with suppress(Exception):
                if usable_memory()[1] > _MIN_FREE_BYTES:
                    send_prestart_request(address, request, _REQUEST_TIMEOUT_S)
            sleep(_KEEP_ALIVE_S)


def _raylet_address() -> str:
    """Return HOST:PORT of this node's raylet."""
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    return f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
