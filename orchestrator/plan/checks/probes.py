"""Checks that try things instead of believing what is reported: numbers are multiplied, a file
written, a port bound.

Every probe is a function of plain arguments that returns a ``Check``; ``run_probes`` runs them one
after another, each guarded, so that one broken part of the machine never hides the verdict on the
others.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from orchestrator.plan.checks.arithmetic import arithmetic_probes
from orchestrator.plan.checks.probe_types import (
    GPU_FIX,
    SUBPROCESS_SECONDS,
    CheckResult,
    MachineProbe,
    run_python,
    verdict,
)
from orchestrator.plan.inventory.hardware import Gpu, Inventory, existing_folder, gpu_processes, nvml_view
from orchestrator.types import GIB, MIB, bytes_text

MIN_PYTHON, MIN_TORCH, MIN_RAY = (3, 11), (2, 11), (2, 56)
MIN_DISK, MIN_SHARED_MEMORY, MIN_RAM, MIN_OPEN_FILES = GIB, 64 * MIB, 2 * GIB, 1024
MIN_GPU_MEMORY_FREE = 0.2
RAY_PORT, DASHBOARD_PORT = 6379, 8265

RAY_FIX = 'pip install -U "ray[default,train,tune]>=2.56"'

_RAY_CODE = "import ray; print(ray.__version__)"


def run_probes(inventory: Inventory, folder: Path) -> Iterator[CheckResult]:
    """Every check of this machine, one after another; ``folder`` is where runs would be
    written."""
    yield from map(run_guarded, probes_for(inventory, folder))


def run_guarded(probe: MachineProbe) -> CheckResult:
    """The probe's verdict with its time; an error of any kind is a failed check, not the end of
    the others."""
    start = time.perf_counter()
    try:
        check = probe.run()
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        found = f"{type(error).__name__}: {textwrap.shorten(first, 200, placeholder=' …')}"
        check = CheckResult(probe.name, "fail", found, "no error", probe.fix)
    return replace(check, seconds=time.perf_counter() - start)


def probes_for(inventory: Inventory, folder: Path) -> tuple[MachineProbe, ...]:
    """The checks in their order, for callers that name each before it runs."""
    return (*_host_probes(inventory, folder), *_gpu_probes(inventory), *arithmetic_probes(inventory))


def _host_probes(inventory: Inventory, folder: Path) -> Iterator[MachineProbe]:
    floors = (
        ("python", MIN_PYTHON, "install Python 3.11 or newer"),
        ("torch", MIN_TORCH, 'pip install -U "torch>=2.11"'),
    )
    for name, least, fix in (*floors, ("ray", MIN_RAY, RAY_FIX)):
        yield MachineProbe(name, partial(version, name, inventory.versions.get(name), least, fix), fix)
    yield MachineProbe("ray imports", ray_imports, RAY_FIX)
    yield MachineProbe("ports", ports_free, "look at the network settings of this machine or container")
    yield MachineProbe("RAM", partial(ram_free, inventory.ram_free), "look at the memory of this machine")
    yield MachineProbe("shared memory", shared_memory, "mount a tmpfs at /dev/shm")
    yield MachineProbe("open files", open_files, "raise the limit: ulimit -n 65536")
    yield MachineProbe("disk", partial(disk_writable, folder), "give another folder by --run-dir")


def _gpu_probes(inventory: Inventory) -> Iterator[MachineProbe]:
    def count() -> CheckResult:
        nvml = nvml_view()
        return gpu_count(len(inventory.gpus), nvml.visible if nvml else None, inventory.gpu_error)

    yield MachineProbe("GPU count", count, GPU_FIX)
    yield MachineProbe("GPU models", partial(gpu_models, inventory.gpus), GPU_FIX)
    for gpu in inventory.gpus:
        yield MachineProbe(f"cuda:{gpu.index} memory", partial(gpu_memory, gpu), GPU_FIX)


# --- the host


def version(name: str, found: str | None, least: tuple[int, ...], fix: str) -> CheckResult:
    numbers = tuple(int(number) for number in re.findall(r"\d+", (found or "").partition("+")[0]))
    return verdict(name, numbers >= least, found or "not installed", f">= {'.'.join(map(str, least))}", fix)


def ray_imports(code: str = _RAY_CODE, timeout: float = SUBPROCESS_SECONDS) -> CheckResult:
    """In a process of its own: Ray's import starts threads and signal handlers that we do not want
    here."""
    passed, line = run_python(code, timeout=timeout)
    return verdict("ray imports", passed, line, "import ray without an error", RAY_FIX)


def ports_free(ray: int = RAY_PORT, dashboard: int = DASHBOARD_PORT, spare: int = 0) -> CheckResult:
    """Taken ports of Ray are no failure: somebody's cluster may be running. That no port at all is
    to be had is one."""
    taken = []
    if not _can_bind(ray):
        taken.append(f"{ray} in use: a Ray cluster may be running; we would join it")
    if not _can_bind(dashboard):
        taken.append(f"{dashboard} in use: Ray's dashboard would take the next free port")
    found = "; ".join(taken) or f"{ray} and {dashboard} free"
    if _can_bind(spare):
        return CheckResult("ports", "pass", found)
    fix = "allow sockets in this container; close programs with many connections, or widen net.ipv4.ip_local_port_range"
    return CheckResult(
        "ports", "fail", f"{found}; no free port to be had", "a free port for the workers to meet at", fix
    )


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a connection closed a minute ago is not "in use"
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def ram_free(free: int, least: int = MIN_RAM) -> CheckResult:
    fix = "close other programs, or raise the memory limit of the container"
    return verdict("RAM", free >= least, f"{bytes_text(free)} free", f"{bytes_text(least)} free", fix)


def shared_memory(folder: Path = Path("/dev/shm"), least: int = MIN_SHARED_MEMORY) -> CheckResult:
    """Ray's object store and the data loader's processes pass tensors through it."""
    if not folder.is_dir():
        return CheckResult("shared memory", "skip", f"this system has no {folder}")
    size = shutil.disk_usage(folder)
    found = f"{bytes_text(size.free)} free of {bytes_text(size.total)} at {folder}"
    fix = f"start the container with --shm-size=8g (docker), or delete what fills {folder}"
    return verdict("shared memory", size.free >= least, found, f"{bytes_text(least)} free", fix)


def open_files(limit: int | None = None, least: int = MIN_OPEN_FILES) -> CheckResult:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    unlimited = limit == resource.RLIM_INFINITY
    found = "no limit" if unlimited else f"a limit of {limit}"
    return verdict(
        "open files",
        unlimited or limit >= least,
        found,
        f"at least {least}",
        "raise the limit: ulimit -n 65536",
    )


def disk_writable(folder: Path, least: int = MIN_DISK) -> CheckResult:
    needed = f"a folder to write to, with {bytes_text(least)} free"
    home, payload = existing_folder(folder), os.urandom(MIB)
    try:
        with tempfile.NamedTemporaryFile(dir=home, prefix=".orchestrator-check-") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
            same = Path(file.name).read_bytes() == payload
    except OSError as error:
        fix = "choose a folder that you may write to by --run-dir"
        return CheckResult("disk", "fail", f"cannot write to {home}: {error.strerror}", needed, fix)
    free = shutil.disk_usage(home).free
    found = (
        f"{bytes_text(free)} free at {home}" if same else f"what was written to {home} reads back otherwise"
    )
    return verdict(
        "disk",
        same and free >= least,
        found,
        needed,
        "free some space, or choose a folder on another disk by --run-dir",
    )


# --- GPUs


def gpu_count(torch_sees: int, nvml_sees: int | None, error: str | None = None) -> CheckResult:
    name, needed = "GPU count", "torch and the driver see the same GPUs"
    if error:
        found, _, fix = error.partition("\n")
        return CheckResult(name, "fail", found, needed, fix or GPU_FIX)
    if nvml_sees is None:
        found = (
            f"torch sees {torch_sees}; NVML cannot tell, so GPU use is not monitored"
            if torch_sees
            else "no GPU"
        )
        return CheckResult(name, "skip", found)
    if torch_sees == nvml_sees == 0:
        return CheckResult(name, "skip", "no GPU")
    fix = f"look at CUDA_VISIBLE_DEVICES and at nvidia-smi for GPUs that have failed; {GPU_FIX}"
    return verdict(name, torch_sees == nvml_sees, f"torch sees {torch_sees}, NVML {nvml_sees}", needed, fix)


def gpu_models(gpus: Sequence[Gpu]) -> CheckResult:
    if not gpus:
        return CheckResult("GPU models", "skip", "no GPU")
    counts = Counter(gpu.name for gpu in gpus)
    listed = ", ".join(f"{count} × {name}" for name, count in counts.items())
    return CheckResult(
        "GPU models", "pass", listed if len(counts) == 1 else f"mixed: {listed}; the slowest sets the pace"
    )


def gpu_memory(gpu: Gpu, holders: Sequence[str] | None = None) -> CheckResult:
    found = f"{bytes_text(gpu.memory_free)} free of {bytes_text(gpu.memory_total)}"
    least = MIN_GPU_MEMORY_FREE * gpu.memory_total
    if gpu.memory_free >= least:
        return CheckResult(f"cuda:{gpu.index} memory", "pass", found)
    others = (
        ", ".join(gpu_processes(gpu.uuid) if holders is None else holders)
        or "a process the driver does not name"
    )
    fix = "end that process, or choose another GPU by CUDA_VISIBLE_DEVICES"
    return CheckResult(
        f"cuda:{gpu.index} memory", "fail", f"{found}; held by {others}", f"{bytes_text(least)} free", fix
    )
