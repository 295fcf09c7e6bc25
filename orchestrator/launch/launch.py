"""One launch: its options, the flags of its run, and the values that every kind of file needs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from orchestrator.errors import UserError
from orchestrator.storage.address import as_url, check_address, location_text
from orchestrator.types import VERSION, flag_of

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


_SHARED_FOLDER = "/runs"
_CPUS_PER_GPU = 8
_MEMORY_PER_GPU_GIB = 32


@dataclass(frozen=True)
class Launch:
    """The options of a file with the flags of its run."""

    options: LaunchOptions
    flags: tuple[str, ...]
    """Flags of ``orchestrator train``, without those that the file sets itself."""

    def __post_init__(self) -> None:
        check_options(self.options)

    @property
    def nodes(self) -> int:
        """Nodes that train."""
        per_node = max(1, self.options.gpus_per_node)
        return -(-self.options.workers // per_node)

    @property
    def cpus_on_node(self) -> int:
        return self.options.cpus_per_node or _CPUS_PER_GPU * max(1, self.options.gpus_per_node)

    @property
    def memory_on_node_gib(self) -> int:
        return self.options.memory_per_node or _MEMORY_PER_GPU_GIB * max(1, self.options.gpus_per_node)

    @property
    def hosts(self) -> list[str]:
        """Hosts of ``--hosts a,b`` and of ``--hosts a b``."""
        return [host for word in self.options.hosts for host in word.split(",") if host]

    @property
    def needs_storage(self) -> bool:
        """Whether the nodes mount storage: a run with an address needs none, and takes what it is given."""
        return self.address is None or self.options.storage is not None

    @property
    def address(self) -> str | None:
        """The address of the run folder; None if it is a path."""
        return as_url(self.options.run_dir)

    @property
    def run_dir(self) -> str:
        """The run folder, as train is given it."""
        return self.address or str(self.options.run_dir or f"{_SHARED_FOLDER}/{self.options.name}")

    @property
    def shared_folder(self) -> str:
        """The folder in which the run is started: all nodes share it, unless the run has an address."""
        return _SHARED_FOLDER if self.address else str(Path(self.run_dir).parent)

    def train_command(self) -> list[str]:
        """Return the command that trains: the same one begins a run and continues it."""
        fixed = ["--workers", str(self.options.workers), "--run-dir", self.run_dir, "--resume", "auto"]
        return [self.options.python, "-m", "orchestrator", "train", *fixed, *self.flags]

    def launch_command(self) -> str:
        """Return the command line that writes this file."""
        given: list[str] = []
        for field in fields(self.options):
            value = getattr(self.options, field.name)
            if field.name not in ("kind", "out") and value != field.default:
                given += _as_flag(field.name, value)
        flags = ["--", *self.flags] if self.flags else []
        return shlex.join(["orchestrator", "launch", self.options.kind, *given, *flags])


def _as_flag(name: str, value: object) -> Sequence[str]:
    if value is True:
        return [flag_of(name)]
    if isinstance(value, tuple):
        return [flag_of(name), ",".join(value)]
    text = location_text(value) if isinstance(value, Path) else str(value)
    return [flag_of(name), text]
