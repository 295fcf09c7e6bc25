"""Checks of this machine that try things instead of trusting reports: a file is written, a port is
bound.

Every check is a function of plain arguments that returns a ``CheckResult``. ``run_guarded`` turns
any error of a check into a failed check, so that one broken part of the machine does not hide the
results of the others.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from orchestrator.plan.checks.arithmetic import arithmetic_probes
from orchestrator.plan.checks.probe_types import (
    GPU_FIX,
    SUBPROCESS_TIMEOUT_S,
    CheckResult,
    MachineProbe,
    run_python,
    verdict,
)
from orchestrator.plan.inventory.gpus import Gpu, gpu_processes, nvml_view
from orchestrator.plan.inventory.hardware import Inventory, existing_folder, num_visible, ray_auth_mode
from orchestrator.types import GIB, MIB, bytes_text

MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)
MIN_RAY = (2, 56)
MIN_DISK_BYTES = GIB
MIN_SHARED_MEMORY_BYTES = 64 * MIB
MIN_RAM_BYTES = 2 * GIB
MIN_OPEN_FILES = 1024
MIN_GPU_MEMORY_FREE = 0.2  # share of the GPU's memory
RAY_PORT = 6379
DASHBOARD_PORT = 8265

RAY_FIX = 'pip install -U "ray[default,train,tune]>=2.56"'

_RAY_CODE = "import ray; print(ray.__version__)"
_PACKAGE_CODE = "import orchestrator"
_DASHBOARD_TIMEOUT_S = 3.0


def run_guarded(probe: MachineProbe) -> CheckResult:
    """Run a probe and return its result with its time; an error of any kind is a failed check."""
    start = time.perf_counter()
    try:
        check = probe.run()
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        found = f"{type(error).__name__}: {textwrap.shorten(lines[0], 200, placeholder=' …')}"
        check = CheckResult(probe.name, "fail", found, "no error", probe.fix)
    return replace(check, seconds=time.perf_counter() - start)


def probes_for(inventory: Inventory, folder: Path) -> tuple[MachineProbe, ...]:
    """Return all probes of this machine in their order; ``folder`` is where runs would be
    written."""
    return (*_host_probes(inventory, folder), *_gpu_probes(inventory), *arithmetic_probes(inventory))


def _host_probes(inventory: Inventory, folder: Path) -> Iterator[MachineProbe]:
    needed_versions = (
        ("python", MIN_PYTHON, "install Python 3.11 or newer"),
        ("torch", MIN_TORCH, 'pip install -U "torch>=2.11"'),
        ("ray", MIN_RAY, RAY_FIX),
    )
    for name, least, fix in needed_versions:
        yield MachineProbe(name, partial(check_version, name, inventory.versions.get(name), least, fix), fix)
    yield MachineProbe("ray imports", check_ray_import, RAY_FIX)
    yield MachineProbe("python of Ray jobs", check_job_python, "see 'As a Ray job' in docs/training.md")
    yield MachineProbe(
        "token of Ray jobs",
        partial(check_job_token, ray_auth_mode()),
        "see 'As a Ray job' in docs/training.md",
    )
    yield MachineProbe("ports", check_ports, "check the network settings of this machine or container")
    yield MachineProbe("RAM", partial(check_ram, inventory.ram_free), "check the memory of this machine")
    yield MachineProbe("shared memory", check_shared_memory, "mount a tmpfs at /dev/shm")
    yield MachineProbe("open files", check_open_files, "raise the limit: ulimit -n 65536")
    yield MachineProbe("disk", partial(check_disk, folder), "choose another folder with --run-dir")


def _gpu_probes(inventory: Inventory) -> Iterator[MachineProbe]:
    def check_count() -> CheckResult:
        return check_gpu_count(len(inventory.gpus), num_visible(nvml_view()), inventory.gpu_error)

    yield MachineProbe("GPU count", check_count, GPU_FIX)
    yield MachineProbe("GPU models", partial(check_gpu_models, inventory.gpus), GPU_FIX)
    for gpu in inventory.gpus:
        yield MachineProbe(f"cuda:{gpu.index} memory", partial(check_gpu_memory, gpu), GPU_FIX)


# --- the host


def check_version(name: str, installed: str | None, least: tuple[int, ...], fix: str) -> CheckResult:
    release = (installed or "").partition("+")[0]
    numbers = tuple(int(number) for number in re.findall(r"\d+", release))
    needed = f">= {'.'.join(map(str, least))}"
    return verdict(name, numbers >= least, installed or "not installed", needed, fix)


def check_ray_import(code: str = _RAY_CODE, timeout_s: float = SUBPROCESS_TIMEOUT_S) -> CheckResult:
    """Import Ray in a process of its own, because the import starts threads and sets signal
    handlers."""
    answer = run_python(code, timeout_s=timeout_s)
    needed = "import ray without an error"
    return verdict("ray imports", answer.passed, answer.line, needed, answer.fix(RAY_FIX))


def check_job_python(timeout_s: float = SUBPROCESS_TIMEOUT_S) -> CheckResult:
    """Look for this package in the Python that ``ray job submit … -- python`` would start on this machine."""
    name = "python of Ray jobs"
    needed = "a 'python' on the PATH that has the package orchestrator"
    fix = f"on this machine, write 'ray job submit … -- {sys.executable} -m orchestrator train'"
    python = shutil.which("python")
    if python is None:
        return CheckResult(name, "warn", "there is no 'python' on the PATH", needed, fix)
    # In another folder than this: a job has its own, and one with the repository would hide that the
    # package is not installed.
    with tempfile.TemporaryDirectory() as folder:
        answer = run_python(_PACKAGE_CODE, timeout_s=timeout_s, python=python, folder=folder)
    if answer.passed:
        return CheckResult(name, "pass", f"{python} has the package")
    return CheckResult(name, "warn", f"{python}: {answer.line}", needed, answer.fix(fix))


def check_job_token(auth_mode: str, port: int = DASHBOARD_PORT) -> CheckResult:
    """Ask the Ray dashboard of this machine for its version, as ``ray job submit`` does first.

    The request carries no token: another program may listen on this port.
    """
    name = "token of Ray jobs"
    address = f"http://127.0.0.1:{port}"
    connection = HTTPConnection("127.0.0.1", port, timeout=_DASHBOARD_TIMEOUT_S)
    try:
        connection.request("GET", "/api/version")
        status = connection.getresponse().status
    except (OSError, HTTPException):
        return CheckResult(name, "skip", f"no Ray dashboard answers at {address}")
    finally:
        connection.close()
    if status != HTTPStatus.UNAUTHORIZED:
        return CheckResult(name, "pass", f"{address} requires no token")
    if auth_mode.lower() == "token":
        return CheckResult(name, "pass", f"{address} requires a token, and RAY_AUTH_MODE=token sends it")
    found = f"{address} requires a token, and 'ray job submit' would send none: HTTP 401"
    needed = "RAY_AUTH_MODE=token, and the token of the cluster's head in ~/.ray/auth_token"
    fix = (
        "export RAY_AUTH_MODE=token before 'ray job submit'. A cluster requires a token whenever "
        "~/.ray/auth_token exists as it starts; for one without, remove that file first"
    )
    return CheckResult(name, "warn", found, needed, fix)


def check_ports(
    ray_port: int = RAY_PORT, dashboard_port: int = DASHBOARD_PORT, any_port: int = 0
) -> CheckResult:
    """Fail only if no port at all is free. Ray's own ports may be taken by a running cluster."""
    taken = []
    if not _can_bind(ray_port):
        taken.append(f"{ray_port} in use: a Ray cluster may be running; a run would join it")
    if not _can_bind(dashboard_port):
        taken.append(f"{dashboard_port} in use: Ray's dashboard would take the next free port")
    found = "; ".join(taken) or f"{ray_port} and {dashboard_port} free"
    if _can_bind(any_port):
        return CheckResult("ports", "pass", found)
    fix = (
        "allow sockets in this container; close programs with many connections, "
        "or widen net.ipv4.ip_local_port_range"
    )
    return CheckResult(
        "ports", "fail", f"{found}; there is no free port", "a free port for the workers' rendezvous", fix
    )


def _can_bind(port: int) -> bool:
    with socket.socket() as listener:
        # Without SO_REUSEADDR a connection that was closed a minute ago counts as in use.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


def check_ram(free: int, least: int = MIN_RAM_BYTES) -> CheckResult:
    fix = "close other programs, or raise the memory limit of the container"
    return verdict("RAM", free >= least, f"{bytes_text(free)} free", f"{bytes_text(least)} free", fix)


def check_shared_memory(folder: Path = Path("/dev/shm"), least: int = MIN_SHARED_MEMORY_BYTES) -> CheckResult:
    """Check the memory through which Ray's object store and the data loader's processes pass
    tensors."""
    if not folder.is_dir():
        return CheckResult("shared memory", "skip", f"this system has no {folder}")
    usage = shutil.disk_usage(folder)
    found = f"{bytes_text(usage.free)} free of {bytes_text(usage.total)} at {folder}"
    fix = f"start the container with --shm-size=8g (docker), or delete files in {folder}"
    return verdict("shared memory", usage.free >= least, found, f"{bytes_text(least)} free", fix)


def check_open_files(limit: int | None = None, least: int = MIN_OPEN_FILES) -> CheckResult:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    unlimited = limit == resource.RLIM_INFINITY
    found = "no limit" if unlimited else f"a limit of {limit}"
    passed = unlimited or limit >= least
    return verdict("open files", passed, found, f"at least {least}", "raise the limit: ulimit -n 65536")


def check_disk(folder: Path, least: int = MIN_DISK_BYTES) -> CheckResult:
    """Write a file to the folder's file system and read it back."""
    needed = f"a folder to write to, with {bytes_text(least)} free"
    parent = existing_folder(folder)
    payload = os.urandom(MIB)
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".orchestrator-check-") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())  # otherwise the page cache hides a broken disk
            intact = Path(file.name).read_bytes() == payload
    except OSError as error:
        fix = "choose a folder with write permission with --run-dir"
        return CheckResult("disk", "fail", f"cannot write to {parent}: {error.strerror}", needed, fix)
    free = shutil.disk_usage(parent).free
    found = (
        f"{bytes_text(free)} free at {parent}" if intact else f"a file in {parent} was not read back intact"
    )
    fix = "free some space, or choose a folder on another disk with --run-dir"
    return verdict("disk", intact and free >= least, found, needed, fix)


# --- GPUs


def check_gpu_count(torch_count: int, nvml_count: int | None, error: str | None = None) -> CheckResult:
    name = "GPU count"
    needed = "torch and the driver see the same GPUs"
    if error:
        found, _, fix = error.partition("\n")
        return CheckResult(name, "fail", found, needed, fix or GPU_FIX)
    if torch_count == 0 and not nvml_count:
        return CheckResult(name, "skip", "no GPU")
    if nvml_count is None:
        found = f"torch sees {torch_count}; NVML does not work, so GPU use is not monitored"
        return CheckResult(name, "skip", found)
    fix = f"check CUDA_VISIBLE_DEVICES, and nvidia-smi for GPUs that have failed; {GPU_FIX}"
    found = f"torch sees {torch_count}, NVML {nvml_count}"
    return verdict(name, torch_count == nvml_count, found, needed, fix)


def check_gpu_models(gpus: Sequence[Gpu]) -> CheckResult:
    if not gpus:
        return CheckResult("GPU models", "skip", "no GPU")
    counts = Counter(gpu.name for gpu in gpus)
    models = ", ".join(f"{count} × {name}" for name, count in counts.items())
    if len(counts) > 1:
        models = f"mixed: {models}; the slowest sets the pace"
    return CheckResult("GPU models", "pass", models)


def check_gpu_memory(gpu: Gpu, processes: Sequence[str] | None = None) -> CheckResult:
    """Check the free memory; ``processes`` on the GPU are looked up if they are not given."""
    name = f"cuda:{gpu.index} memory"
    found = f"{bytes_text(gpu.memory_free)} free of {bytes_text(gpu.memory_total)}"
    least = MIN_GPU_MEMORY_FREE * gpu.memory_total
    if gpu.memory_free >= least:
        return CheckResult(name, "pass", found)
    processes = gpu_processes(gpu.uuid) if processes is None else processes
    users = ", ".join(processes) or "a process the driver does not name"
    fix = "end that process, or choose another GPU with CUDA_VISIBLE_DEVICES"
    return CheckResult(name, "fail", f"{found}; used by {users}", f"{bytes_text(least)} free", fix)
