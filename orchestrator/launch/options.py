"""The options of ``orchestrator launch``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from orchestrator.errors import UserError
from orchestrator.storage.address import as_url, check_address
from orchestrator.types import VERSION

Kind = Literal["kuberay", "kuberay-cluster", "slurm", "ssh", "ray-up", "skypilot"]
Cloud = Literal["aws", "gcp", "none"]

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_LEAST = {"workers": 1, "gpus_per_node": 0, "cpus_per_node": 1, "memory_per_node": 1}
_PODS: tuple[Kind, ...] = ("kuberay", "kuberay-cluster")
_USED_BY: Mapping[str, tuple[Kind, ...]] = {
    "image": (*_PODS, "ray-up"),
    "memory_per_node": (*_PODS, "skypilot"),
    "spot": (*_PODS, "ray-up", "skypilot"),
    "storage": (*_PODS, "ray-up", "skypilot"),
    "python": ("slurm", "ssh", "ray-up"),
    "hosts": ("ssh", "ray-up"),
    "cloud": ("ray-up",),
    "instance_type": ("ray-up",),
    "region": ("ray-up",),
    "project": ("ray-up",),
}
"""Options that some kinds of file do not use, with the kinds that do."""


@dataclass(frozen=True)
class LaunchOptions:
    """Write the file that starts a cluster and trains on it; the flags of the run follow after ``--``."""

    kind: Kind
    """The file to write: a RayJob of KubeRay (kuberay) or a RayCluster for several runs; a batch script
    of Slurm; a script that starts Ray on hosts over ssh; a file of 'ray up' or of SkyPilot."""
    workers: int = 2
    """Training processes, each with one GPU, as in train."""
    gpus_per_node: int = 1
    """GPUs of each node; 0: CPUs only, with one worker on each node."""
    gpu: str | None = None
    """Model of the GPUs, such as H100: the run is planned for it, and refused if it does not fit.
    Default: the plan is not checked."""
    cpus_per_node: int | None = None
    """CPU cores of each node. Default: 8 for each GPU."""
    memory_per_node: int | None = None
    """Main memory of each node in GiB. Default: 32 for each GPU."""
    name: str = "training"
    """Name of the run and of everything that is created for it."""
    run_dir: Path | None = None
    """The run folder: a path on storage that all nodes share, or an address (s3://bucket/run1).
    Default: /runs/NAME."""
    storage: str | None = None
    """Storage that is mounted on every node where the run folder is: on Kubernetes a
    PersistentVolumeClaim (default: training-runs), in clouds SERVER:/EXPORT of an NFS server."""
    image: str = f"expert-orchestrator:{VERSION}"
    """Container image; cluster/Dockerfile builds it."""
    spot: bool = False
    """Allow spot (preemptible) nodes."""
    python: str = "python"
    """slurm, ssh and machines of your own: the Python of every node that has the packages installed."""
    hosts: tuple[str, ...] = ()
    """ssh and machines of your own: HOST or USER@HOST of every node, the head first."""
    cloud: Cloud = "aws"
    """ray-up: the cloud; none for machines of your own."""
    instance_type: str | None = None
    """ray-up: the machines that train. Default: one with an L4."""
    region: str | None = None
    """ray-up: region of the cloud. Default: us-west-2 of AWS, us-central1 of GCP."""
    project: str | None = None
    """ray-up: id of the project of GCP."""
    out: Path | None = None
    """File to write. Default: the screen."""


def check_options(options: LaunchOptions) -> None:
    """Raise UserError for values that no cluster takes, and for options that this kind does not use."""
    if not _NAME.fullmatch(options.name):
        raise UserError(
            f"--name is {options.name!r}; up to 40 lower-case letters, digits and dashes were needed, "
            "beginning with a letter: it names the resources of the cluster"
        )
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"{flag_of(name)} is {value}; it must be {least} or more")
    for field in fields(options):
        kinds = _USED_BY.get(field.name)
        is_given = getattr(options, field.name) != field.default
        if is_given and kinds and options.kind not in kinds:
            raise UserError(
                f"launch {options.kind} does not use {flag_of(field.name)}, only {', '.join(kinds)}; "
                "leave it out"
            )
    _check_run_dir(options.run_dir)


def _check_run_dir(run_dir: Path | None) -> None:
    try:
        check_address("run_dir", run_dir)
    except ValueError as error:
        raise UserError(str(error)) from None
    if run_dir is None or as_url(run_dir):
        return
    if not run_dir.is_absolute() or run_dir.parent == Path("/"):
        raise UserError(
            f"--run-dir is {run_dir}; an absolute path in a folder that all nodes share was needed, "
            "such as /runs/run1, or an address such as s3://bucket/run1"
        )


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
