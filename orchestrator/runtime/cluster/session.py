"""A Ray cluster to run on: joined where one runs, started where none does, and left as it was found."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from time import monotonic, sleep
from typing import Any

import ray

from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.cpu import usable_cores
from orchestrator.plan.inventory.hardware import inventory, secret_values, visible_gpus
from orchestrator.plan.workers import choose_workers, num_spares
from orchestrator.redaction import mask
from orchestrator.runtime.cluster.auth import MODE, lock_token, show_token, warn_if_open
from orchestrator.runtime.ray_internals import (
    find_local_cluster,
    hidden_worker_output,
    masked_entrypoint,
    reload_auth_mode,
)

_JOIN_SECONDS = 3  # for a cluster that was named to answer
_SHORT = {
    # Ray Train looks after its workers this often; its own 2 s are a fifth of a short run
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths of a user's own code mean what they meant to the user
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # Tune's own screen, beside ours
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial that failed has nothing to compare
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # of what is never read: a sweep goes on from its own ledger
    "TUNE_WARN_THRESHOLD_S": "60",
}


_DEATHS = "A worker died or was killed while executing a task by an unexpected system error."
_CALM = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def session(config: Config, note: Callable[[str], None]) -> Iterator[bool]:
    """A cluster for one run; yields whether it is someone else's."""
    settings = config.parallel
    before = dict(os.environ)
    for name, value in (_SHORT | _waiting(settings.step_timeout_s(hosts=False))).items():
        os.environ.setdefault(name, value)
    ours = not ray.is_initialized()
    try:
        joined = True if not ours else _enter(config, note)
        warn_if_open(ray.get_runtime_context().gcs_address, note)
        with hidden_worker_output(_DEATHS):  # the driver reports a lost worker in a line of its own
            yield joined
    finally:
        if ours:
            ray.shutdown()
        for name in {*_SHORT, *_waiting(0), *_CALM, MODE, "CUDA_VISIBLE_DEVICES"}:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)
        if ours:
            reload_auth_mode()


def _waiting(collective_timeout: int) -> dict[str, str]:
    return {
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",  # for slots that we have counted; its own 60 are for those that may come
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(
            2 * collective_timeout
        ),  # the others notice first, and tell why
    }


def _enter(config: Config, note: Callable[[str], None]) -> bool:
    """Join or start a cluster. Returns whether it is someone else's."""
    address = config.parallel.ray_address
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    here = address
    if address == "auto":
        here = _address_here()
    elif address == "local":
        here = None
    elif not answers(address):
        raise ResourceError(
            f"--ray-address {address}: no Ray cluster answers there; check it with 'ray status --address {address}', "
            "or leave the flag out to start one here"
        )
    if here is None:
        _start(config, quiet, note)
        return False
    _join(here, f"--ray-address {address}: " if here == address else "", quiet)
    return True


def _join(address: str, asked: str, quiet: dict[str, Any]) -> None:
    show_token(address)
    try:
        with _masked_command():
            ray.init(address=address, **quiet)
    except Exception as error:  # Ray raises ConnectionError, RuntimeError and others, by how far it got
        raise ResourceError(
            f"{asked}the Ray cluster at {address} could not be joined: {_why(error)}"
        ) from None


def _why(error: BaseException) -> str:
    """Ray tells of a token that was refused deep down in its words."""
    if "AuthToken" in f"{error} {error.__cause__}" or "AuthenticationError" in f"{error} {error.__cause__}":
        return "it refuses the token here; put that of its head (there: 'ray get-auth-token') into ~/.ray/auth_token"
    return first_line(error)


def cluster_runs(config: Config) -> bool:
    """Whether there is a cluster that a run would join."""
    asked = config.parallel.ray_address
    return (
        ray.is_initialized()
        or asked not in ("auto", "local")
        or (asked == "auto" and _address_here() is not None)
    )


def _address_here() -> str | None:
    named = os.environ.get("RAY_ADDRESS", "auto")
    if named == "local":
        return None
    if "://" in named:
        raise UserError(
            f"RAY_ADDRESS is {named}, the address of a service; HOST:PORT of the cluster was needed, or 'ray job submit'"
        )
    address = named if named != "auto" else find_local_cluster(os.environ.get("RAY_TMPDIR"))
    if not address or (
        named == "auto" and not answers(address)
    ):  # a cluster that was killed leaves its address behind
        return None
    if not answers(address):
        raise ResourceError(
            f"RAY_ADDRESS is {named}, but no Ray cluster answers there; unset it, or give --ray-address local"
        )
    return address


def answers(address: str) -> bool:
    """Whether anything listens at HOST:PORT. Ray itself would try for ten minutes."""
    host, _, port = address.rpartition(":")
    with (
        suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), timeout=_JOIN_SECONDS),
    ):
        return True
    return False


def _start(config: Config, quiet: dict[str, Any], note: Callable[[str], None]) -> None:
    """A cluster of this machine alone, for this run alone. On a CPU it has as many slots as there are workers. Torch is
    not preloaded into its processes: Ray Train has more actors that do without than workers that need it."""
    settings, cores = config.parallel, usable_cores()
    gpus = 0 if config.device.gpu_mode == "cpu" else len(settings.devices) or visible_gpus()
    workers = (settings.workers if isinstance(settings.workers, int) else 0) + num_spares(config)
    if config.device.gpu_mode == "multi_gpu" or settings.devices or 0 < gpus < workers or workers > 4 * cores:
        here = inventory()  # before a cluster is started for nothing
        choose_workers(config, Cluster.of(here, settings.devices), here)
    if settings.devices:
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = before.split(",") if before else None
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
            visible[i] if visible else str(i) for i in settings.devices
        )
    slots = max(workers, cores)
    if not gpus and workers > cores:
        who = "workers and spares" if num_spares(config) else "workers"
        note(f"{workers} {who} on {cores} cores: the cluster started for this run declares {slots} CPU slots")
    for name, value in _CALM.items():
        os.environ.setdefault(name, value)
    lock_token()
    with _masked_command():
        ray.init(address="local", num_cpus=slots, num_gpus=gpus, include_dashboard=False, **quiet)


def _masked_command() -> AbstractContextManager[None]:
    secrets = secret_values()
    return masked_entrypoint(lambda command: mask(command, secrets))


def wait_for(workers: int, on_gpu: bool, patience_s: float, note: Callable[[str], None]) -> None:
    """A cluster with an autoscaler has time to bring what is missing. ResourceError when it does not."""
    kind = "GPU" if on_gpu else "CPU"
    deadline, told = monotonic() + patience_s, False
    while (there := int(ray.cluster_resources().get(kind, 0))) < workers:
        if monotonic() > deadline:
            raise ResourceError(
                f"{workers} workers need {workers} {kind}s; after {patience_s:.0f} s the cluster has {there}. "
                "Lower --workers, or give it more time with --resource-timeout"
            )
        if not told:
            note(
                f"waiting up to {patience_s:.0f} s for the autoscaler: {there} of {workers} {kind}s are there"
            )
            told = True
            with suppress(Exception):
                from ray.autoscaler.sdk import request_resources

                request_resources(bundles=[{kind: 1}] * workers)
        sleep(0.5)


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
