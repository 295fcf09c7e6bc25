"""A Ray cluster to run on: joined where one runs, started where none does, and left as it was found."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import ray

from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.plan.cluster import Cluster, chosen_gpus
from orchestrator.plan.hardware import Inventory
from orchestrator.runtime.survey import survey

_JOIN_SECONDS = 20  # to find a cluster that was named
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
}


@dataclass(frozen=True)
class Session:
    """The cluster of a run, and the hardware of the node that its plan is made for."""

    cluster: Cluster
    inventory: Inventory
    note: Callable[[str], None]


@contextmanager
def session(config: Config, found: Inventory, note: Callable[[str], None]) -> Iterator[Session]:
    """A cluster for one run. ``found`` is this machine."""
    settings = config.parallel
    for name, value in (_SHORT | _waiting(settings.collective_timeout)).items():
        os.environ.setdefault(name, value)
    ours = not ray.is_initialized()
    joined = True if not ours else _enter(config, found, note)
    try:
        cluster, node = survey(found, joined=joined)
        yield Session(cluster, node, note)
    finally:
        if ours:
            ray.shutdown()


def _waiting(collective_timeout: int) -> dict[str, str]:
    return {
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": str(collective_timeout),
    }


def _enter(config: Config, found: Inventory, note: Callable[[str], None]) -> bool:
    """Join or start a cluster. Returns whether it is someone else's."""
    address = config.parallel.ray_address
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if address not in ("auto", "local"):
        _join(address, quiet)
        return True
    if address == "auto" and _runs_here(quiet):
        return True
    _start(config, found, quiet, note)
    return False


def _join(address: str, quiet: dict[str, Any]) -> None:
    try:
        ray.init(address=address, **quiet)
    except Exception as error:  # Ray raises ConnectionError, RuntimeError and others, by what it got to
        raise ResourceError(
            f"--ray-address {address}: no Ray cluster answers there ({_first_line(error)}); "
            "check it with 'ray status --address …', or leave the flag out to start one here"
        ) from None


def _runs_here(quiet: dict[str, Any]) -> bool:
    """Join the cluster that RAY_ADDRESS names or that runs on this machine, if there is one."""
    named = os.environ.get("RAY_ADDRESS")
    try:
        ray.init(address="auto", **quiet)
        return True
    except ConnectionError as error:
        if named:
            raise ResourceError(
                f"RAY_ADDRESS is {named}, but no Ray cluster answers there ({_first_line(error)}); unset it, or give --ray-address local"
            ) from None
        return False


def _start(config: Config, found: Inventory, quiet: dict[str, Any], note: Callable[[str], None]) -> None:
    """A cluster of this machine alone, for this run alone. On a CPU it has as many slots as there are workers; torch is
    loaded into its processes before a worker needs one."""
    settings = config.parallel
    gpus = [] if config.device.gpu_mode == "cpu" else list(chosen_gpus(found, settings.devices))
    if settings.devices:
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = before.split(",") if before else None
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in settings.devices)
    workers = settings.workers if isinstance(settings.workers, int) else 0
    slots = max(workers, found.cores)
    if not gpus and workers > found.cores:
        note(f"{workers} workers on {found.cores} cores: the cluster started for this run declares {slots} CPU slots")
    for name, value in _calm().items():
        os.environ.setdefault(name, value)
    ray.init(
        address="local",
        num_cpus=slots,
        num_gpus=len(gpus),
        include_dashboard=False,
        _system_config={"preload_python_modules": ["torch"]},
        **quiet,
    )
    _lock_token()


def _calm() -> dict[str, str]:
    return {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def _lock_token() -> None:
    """Ray leaves the token that lets one into its clusters readable by all; it is the user's alone."""
    with suppress(OSError):
        token = Path.home() / ".ray" / "auth_token"
        if token.exists() and token.stat().st_uid == os.getuid():
            token.chmod(0o600)


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
            note(f"waiting up to {patience_s:.0f} s for the autoscaler: {there} of {workers} {kind}s are there")
            told = True
            with suppress(Exception):
                from ray.autoscaler.sdk import request_resources

                request_resources(bundles=[{kind: 1}] * workers)
        sleep(0.5)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def set_variables(values: dict[str, str]) -> None:
    """Variables of a worker, before the libraries that read them begin."""
    os.environ.update(values)


def variable(name: str) -> str:
    """A variable of this process; empty where it is not set."""
    return os.environ.get(name, "")
