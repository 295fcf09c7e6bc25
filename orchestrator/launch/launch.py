"""One launch: its options, the flags of its run, and the values that every kind of file needs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from orchestrator.launch.options import LaunchOptions, check_options, flag_of
from orchestrator.storage.address import as_url, location_text

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
