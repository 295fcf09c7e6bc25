"""Probes of what the devices compute: products in each precision, the fused optimizer, the
compiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.plan.checks.probe_types import (
    GPU_FIX,
    SUBPROCESS_SECONDS,
    CheckResult,
    MachineProbe,
    run_python,
    verdict,
)
from orchestrator.plan.inventory.hardware import Inventory

if TYPE_CHECKING:
    import torch

BF16_CAPABILITY = TF32_CAPABILITY = (8, 0)
# Largest relative error (Frobenius norm) of a product of normal numbers: some four times that of
# correct units.
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3, "tf32": 2e-3}
FUSED_TOLERANCE = 1e-5
COMPARED_SIZE = 512  # the reference is a float64 product on the CPU, so kept small
CPU_TIMED_SIZE, GPU_TIMED_SIZE = 256, 4096  # an emulated product of 256 takes 0.2 s; 4096 fills a GPU

PRECISION_FIX = "train with --precision fp32, and update torch and the driver"
FUSED_FIX = "install the torch build that fits the driver"
COMPILE_FIX = (
    "install a C++ compiler (apt install g++; for a GPU also pip install triton), or train without --compile"
)

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


def arithmetic_probes(inventory: Inventory) -> Iterator[MachineProbe]:
    for device in [f"cuda:{gpu.index}" for gpu in inventory.gpus] or ["cpu"]:
        yield MachineProbe(f"{device} computes", partial(device_computes, device), _device_fix(device))
    # What the least capable GPU can do, all can.
    weakest = min(inventory.gpus, key=lambda gpu: gpu.capability, default=None)
    device = f"cuda:{weakest.index}" if weakest else "cpu"
    emulated = weakest.capability < BF16_CAPABILITY if weakest else not inventory.cpu_bf16
    yield MachineProbe("bf16", partial(low_precision, "bf16", device, emulated=emulated), PRECISION_FIX)
    yield MachineProbe("fp16", partial(low_precision, "fp16", device), PRECISION_FIX)
    yield MachineProbe(
        "tf32", partial(tf32, device, weakest.capability if weakest else None), "train with --tf32 off"
    )
    yield MachineProbe("fused AdamW", partial(fused_adamw, device), FUSED_FIX)
    yield MachineProbe("torch.compile", partial(compiles, device), COMPILE_FIX)


def device_computes(device: str, tolerance: float = TOLERANCES["fp32"]) -> CheckResult:
    a, b = _operands(COMPARED_SIZE, device)
    size = _timed_size(device)
    with _matmul_precision("highest"):
        error = _relative_error(a @ b, a.double().cpu() @ b.double().cpu())
        rate = 2 * size**3 / _best_seconds(*_operands(size, device)) / 1e9
    found = f"fp32 product at {rate:,.0f} GFLOP/s, relative error {error:.1e}"
    return verdict(
        f"{device} computes",
        error <= tolerance,
        found,
        f"relative error below {tolerance:.0e}",
        _device_fix(device),
    )


def _device_fix(device: str) -> str:
    return "install torch anew: pip install --force-reinstall torch" if device == "cpu" else GPU_FIX


def low_precision(
    name: str, device: str, *, emulated: bool = False, tolerance: float | None = None
) -> CheckResult:
    """A product in bf16 or fp16 against the one in fp32. Slow is no failure, only worth
    knowing."""
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
    return verdict(name, passed, found, f"relative error below {tolerance:.0e}", PRECISION_FIX)


def _speed_text(ratio: float, emulated: bool) -> str:
    if ratio < 1:
        return f"works, {1 / ratio:.1f} times as fast as fp32"
    times = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"
    return f"works, but {'emulated: ' if emulated else ''}about {times} times slower than fp32"


def tf32(
    device: str, capability: tuple[int, int] | None, tolerance: float = TOLERANCES["tf32"]
) -> CheckResult:
    """Products with and without tf32 must differ in their error; equal ones mean that something
    switches it off."""
    if capability is None or capability < TF32_CAPABILITY:
        found = "no GPU" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        return CheckResult(
            "tf32", "skip", found, f"compute capability {TF32_CAPABILITY[0]}.{TF32_CAPABILITY[1]}"
        )
    exact, quick = _tf32_errors(device)
    found = f"relative error {quick:.1e} with tf32, {exact:.1e} without"
    needed = f"an error well above fp32's, below {tolerance:.0e}"
    return verdict(
        "tf32",
        10 * exact < quick <= tolerance,
        found,
        needed,
        "unset NVIDIA_TF32_OVERRIDE, or train with --tf32 off",
    )


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


def fused_adamw(device: str, tolerance: float = FUSED_TOLERANCE) -> CheckResult:
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
    return verdict("fused AdamW", error <= tolerance, found, f"below {tolerance:.0e}", FUSED_FIX)


def compiles(device: str, code: str = _COMPILE_CODE, timeout: float = SUBPROCESS_SECONDS) -> CheckResult:
    """In a process of its own: a compiler that hangs must not hang the check."""
    passed, line = run_python(code, device, timeout=timeout)
    return verdict(
        "torch.compile", passed, line, "a small function compiled, with the same results", COMPILE_FIX
    )


def _timed_size(device: str) -> int:
    return CPU_TIMED_SIZE if device == "cpu" else GPU_TIMED_SIZE


def _operands(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator(device).manual_seed(
        0
    )  # ours, so that the caller's random state stays as it is
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
