"""Cores and memory that this process may use, limits of its container included, and what its CPU
is."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
# Linux names no ARM core in /proc/cpuinfo, only its number; these are the ones servers have.
_ARM_CORES = {"0xd0c": "N1", "0xd40": "V1", "0xd49": "N2", "0xd4f": "V2", "0xd84": "V3", "0xd8e": "N3"}


def cpu_facts(cpuinfo: str) -> tuple[str, bool]:
    """Name of the CPU and whether it has bf16 units, from the text of /proc/cpuinfo."""
    facts: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip().lower(), value.strip())
    flags = facts.get("flags") or facts.get("features") or ""
    core = _ARM_CORES.get(facts.get("cpu part", ""))
    name = facts.get("model name") or (
        f"ARM Neoverse-{core}" if core else platform.processor() or platform.machine()
    )
    return name, not _BF16_FLAGS.isdisjoint(flags.split())


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity, and the CPU quota of its control groups rounded
    down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _cpu_quotas(root))]))


def _cpu_quotas(root: Path) -> Iterator[float]:
    for folder in _cgroup_folders(root, "cpu"):
        quota, _, period = system_text(folder / "cpu.max").strip().partition(" ")
        if not quota:  # version 1 keeps the two numbers in two files
            quota, period = (
                system_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
            )
        # "max" and -1 mean no limit
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)


def usable_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Bytes of memory in total and free, of the machine or of the tightest control group around
    us."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None:
            total = min(total, limit)
            free = min(free, max(0, limit - max(0, (used or 0) - _cached_bytes(folder))))
    return total, free


def _cached_bytes(folder: Path) -> int:
    """File pages the kernel drops when memory gets short: charged to the group, yet as good as
    free."""
    stat = dict(
        line.split() for line in system_text(folder / "memory.stat").splitlines() if len(line.split()) == 2
    )
    return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)


def _number(folder: Path, *names: str) -> int | None:
    texts = (system_text(folder / name).strip() for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's control groups, each up to the top: a limit may sit at any level, in version
    2 or in version 1.

    Inside a container the path in /proc may be the host's; those folders do not exist here, and
    the top one is ours.
    """
    for line in system_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        relative = Path(path.lstrip("/"))
        yield from (base / part for part in (relative, *relative.parents) if (base / part).is_dir())


def system_text(path: Path) -> str:
    """A small system file, or nothing: which of them exist depends on kernel and container."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
