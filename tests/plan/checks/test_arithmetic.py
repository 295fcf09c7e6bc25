"""Each check of the arithmetic, with and without a fault."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.runs.probe_checks import assert_fails
from orchestrator.plan.checks import arithmetic
from orchestrator.plan.checks.probe_types import CheckResult

FAULTS: dict[str, tuple[Callable[[], CheckResult], str, str, str]] = {
    "wrong products": (
        lambda: arithmetic.check_device("cpu", 0.0),
        "relative error",
        "below 0e+00",
        "reinstall torch",
    ),
    "wrong bf16": (
        lambda: arithmetic.check_low_precision("bf16", "cpu", tolerance=0.0),
        "wrong products",
        "relative error below",
        "--precision fp32",
    ),
    "wrong fp16": (
        lambda: arithmetic.check_low_precision("fp16", "cpu", tolerance=0.0),
        "wrong products",
        "relative error below",
        "--precision fp32",
    ),
    "fused AdamW differs": (
        lambda: arithmetic.check_fused_adamw("cpu", -1.0),
        "relative difference",
        "below",
        "torch build",
    ),
    "no compiler": (
        lambda: arithmetic.check_compile("cpu", "raise SystemExit('no g++')"),
        "no g++",
        "compiled",
        "without --compile",
    ),
    "compiler crashes": (
        lambda: arithmetic.check_compile("cpu", "import os; os.abort()"),
        "exit code -6",
        "compiled",
        "C++ compiler",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_with_what_was_found_and_needed_and_a_fix(fault: str):
    check, found, needed, fix = FAULTS[fault]
    assert_fails(check(), found, needed, fix)


@pytest.mark.parametrize(
    ("errors", "why"),
    [((3e-7, 3e-7), "switched off"), ((3e-7, 0.5), "wrong"), ((3e-7, float("nan")), "not a number")],
)
def test_tf32_that_is_switched_off_or_wrong_fails(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[float, float], why: str
):
    monkeypatch.setattr(arithmetic, "_tf32_errors", lambda _: errors)
    assert_fails(
        arithmetic.check_tf32("cuda:0", (8, 0)),
        f"{errors[1]:.1e} with tf32",
        "an error",
        "NVIDIA_TF32_OVERRIDE",
    )


@pytest.mark.extended
def test_a_compiler_that_hangs_is_killed_with_its_children(tmp_path: Path):
    pid_file = tmp_path / "pid"
    code = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))
time.sleep(120)"""
    assert_fails(
        arithmetic.check_compile("cpu", code, timeout_s=5),
        "no answer after 5 s",
        "compiled",
        "the machine is busy, or its disk is slow: check again when it is idle, or train without --compile",
    )
    assert has_ended(int(pid_file.read_text()))


@pytest.mark.parametrize(
    ("compilers", "advice"),
    [(("clang++",), "a C++ compiler is installed"), ((), "install a C++ compiler (apt install g++)")],
)
def test_a_compiler_is_advised_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, compilers: tuple[str, ...], advice: str
):
    monkeypatch.setattr(arithmetic.shutil, "which", lambda name: name if name in compilers else None)
    check = arithmetic.check_compile("cpu", "raise SystemExit('CppCompileError')")
    assert check.fix.startswith(advice)
    assert check.fix.endswith(", or train without --compile")


def has_ended(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_emulated_bf16_passes_and_reports_its_slowdown():
    check = arithmetic.check_low_precision("bf16", "cpu", emulated=True)
    assert check.status == "pass"
    assert re.match(
        r"works, (but emulated: about [\d.]+ times slower than|[\d.]+ times as fast as) fp32", check.found
    )


@pytest.mark.parametrize(
    ("slowdown", "emulated", "text"),
    [
        (104.4, True, "works, but emulated: about 104 times slower than fp32"),
        (1.26, False, "works, but about 1.3 times slower than fp32"),
        (0.0625, False, "works, 16.0 times as fast as fp32"),
    ],
)
def test_the_slowdown_is_reported_in_words(slowdown: float, emulated: bool, text: str):
    assert arithmetic._slowdown_text(slowdown, emulated) == text


def test_tf32_is_skipped_without_its_units():
    assert arithmetic.check_tf32("cpu", None).status == "skip"
    assert arithmetic.check_tf32("cuda:0", (7, 5)).found == "compute capability 7.5"


def test_random_state_and_precision_stay_unchanged():
    import torch

    torch.manual_seed(3)
    before = torch.get_rng_state()
    precision = torch.get_float32_matmul_precision()
    arithmetic.check_device("cpu")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_float32_matmul_precision() == precision
