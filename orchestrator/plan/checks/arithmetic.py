"""Checks of the devices' arithmetic: products in each precision, the fused optimizer, the
compiler."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from orchestrator.plan.checks.probe_types import (
    GPU_FIX,
    SUBPROCESS_TIMEOUT_S,
    CheckResult,
    MachineProbe,
    run_python,
    verdict,
)
from orchestrator.plan.inventory.hardware import Inventory

if TYPE_CHECKING:
    import torch

BF16_CAPABILITY = (8, 0)
TF32_CAPABILITY = (8, 0)
# Largest relative error (Frobenius norm) of a product of normal numbers: some four times that of
# correct units.
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3, "tf32": 2e-3}
FUSED_TOLERANCE = 1e-5
COMPARED_SIZE = 512  # small, because the reference is a float64 product on the CPU
CPU_TIMED_SIZE = 256  # an emulated product of this size takes 0.2 s
GPU_TIMED_SIZE = 4096  # fills a GPU

PRECISION_FIX = "train with --precision fp32, and update torch and the driver"
FUSED_FIX = "install the torch build that fits the driver"
COMPILE_FIX = "train without --compile"
_COMPILERS = ("g++", "clang++", "c++")

# The code has a cache folder of its own: cached code of an earlier run would hide a missing
# compiler.
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


def arithmetic_probes(inventory: Inventory) -> Iterator[MachineProbe]:
    """Yield a probe for each device, and one for each feature on the least capable GPU: the others
    have it too."""
    for device in [f"cuda:{gpu.index}" for gpu in inventory.gpus] or ["cpu"]:
        yield MachineProbe(f"{device} computes", partial(check_device, device), _device_fix(device))
    weakest = min(inventory.gpus, key=lambda gpu: gpu.capability, default=None)
    device = f"cuda:{weakest.index}" if weakest else "cpu"
    capability = weakest.capability if weakest else None
    emulated = capability < BF16_CAPABILITY if capability else not inventory.cpu_bf16
    yield MachineProbe("bf16", partial(check_low_precision, "bf16", device, emulated=emulated), PRECISION_FIX)
    yield MachineProbe("fp16", partial(check_low_precision, "fp16", device), PRECISION_FIX)
    yield MachineProbe("tf32", partial(check_tf32, device, capability), "train with --tf32 off")
    yield MachineProbe("fused AdamW", partial(check_fused_adamw, device), FUSED_FIX)
    yield MachineProbe("torch.compile", partial(check_compile, device), COMPILE_FIX)


def check_device(device: str, tolerance: float = TOLERANCES["fp32"]) -> CheckResult:
    """Compare an fp32 product of the device with a float64 product of the CPU, and time a larger
    one."""
    a, b = _operands(COMPARED_SIZE, device)
    size = _timed_size(device)
    with _matmul_precision("highest"):
        error = _relative_error(a @ b, a.double().cpu() @ b.double().cpu())
        gflops_per_s = 2 * size**3 / _best_seconds(*_operands(size, device)) / 1e9
    found = f"fp32 product at {gflops_per_s:,.0f} GFLOP/s, relative error {error:.1e}"
    needed = f"relative error below {tolerance:.0e}"
    return verdict(f"{device} computes", error <= tolerance, found, needed, _device_fix(device))


def _device_fix(device: str) -> str:
    return "reinstall torch: pip install --force-reinstall torch" if device == "cpu" else GPU_FIX


def check_low_precision(
    name: str, device: str, *, emulated: bool = False, tolerance: float | None = None
) -> CheckResult:
    """Compare a product in bf16 or fp16 with one in fp32. A slow product is reported, and
    passes."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    tolerance = TOLERANCES[name] if tolerance is None else tolerance
    a, b = _operands(_timed_size(device), device)
    low_a = a.to(dtype)
    low_b = b.to(dtype)
    with _matmul_precision("highest"):
        error = _relative_error(low_a @ low_b, a @ b)
        slowdown = _best_seconds(low_a, low_b) / _best_seconds(a, b)
    passed = error <= tolerance
    found = f"wrong products, relative error {error:.1e}"
    if passed:
        found = _slowdown_text(slowdown, emulated)
    return verdict(name, passed, found, f"relative error below {tolerance:.0e}", PRECISION_FIX)


def _slowdown_text(slowdown: float, emulated: bool) -> str:
    """Return how fast a precision is, from its time as a multiple of the time in fp32."""
    if slowdown < 1:
        return f"works, {1 / slowdown:.1f} times as fast as fp32"
    times = f"{slowdown:.0f}" if slowdown >= 10 else f"{slowdown:.1f}"
    return f"works, but {'emulated: ' if emulated else ''}about {times} times slower than fp32"


def check_tf32(
    device: str, capability: tuple[int, int] | None, tolerance: float = TOLERANCES["tf32"]
) -> CheckResult:
    """Compare the errors of products with and without tf32. Equal errors mean that something
    switches it off."""
    least = f"compute capability {TF32_CAPABILITY[0]}.{TF32_CAPABILITY[1]}"
    if capability is None:
        return CheckResult("tf32", "skip", "no GPU", least)
    if capability < TF32_CAPABILITY:
        return CheckResult("tf32", "skip", f"compute capability {capability[0]}.{capability[1]}", least)
    fp32_error, tf32_error = _tf32_errors(device)
    passed = 10 * fp32_error < tf32_error <= tolerance
    found = f"relative error {tf32_error:.1e} with tf32, {fp32_error:.1e} without"
    needed = f"an error well above fp32's, below {tolerance:.0e}"
    return verdict("tf32", passed, found, needed, "unset NVIDIA_TF32_OVERRIDE, or train with --tf32 off")


def _tf32_errors(device: str) -> tuple[float, float]:
    """Return the relative errors of a product without and with tf32."""
    a, b = _operands(COMPARED_SIZE, device)
    reference = a.double() @ b.double()
    with _matmul_precision("highest"):
        fp32_error = _relative_error(a @ b, reference)
    with _matmul_precision("high"):
        return fp32_error, _relative_error(a @ b, reference)


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision explicitly: NVIDIA's containers switch tf32 on with an environment
    variable."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_fused_adamw(device: str, tolerance: float = FUSED_TOLERANCE) -> CheckResult:
    """Compare three steps of fused AdamW with three of plain AdamW."""
    import torch

    def train(fused: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 1000, device=device))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, foreach=False, fused=fused)
        for _ in range(3):
            weight.grad = weight.detach().cos()
            optimizer.step()
        return weight.detach()

    error = _relative_error(train(True), train(False))
    found = f"relative difference {error:.1e} from plain AdamW after 3 steps"
    return verdict("fused AdamW", error <= tolerance, found, f"below {tolerance:.0e}", FUSED_FIX)


def check_compile(
    device: str, code: str = _COMPILE_CODE, timeout_s: float = SUBPROCESS_TIMEOUT_S
) -> CheckResult:
    """Compile a function in a process of its own, so that a compiler that hangs does not hang the
    check."""
    answer = run_python(code, device, timeout_s=timeout_s)
    needed = "a small function compiled, with the same results"
    fix = f"{answer.fix(_compiler_advice(device))}, or {COMPILE_FIX}"
    return verdict("torch.compile", answer.passed, answer.line, needed, fix)


def _compiler_advice(device: str) -> str:
    """Return what to do about a compilation that failed: install what is missing, if something is."""
    if not any(map(shutil.which, _COMPILERS)):
        return "install a C++ compiler (apt install g++)"
    if device != "cpu" and find_spec("triton") is None:
        return "pip install triton"
    return "a C++ compiler is installed: read the error, look for an update of torch"


def _timed_size(device: str) -> int:
    return CPU_TIMED_SIZE if device == "cpu" else GPU_TIMED_SIZE


def _operands(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    # A generator of its own leaves the caller's random state unchanged.
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, size, size, device=device, generator=generator)
    return a, b


def _relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    reference = reference.double()
    return float((result.double().to(reference.device) - reference).norm() / reference.norm())


def _best_seconds(a: torch.Tensor, b: torch.Tensor, repeats: int = 3) -> float:
    """Return the shortest time of a product, after one to warm up."""
    import torch

    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        torch.mm(a, b)
        if a.is_cuda:
            torch.cuda.synchronize(a.device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
