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

from orchestrator.config.settings import Config
from orchestrator.plan.inventory.cpu import usable_memory
from orchestrator.runtime.cluster.environment import priority_variables, variables_with_prefix
from orchestrator.runtime.cluster.import_hook import make_importer, marked_as_working
from orchestrator.runtime.ray_internals import (
    export_setup_hook,
    prestart_request,
    send_prestart_request,
)
from orchestrator.types import GIB

_WORKER_MODULES = (
    "ray.train.v2._internal.execution.worker_group.worker",
    "orchestrator.runtime.data_parallel.worker",
    # The code that wraps a model, or steps an optimizer, imports it late.
    "torch._dynamo",
    "orchestrator.train.worker.run",
)
_HOST_MODULES = (
    "torch._dynamo",
    "orchestrator.train.worker.run",
    "orchestrator.record.machine.monitor",
    "orchestrator.runtime.expert_parallel.host_worker",
)
_TASK_MODULES = {
    "digits": ("orchestrator.tasks.digits",),
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


def worker_variables(config: Config) -> dict[str, str]:
    """Return the variables by which a data-parallel worker imports its modules as it starts.

    Ray Train adds its own settings to them, unless they are there already."""
    hook = _export_hook((*_WORKER_MODULES, *_TASK_MODULES.get(config.task, ())))
    return variables_with_prefix("RAY_TRAIN_") | hook


def host_variables(config: Config) -> dict[str, str]:
    """Return the same for a host; empty if no host may ever be replaced."""
    if not config.parallel.max_failures:
        return {}
    return _export_hook((*_HOST_MODULES, *_TASK_MODULES.get(config.task, ())))


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


def prestart_workers(num_workers: int, config: Config) -> None:
    """Request the processes of a run from this node: they import while the run is being planned.

    Failures are not reported: the actors start processes themselves then.
    """
    with suppress(Exception):
        starts_hosts = config.parallel.asked_strategy.replaces_workers
        variables = host_variables(config) if starts_hosts else worker_variables(config)
        request = prestart_request(num_workers, _KEEP_ALIVE_S, priority_variables() | variables)
        send_prestart_request(_raylet_address(), request, _REQUEST_TIMEOUT_S)


def request_successor() -> None:
    """Request an idle process like this one from its node, a little later and from a background thread.

    Failures are not reported: without successors the next group starts like the first.
    """
    with suppress(Exception):
        arguments = (_raylet_address(), prestart_request(1, _KEEP_ALIVE_S), _run_marker())
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
