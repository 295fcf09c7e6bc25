"""The CPU of this machine, and the cores and memory that this process may use, container limits
included."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
# /proc/cpuinfo has no name of an ARM core, only its part number; these are the cores of servers.
_ARM_CORES = {"0xd0c": "N1", "0xd40": "V1", "0xd49": "N2", "0xd4f": "V2", "0xd84": "V3", "0xd8e": "N3"}


def cpu_facts(cpuinfo: str) -> tuple[str, bool]:
    """Return the name of the CPU and whether it has bf16 units, from the text of /proc/cpuinfo."""
    facts: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip().lower(), value.strip())
    flags = facts.get("flags") or facts.get("features") or ""
    arm_core = _ARM_CORES.get(facts.get("cpu part", ""))
    name = facts.get("model name")
    if not name:
        name = f"ARM Neoverse-{arm_core}" if arm_core else platform.processor() or platform.machine()
    return name, not _BF16_FLAGS.isdisjoint(flags.split())


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores of the process's affinity, at most the CPU quota of its control groups,
    rounded down."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quotas = [int(quota) for quota in _cpu_quotas(root)]
    return max(1, min([cores, *quotas]))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's control groups, in cores."""
    for folder in _cgroup_folders(root, "cpu"):
        quota, _, period = system_text(folder / "cpu.max").strip().partition(" ")
        if not quota:  # cgroup v1 keeps the two numbers in two files
            quota = system_text(folder / "cpu.cfs_quota_us").strip()
            period = system_text(folder / "cpu.cfs_period_us").strip()
        # "max" and -1 mean no limit.
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)


def usable_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the total and the free bytes of the machine, or of the tightest control group."""
    machine = psutil.virtual_memory()
    total = machine.total
    free = machine.available
    for folder in _cgroup_folders(root, "memory"):
        limit = _first_number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is None:
            continue
        used = _first_number(folder, "memory.current", "memory.usage_in_bytes") or 0
        used_without_cache = max(0, used - _cached_bytes(folder))
        total = min(total, limit)
        free = min(free, max(0, limit - used_without_cache))
    return total, free


def _cached_bytes(folder: Path) -> int:
    """Return the file pages that the kernel drops if memory gets short: the group is charged for
    free memory."""
    lines = [line.split() for line in system_text(folder / "memory.stat").splitlines()]
    stat = dict(words for words in lines if len(words) == 2)
    return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)


def _first_number(folder: Path, *names: str) -> int | None:
    """Return the number in the first of these files that has one."""
    texts = (system_text(folder / name).strip() for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, each up to the root, in cgroup v2 and
    v1.

    A limit may be set at any level. In a container the path in /proc may be the host's: those
    folders do not exist, and the root folder is the container's.
    """
    for line in system_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        relative = Path(path.lstrip("/"))
        for part in (relative, *relative.parents):
            if (base / part).is_dir():
                yield base / part


def system_text(path: Path) -> str:
    """Return the text of a small system file; empty if this kernel or container does not have
    it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
