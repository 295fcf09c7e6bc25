"""Checks that try things instead of believing what is reported: numbers are multiplied, a file written, a port bound.

Every probe is a function of plain arguments that returns a ``Check``; ``run_probes`` runs them one after another, each
guarded, so that one broken part of the machine never hides the verdict on the others.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestrator.plan.hardware import Gpu, Inventory, existing_folder, gpu_processes, nvml_view
from orchestrator.types import GIB, MIB, bytes_text

if TYPE_CHECKING:
    import torch

MIN_PYTHON, MIN_TORCH, MIN_RAY = (3, 11), (2, 11), (2, 56)
MIN_DISK, MIN_SHARED_MEMORY, MIN_RAM, MIN_OPEN_FILES = GIB, 64 * MIB, 2 * GIB, 1024
MIN_GPU_MEMORY_FREE = 0.2
BF16_CAPABILITY = TF32_CAPABILITY = (8, 0)
RAY_PORT, DASHBOARD_PORT = 6379, 8265
SUBPROCESS_SECONDS = 120.0

# Largest relative error (Frobenius norm) of a product of normal numbers: some four times that of correct units.
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3, "tf32": 2e-3}
FUSED_TOLERANCE = 1e-5
COMPARED_SIZE = 512  # the reference is a float64 product on the CPU, so kept small
CPU_TIMED_SIZE, GPU_TIMED_SIZE = 256, 4096  # an emulated product of 256 takes 0.2 s; 4096 fills a GPU

RAY_FIX = 'pip install -U "ray[default,train,tune]>=2.56"'
GPU_FIX = "run nvidia-smi; update the driver or install the torch build that fits it; --gpu-mode cpu trains without a GPU"
PRECISION_FIX = "train with --precision fp32, and update torch and the driver"
FUSED_FIX = "install the torch build that fits the driver"
COMPILE_FIX = "install a C++ compiler (apt install g++; for a GPU also pip install triton), or train without --compile"

_RAY_CODE = "import ray; print(ray.__version__)"
# In a cache of its own: code that an earlier run left would hide a compiler that is missing now.
_COMPILE_CODE = """
import os, sys, tempfile
with tempfile.TemporaryDirectory() as folder:
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        import torch
        x = torch.linspace(-1, 1, 1000, device=sys.argv[1])
        f = lambda x: torch.nn.functional.gelu(x * 2) + x.sin()
        torch.testing.assert_close(torch.compile(f)(x), f(x))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
print("compiled and eager results agree")
"""


@dataclass(frozen=True)
class Check:
    """The verdict of one probe: what was found, what was needed, what to do."""

    name: str
    status: Literal["pass", "fail", "skip"]
    found: str
    needed: str = ""
    fix: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Probe:
    """A check still to be run. ``fix`` is for errors that the check itself does not foresee."""

    name: str
    run: Callable[[], Check]
    fix: str


def run_probes(inventory: Inventory, folder: Path) -> Iterator[Check]:
    """Every check of this machine, one after another; ``folder`` is where runs would be written."""
    yield from map(run_guarded, probes_for(inventory, folder))


def run_guarded(probe: Probe) -> Check:
    """The probe's verdict with its time; an error of any kind is a failed check, not the end of the others."""
    start = time.perf_counter()
    try:
        check = probe.run()
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        found = f"{type(error).__name__}: {textwrap.shorten(first, 200, placeholder=' …')}"
        check = Check(probe.name, "fail", found, "no error", probe.fix)
    return replace(check, seconds=time.perf_counter() - start)


def probes_for(inventory: Inventory, folder: Path) -> tuple[Probe, ...]:
    """The checks in their order, for callers that name each before it runs."""
    return (*_host_probes(inventory, folder), *_gpu_probes(inventory), *_compute_probes(inventory))


def _host_probes(inventory: Inventory, folder: Path) -> Iterator[Probe]:
    floors = (("python", MIN_PYTHON, "install Python 3.11 or newer"), ("torch", MIN_TORCH, 'pip install -U "torch>=2.11"'))
    for name, least, fix in (*floors, ("ray", MIN_RAY, RAY_FIX)):
        yield Probe(name, partial(version, name, inventory.versions.get(name), least, fix), fix)
    yield Probe("ray imports", ray_imports, RAY_FIX)
    yield Probe("ports", ports_free, "look at the network settings of this machine or container")
    yield Probe("RAM", partial(ram_free, inventory.ram_free), "look at the memory of this machine")
    yield Probe("shared memory", shared_memory, "mount a tmpfs at /dev/shm")
    yield Probe("open files", open_files, "raise the limit: ulimit -n 65536")
    yield Probe("disk", partial(disk_writable, folder), "give another folder by --run-dir")


def _gpu_probes(inventory: Inventory) -> Iterator[Probe]:
    def count() -> Check:
        nvml = nvml_view()
        return gpu_count(len(inventory.gpus), nvml.visible if nvml else None, inventory.gpu_error)

    yield Probe("GPU count", count, GPU_FIX)
    yield Probe("GPU models", partial(gpu_models, inventory.gpus), GPU_FIX)
    for gpu in inventory.gpus:
        yield Probe(f"cuda:{gpu.index} memory", partial(gpu_memory, gpu), GPU_FIX)


def _compute_probes(inventory: Inventory) -> Iterator[Probe]:
    for device in [f"cuda:{gpu.index}" for gpu in inventory.gpus] or ["cpu"]:
        yield Probe(f"{device} computes", partial(device_computes, device), _device_fix(device))
    # What the least capable GPU can do, all can.
    weakest = min(inventory.gpus, key=lambda gpu: gpu.capability, default=None)
    device = f"cuda:{weakest.index}" if weakest else "cpu"
    emulated = weakest.capability < BF16_CAPABILITY if weakest else not inventory.cpu_bf16
    yield Probe("bf16", partial(low_precision, "bf16", device, emulated=emulated), PRECISION_FIX)
    yield Probe("fp16", partial(low_precision, "fp16", device), PRECISION_FIX)
    yield Probe("tf32", partial(tf32, device, weakest.capability if weakest else None), "train with --tf32 off")
    yield Probe("fused AdamW", partial(fused_adamw, device), FUSED_FIX)
    yield Probe("torch.compile", partial(compiles, device), COMPILE_FIX)


def _verdict(name: str, passed: bool, found: str, needed: str, fix: str) -> Check:
    return Check(name, "pass", found, needed) if passed else Check(name, "fail", found, needed, fix)


# --- the host


def version(name: str, found: str | None, least: tuple[int, ...], fix: str) -> Check:
    numbers = tuple(int(number) for number in re.findall(r"\d+", (found or "").partition("+")[0]))
    return _verdict(name, numbers >= least, found or "not installed", f">= {'.'.join(map(str, least))}", fix)


def ray_imports(code: str = _RAY_CODE, timeout: float = SUBPROCESS_SECONDS) -> Check:
    """In a process of its own: Ray's import starts threads and signal handlers that we do not want here."""
    passed, line = _python(code, timeout=timeout)
    return _verdict("ray imports", passed, line, "import ray without an error", RAY_FIX)


def _python(code: str, *arguments: str, timeout: float) -> tuple[bool, str]:
    """Whether a fresh Python ran the code, and the last line it wrote. One that is late is killed with all it started."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as child:
        try:
            output, errors = child.communicate(timeout=timeout)
        except BaseException as error:  # Ctrl-C too: it reaches only us, the child has a session of its own
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return False, f"no answer after {timeout:g} s"
            raise
    lines = [line for line in (errors if child.returncode else output).splitlines() if line.strip()]
    return child.returncode == 0, lines[-1].strip() if lines else f"exit code {child.returncode}, no message"


def ports_free(ray: int = RAY_PORT, dashboard: int = DASHBOARD_PORT, spare: int = 0) -> Check:
    """Taken ports of Ray are no failure: somebody's cluster may be running. That no port at all is to be had is one."""
    taken = []
    if not _can_bind(ray):
        taken.append(f"{ray} in use: a Ray cluster may be running; we would join it")
    if not _can_bind(dashboard):
        taken.append(f"{dashboard} in use: Ray's dashboard would take the next free port")
    found = "; ".join(taken) or f"{ray} and {dashboard} free"
    if _can_bind(spare):
        return Check("ports", "pass", found)
    fix = "allow sockets in this container; close programs with many connections, or widen net.ipv4.ip_local_port_range"
    return Check("ports", "fail", f"{found}; no free port to be had", "a free port for the workers to meet at", fix)


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection closed a minute ago is not "in use"
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def ram_free(free: int, least: int = MIN_RAM) -> Check:
    fix = "close other programs, or raise the memory limit of the container"
    return _verdict("RAM", free >= least, f"{bytes_text(free)} free", f"{bytes_text(least)} free", fix)


def shared_memory(folder: Path = Path("/dev/shm"), least: int = MIN_SHARED_MEMORY) -> Check:
    """Ray's object store and the data loader's processes pass tensors through it."""
    if not folder.is_dir():
        return Check("shared memory", "skip", f"this system has no {folder}")
    size = shutil.disk_usage(folder)
    found = f"{bytes_text(size.free)} free of {bytes_text(size.total)} at {folder}"
    fix = f"start the container with --shm-size=8g (docker), or delete what fills {folder}"
    return _verdict("shared memory", size.free >= least, found, f"{bytes_text(least)} free", fix)


def open_files(limit: int | None = None, least: int = MIN_OPEN_FILES) -> Check:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    unlimited = limit == resource.RLIM_INFINITY
    found = "no limit" if unlimited else f"a limit of {limit}"
    return _verdict("open files", unlimited or limit >= least, found, f"at least {least}", "raise the limit: ulimit -n 65536")


def disk_writable(folder: Path, least: int = MIN_DISK) -> Check:
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
        return Check("disk", "fail", f"cannot write to {home}: {error.strerror}", needed, fix)
    free = shutil.disk_usage(home).free
    found = f"{bytes_text(free)} free at {home}" if same else f"what was written to {home} reads back otherwise"
    return _verdict("disk", same and free >= least, found, needed, "free some space, or choose a folder on another disk by --run-dir")


# --- GPUs


def gpu_count(torch_sees: int, nvml_sees: int | None, error: str | None = None) -> Check:
    name, needed = "GPU count", "torch and the driver see the same GPUs"
    if error:
        found, _, fix = error.partition("\n")
        return Check(name, "fail", found, needed, fix or GPU_FIX)
    if nvml_sees is None:
        found = f"torch sees {torch_sees}; NVML cannot tell, so GPU use is not monitored" if torch_sees else "no GPU"
        return Check(name, "skip", found)
    if torch_sees == nvml_sees == 0:
        return Check(name, "skip", "no GPU")
    fix = f"look at CUDA_VISIBLE_DEVICES and at nvidia-smi for GPUs that have failed; {GPU_FIX}"
    return _verdict(name, torch_sees == nvml_sees, f"torch sees {torch_sees}, NVML {nvml_sees}", needed, fix)


def gpu_models(gpus: Sequence[Gpu]) -> Check:
    if not gpus:
        return Check("GPU models", "skip", "no GPU")
    counts = Counter(gpu.name for gpu in gpus)
    listed = ", ".join(f"{count} × {name}" for name, count in counts.items())
    return Check("GPU models", "pass", listed if len(counts) == 1 else f"mixed: {listed}; the slowest sets the pace")


def gpu_memory(gpu: Gpu, holders: Sequence[str] | None = None) -> Check:
    found = f"{bytes_text(gpu.memory_free)} free of {bytes_text(gpu.memory_total)}"
    least = MIN_GPU_MEMORY_FREE * gpu.memory_total
    if gpu.memory_free >= least:
        return Check(f"cuda:{gpu.index} memory", "pass", found)
    others = ", ".join(gpu_processes(gpu.uuid) if holders is None else holders) or "a process the driver does not name"
    fix = "end that process, or choose another GPU by CUDA_VISIBLE_DEVICES"
    return Check(f"cuda:{gpu.index} memory", "fail", f"{found}; held by {others}", f"{bytes_text(least)} free", fix)


# --- arithmetic


def device_computes(device: str, tolerance: float = TOLERANCES["fp32"]) -> Check:
    a, b = _operands(COMPARED_SIZE, device)
    size = _timed_size(device)
    with _matmul_precision("highest"):
        error = _relative_error(a @ b, a.double().cpu() @ b.double().cpu())
        rate = 2 * size**3 / _best_seconds(*_operands(size, device)) / 1e9
    found = f"fp32 product at {rate:,.0f} GFLOP/s, relative error {error:.1e}"
    return _verdict(f"{device} computes", error <= tolerance, found, f"relative error below {tolerance:.0e}", _device_fix(device))


def _device_fix(device: str) -> str:
    return "install torch anew: pip install --force-reinstall torch" if device == "cpu" else GPU_FIX


def low_precision(name: str, device: str, *, emulated: bool = False, tolerance: float | None = None) -> Check:
    """A product in bf16 or fp16 against the one in fp32. Slow is no failure, only worth knowing."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    tolerance = TOLERANCES[name] if tolerance is None else tolerance
    a, b = _operands(_timed_size(device), device)
    low_a, low_b = a.to(dtype), b.to(dtype)
    with _matmul_precision("highest"):
        error = _relative_error(low_a @ low_b, a @ b)
        speed = _speed_text(_best_seconds(low_a, low_b) / _best_seconds(a, b), emulated)
    passed = error <= tolerance
    found = speed if passed else f"wrong products, relative error {error:.1e}"
    return _verdict(name, passed, found, f"relative error below {tolerance:.0e}", PRECISION_FIX)


def _speed_text(ratio: float, emulated: bool) -> str:
    if ratio < 1:
        return f"works, {1 / ratio:.1f} times as fast as fp32"
    times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
    return f"works, but {'emulated: ' if emulated else ''}about {times} times slower than fp32"


def tf32(device: str, capability: tuple[int, int] | None, tolerance: float = TOLERANCES["tf32"]) -> Check:
    """Products with and without tf32 must differ in their error; equal ones mean that something switches it off."""
    if capability is None or capability < TF32_CAPABILITY:
        found = "no GPU" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        return Check("tf32", "skip", found, f"compute capability {TF32_CAPABILITY[0]}.{TF32_CAPABILITY[1]}")
    exact, quick = _tf32_errors(device)
    found = f"relative error {quick:.1e} with tf32, {exact:.1e} without"
    needed = f"an error well above fp32's, below {tolerance:.0e}"
    return _verdict("tf32", 10 * exact < quick <= tolerance, found, needed, "unset NVIDIA_TF32_OVERRIDE, or train with --tf32 off")


def _tf32_errors(device: str) -> tuple[float, float]:
    a, b = _operands(COMPARED_SIZE, device)
    reference = a.double() @ b.double()
    with _matmul_precision("highest"):
        exact = _relative_error(a @ b, reference)
    with _matmul_precision("high"):
        return exact, _relative_error(a @ b, reference)


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """Not left to the default: NVIDIA's containers switch tf32 on by an environment variable."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def fused_adamw(device: str, tolerance: float = FUSED_TOLERANCE) -> Check:
    import torch

    def stepped(fused: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 1000, device=device))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, foreach=False, fused=fused)
        for _ in range(3):
            weight.grad = weight.detach().cos()
            optimizer.step()
        return weight.detach()

    error = _relative_error(stepped(True), stepped(False))
    found = f"relative difference {error:.1e} from plain AdamW after 3 steps"
    return _verdict("fused AdamW", error <= tolerance, found, f"below {tolerance:.0e}", FUSED_FIX)


def compiles(device: str, code: str = _COMPILE_CODE, timeout: float = SUBPROCESS_SECONDS) -> Check:
    """In a process of its own: a compiler that hangs must not hang the check."""
    passed, line = _python(code, device, timeout=timeout)
    return _verdict("torch.compile", passed, line, "a small function compiled, with the same results", COMPILE_FIX)


def _timed_size(device: str) -> int:
    return CPU_TIMED_SIZE if device == "cpu" else GPU_TIMED_SIZE


def _operands(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator(device).manual_seed(0)  # ours, so that the caller's random state stays as it is
    a, b = torch.randn(2, size, size, device=device, generator=generator)
    return a, b


def _relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.double()
    return float((result.double().to(reference.device) - reference).norm() / reference.norm())


def _best_seconds(a: torch.Tensor, b: torch.Tensor, repeats: int = 3) -> float:
    """Time of one product: the best of a few after one to warm up."""
    import torch

    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        torch.mm(a, b)
        if a.is_cuda:
            torch.cuda.synchronize(a.device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
