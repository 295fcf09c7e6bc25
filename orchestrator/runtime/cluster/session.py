"""A Ray cluster for a run: joined if one runs, started otherwise, and left as it was found."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from time import monotonic, sleep
from typing import Any

import ray

from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.interrupts import interruptible, shielded
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.cpu import usable_cores
from orchestrator.plan.inventory.hardware import inventory, secret_values, visible_gpus
from orchestrator.plan.workers import choose_workers, num_spares
from orchestrator.redaction import mask
from orchestrator.runtime.cluster.auth import AUTH_MODE, prepare_token, present_token, warn_if_open
from orchestrator.runtime.ray_internals import (
    fewer_services,
    find_local_cluster,
    hidden_worker_output,
    kept_sigterm_handler,
    masked_entrypoint,
    reload_auth_mode,
)
from orchestrator.types import first_line

Note = Callable[[str], None]
"""Shows the user a line."""

_CONNECT_TIMEOUT_S = 3
_GROUP_START_TIMEOUT_S = 30
"""For slots that were counted before. Ray's own 60 s are for slots that an autoscaler may add."""
_DEATH_MESSAGES = (
    "A worker died or was killed while executing a task by an unexpected system error.",
    # Of a lost node, with 20 lines of its log. A second message names the node.
    "Raylet is terminated.",
)

_RAY_SETTINGS = {
    # Ray Train's own interval of 2 s between health checks is a fifth of a short run.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    # Relative paths of a user's code keep the meaning that they have for the user.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Tune's screen would write over ours.
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # A failed trial has no metric.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    # Tune's checkpoints are never read: a sweep continues from its own ledger.
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "TUNE_WARN_THRESHOLD_S": "60",
}
_QUIET_SETTINGS = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}
_SYSTEM_CONFIG = {
    # Ray would start a process for each CPU and wait for it. A run has other processes, which
    # import what they need as they start (``prestart``).
    "prestart_worker_first_driver": False,
}
_QUIET_INIT: dict[str, Any] = {
    "log_to_driver": False,
    "logging_level": logging.ERROR,
    "configure_logging": True,
}


@contextmanager
def session(config: Config, note: Note) -> Iterator[bool]:
    """Provide a cluster for one run; yield whether it was joined, and not started for the run.

    The environment is restored at the end, and a session that was open before stays open. SIGTERM ends it
    as SIGINT does, with KeyboardInterrupt.
    """
    with interruptible(), _session(config, note) as joined:
        yield joined


@contextmanager
def _session(config: Config, note: Note) -> Iterator[bool]:
    settings = _RAY_SETTINGS | _timeouts(config.parallel.step_timeout_s(hosts=False))
    environment = dict(os.environ)
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    opens_session = not ray.is_initialized()
    try:
        joined = _enter(config, note) if opens_session else True
        warn_if_open(ray.get_runtime_context().gcs_address, note)
        # The driver reports a lost worker in one line; Ray would print half a page.
        with hidden_worker_output(*_DEATH_MESSAGES):
            yield joined
    finally:
        if opens_session:
            with shielded(), kept_sigterm_handler():
                ray.shutdown()
        _restore_environment(environment, {*settings, *_QUIET_SETTINGS, AUTH_MODE, "CUDA_VISIBLE_DEVICES"})
        if opens_session:
            reload_auth_mode()


def _timeouts(step_timeout_s: int) -> dict[str, str]:
    return {
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(_GROUP_START_TIMEOUT_S),
        # Longer than the workers' own timeout: they notice first, and know the reason.
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(2 * step_timeout_s),
    }


def _restore_environment(before: dict[str, str], names: set[str]) -> None:
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)


# --- joining


def _enter(config: Config, note: Note) -> bool:
    """Join or start a cluster; return whether it was joined."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray Train's controller runs in this process. The driver reports the failures that it logs.
    logging.getLogger("ray.train").setLevel(logging.CRITICAL)
    requested = config.parallel.ray_address
    address = _cluster_address(requested)
    if address is None:
        _start(config, note)
        return False
    _join(address, f"--ray-address {address}: " if address == requested else "")
    return True


def _cluster_address(requested: str) -> str | None:
    """Return the address of the cluster to join; None if one is to be started."""
    if requested == "auto":
        return _running_cluster()
    if requested == "local":
        return None
    if not answers(requested):
        raise ResourceError(
            f"--ray-address {requested}: no Ray cluster answers there; "
            f"check it with 'ray status --address {requested}', or leave the flag out to start one here"
        )
    return requested


def _join(address: str, flag: str) -> None:
    present_token(address)
    try:
        with _masked_command(), shielded(), kept_sigterm_handler():
            ray.init(address=address, **_QUIET_INIT)
    except Exception as error:  # ConnectionError, RuntimeError and others, depending on how far Ray got
        raise ResourceError(
            f"{flag}the Ray cluster at {address} could not be joined: {_join_error(error)}"
        ) from None


def _join_error(error: BaseException) -> str:
    """Return the reason in a line. Ray mentions a refused token deep in its message."""
    text = f"{error} {error.__cause__}"
    if "AuthToken" in text or "AuthenticationError" in text:
        return (
            "it refuses the token here; "
            "put that of its head (there: 'ray get-auth-token') into ~/.ray/auth_token"
        )
    return first_line(error)


def joins_cluster(config: Config) -> bool:
    """Return whether a run would join a cluster, instead of starting one."""
    if ray.is_initialized():
        return True
    address = config.parallel.ray_address
    return _running_cluster() is not None if address == "auto" else address != "local"


def _running_cluster() -> str | None:
    """Return HOST:PORT of the cluster that RAY_ADDRESS names, or that runs on this machine; None
    without one."""
    named = os.environ.get("RAY_ADDRESS", "auto")
    if named == "local":
        return None
    if "://" in named:
        raise UserError(
            f"RAY_ADDRESS is {named}, the address of a service; HOST:PORT of the cluster was needed, "
            "or 'ray job submit'"
        )
    if named == "auto":
        address = find_local_cluster(os.environ.get("RAY_TMPDIR"))
        # A cluster that was killed leaves its address behind.
        return address if address and answers(address) else None
    if not named:
        return None
    if not answers(named):
        raise ResourceError(
            f"RAY_ADDRESS is {named}, but no Ray cluster answers there; unset it, or give --ray-address local"
        )
    return named


def answers(address: str) -> bool:
    """Return whether a process listens at HOST:PORT. Ray itself would try for ten minutes."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError):
        target = (host.strip("[]") or "127.0.0.1", int(port))
        with socket.create_connection(target, timeout=_CONNECT_TIMEOUT_S):
            return True
    return False


# --- starting


def _start(config: Config, note: Note) -> None:
    """Start a cluster of this machine for this run. On CPUs it has a slot for each worker."""
    parallel = config.parallel
    cores = usable_cores()
    gpus = 0 if config.device.gpu_mode == "cpu" else len(parallel.devices) or visible_gpus()
    requested = parallel.workers if isinstance(parallel.workers, int) else 0
    workers = requested + num_spares(config)
    multi_gpu = config.device.gpu_mode == "multi_gpu" or parallel.devices or 0 < gpus < workers
    if multi_gpu or workers > 4 * cores:
        # Raises before a cluster is started in vain.
        machine = inventory()
        choose_workers(config, Cluster.of(machine, parallel.devices), machine)
    if parallel.devices:
        _restrict_gpus(parallel.devices)
    slots = max(workers, cores)
    if not gpus and workers > cores:
        who = "workers and spares" if num_spares(config) else "workers"
        note(f"{workers} {who} on {cores} cores: the cluster started for this run declares {slots} CPU slots")
    for name, value in _QUIET_SETTINGS.items():
        os.environ.setdefault(name, value)
    prepare_token()
    with _masked_command(), fewer_services(), preloading_planner(), shielded(), kept_sigterm_handler():
        ray.init(
            address="local",
            num_cpus=slots,
            num_gpus=gpus,
            include_dashboard=False,
            _system_config=_SYSTEM_CONFIG,
            **_QUIET_INIT,
        )


def _restrict_gpus(devices: tuple[int, ...]) -> None:
    """Let CUDA see these GPUs only; their numbers count among those visible before."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = before.split(",") if before else None
    names = [visible[index] if visible else str(index) for index in devices]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def _masked_command() -> AbstractContextManager[None]:
    secrets = secret_values()
    return masked_entrypoint(lambda command: mask(command, secrets))


def wait_for_slots(workers: int, on_gpu: bool, timeout_s: float, note: Note) -> None:
    """Wait until the autoscaler has added what the workers need. Raises ResourceError after the timeout."""
    kind = "GPU" if on_gpu else "CPU"
    deadline = monotonic() + timeout_s
    requested = False
    while (present := int(ray.cluster_resources().get(kind, 0))) < workers:
        if monotonic() > deadline:
            raise ResourceError(
                f"{workers} workers need {workers} {kind}s; "
                f"after {timeout_s:.0f} s the cluster has {present}. "
                "Lower --workers, or give it more time with --resource-timeout"
            )
        if not requested:
            note(
                f"waiting up to {timeout_s:.0f} s for the autoscaler: {present} of {workers} {kind}s "
                "are there"
            )
            requested = True
            with suppress(Exception):
                from ray.autoscaler.sdk import request_resources

                request_resources(bundles=[{kind: 1}] * workers)
        sleep(0.5)


@contextmanager
def preloading_planner() -> Iterator[None]:
    """Import torch and the modules that plan a run in a thread, as long as the block waits.

    The block must not use torch, nor import parts of it, as ``ray.init`` does not: it would find
    modules that are half imported. At its end the imports are complete."""
    thread = threading.Thread(target=_import_planner, name="preload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _import_planner() -> None:
    # The code that needs a module reports the error.
    with suppress(Exception):
        import orchestrator.measure.tracing.model_facts
        import orchestrator.run.prepared_run  # noqa: F401
