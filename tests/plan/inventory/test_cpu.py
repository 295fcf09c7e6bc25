"""The CPU, and the cores and memory of invented control groups."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from orchestrator.plan.inventory.cpu import cpu_facts, usable_cores, usable_memory
from orchestrator.types import GIB


@pytest.mark.parametrize(
    ("cpuinfo", "name", "bf16"),
    [
        ("model name\t: Xeon 6\nflags\t\t: sse4_2 avx512_bf16 amx_bf16\n", "Xeon 6", True),
        ("model name\t: Core i5\nflags\t\t: sse4_2 avx2 avx512f\n", "Core i5", False),
        ("Features\t: fp asimd bf16 i8mm\nCPU part\t: 0xd4f\n", "ARM Neoverse-V2", True),
        ("Features\t: fp asimd asimddp\nCPU part\t: 0xd0c\n", "ARM Neoverse-N1", False),
    ],
)
def test_the_name_and_bf16_units_are_read_from_cpuinfo(cpuinfo: str, name: str, bf16: bool):
    assert cpu_facts(cpuinfo) == (name, bf16)


def test_an_unknown_cpu_still_has_a_name():
    assert cpu_facts("")[0]


def cgroups(root: Path, membership: str, files: dict[str, str]) -> Path:
    """Write the control groups of a process below ``root``."""
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    texts["proc/self/cgroup"] = membership
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, 16),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "350000 100000"}, 3),
        ("0::/a", {"a/cpu.max": "50000 100000"}, 1),
        ("0::/host/only", {"cpu.max": "400000 100000"}, 4),
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("3:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 16),
        ("2:cpuset:/a", {"cpu/a/cpu.cfs_quota_us": "200000"}, 16),
    ],
)
def test_cores_respect_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], cores: int
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert usable_cores(cgroups(tmp_path, membership, files)) == cores


def test_cores_respect_the_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert usable_cores(tmp_path) == 1


@pytest.fixture
def big_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))


@pytest.mark.usefixtures("big_machine")
def test_memory_respects_the_limit_and_counts_cached_files_as_free(tmp_path: Path):
    files = {
        "a/memory.max": str(8 * GIB),
        "a/memory.current": str(5 * GIB),
        "a/memory.stat": f"anon 1\ninactive_file {2 * GIB}",
    }
    assert usable_memory(cgroups(tmp_path, "0::/a/b", {**files, "a/b/memory.max": "max"})) == (
        8 * GIB,
        5 * GIB,
    )


@pytest.mark.usefixtures("big_machine")
def test_memory_respects_a_limit_of_cgroup_v1(tmp_path: Path):
    files = {"memory/a/memory.limit_in_bytes": str(4 * GIB), "memory/a/memory.usage_in_bytes": str(GIB)}
    assert usable_memory(cgroups(tmp_path, "4:memory:/a", files)) == (4 * GIB, 3 * GIB)


@pytest.mark.usefixtures("big_machine")
def test_memory_without_a_limit_is_that_of_the_machine(tmp_path: Path):
    files = {
        "memory/a/memory.limit_in_bytes": "9223372036854771712",
        "memory/a/memory.usage_in_bytes": str(GIB),
    }
    assert usable_memory(cgroups(tmp_path, "4:memory:/a", files)) == (64 * GIB, 60 * GIB)
