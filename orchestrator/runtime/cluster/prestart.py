"""Processes that are ready before they are needed. A new actor takes an idle process of its node that has the same environment, if
there is one: then neither a process nor its imports are waited for. So every process of a group asks for its own successor once it
is at work, and all of them import what they will need as they start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

import ray

from orchestrator.plan.inventory.cpu import usable_memory
from orchestrator.runtime.cluster.environment import setting
from orchestrator.runtime.ray_internals import (
    TRAIN_CONTROLLER_MODULES,
    export_setup_hook,
    prestart_request,
    send_prestart_request,
)
from orchestrator.types import GIB

_CONTROLLER = (*TRAIN_CONTROLLER_MODULES, "orchestrator.runtime.data_parallel.worker")
_WORKER = (
    *_CONTROLLER,
    "torch.distributed.fsdp",  # imported late by whoever first wraps a model, or steps an optimizer: as is the next
    "torch._dynamo",
    "orchestrator.train.worker.run",
)
_HOST = (
    "torch._dynamo",
    "orchestrator.train.worker.run",
    "orchestrator.record.monitor",
    "orchestrator.runtime.expert_parallel.host_worker",
)
_TASKS = {"digits": ("sklearn.datasets", "orchestrator.tasks.digits"), "text": ("orchestrator.tasks.text",)}
_KEPT_SECONDS = 6 * 3600  # Ray would end an idle process after a second; with the job, it ends them all
_ASK_SECONDS = 10
_AFTER_SECONDS = 2.0  # of work: the start is over, and its successors' imports do not slow it down
_SPARE_BYTES = 2 * GIB  # that a node must have left: a process with torch takes 0.3


def for_controller() -> dict[str, str]:
    """What the environment of a controller has, so that its process imports what it needs as it starts."""
    return _hook(_CONTROLLER)


def for_worker(task: str) -> dict[str, str]:
    """The same for a worker that trains the task of that name."""
    return _hook((*_WORKER, *_TASKS.get(task, ())))


def for_host(task: str) -> dict[str, str]:
    """The same for a host of experts."""
    return _hook((*_HOST, *_TASKS.get(task, ())))


def _hook(names: tuple[str, ...]) -> dict[str, str]:
    """Empty where the user's own environment has such a hook: there can be one only. Equal for all attempts of a run: environments
    are the same to the letter, or not at all."""
    prepare = importing(names, str(Path(__file__).parents[2] / "__init__.py"))
    return export_setup_hook(prepare, _ASK_SECONDS)  # the same for the same code


def importing(names: tuple[str, ...], package: str) -> Callable[[], None]:
    """Imports what can be imported; ours only if it is this very one, and not another of the same name. Ray gives an actor one thread
    of OpenMP for each of its CPUs, but after that: torch looks once, when it is imported."""
    set_threads = setting({"OMP_NUM_THREADS": "1"})

    def prepare() -> (
        None
    ):  # sent as it is, by value: a process that does not find our code must start all the same
        import importlib
        from importlib.util import find_spec

        set_threads()
        for name in names:
            try:
                found = find_spec("orchestrator") if name.startswith("orchestrator.") else None
                if found is None or found.origin == package:
                    importlib.import_module(name)
            except Exception:  # told by whoever needs it
                continue

    return prepare


def leave_successors(processes: int = 1) -> None:
    """Ask this node, a little later and from a thread of its own, for so many idle processes like this one. Nothing is said of a
    failure: without them the next group starts as the first did."""
    with suppress(Exception):
        threading.Thread(
            target=_keep_asking,
            args=(_address(), prestart_request(processes, _KEPT_SECONDS)),
            name="successors",
            daemon=True,
        ).start()


def _keep_asking(address: str, request: Any) -> None:
    sleep(_AFTER_SECONDS)
    while True:
        with suppress(Exception):
            if usable_memory()[1] > _SPARE_BYTES:
                send_prestart_request(address, request, _ASK_SECONDS)
        sleep(_KEPT_SECONDS)


def _address() -> str:
    here = ray.get_runtime_context().get_node_id()
    return next(
        f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        for node in ray.nodes()
        if node["NodeID"] == here
    )
