"""Each check of the host and its GPUs against a fault: the message says what was found, what was
needed, and what to do."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from harness.runs.probe_checks import assert_fails
from orchestrator.plan.checks import arithmetic, probes
from orchestrator.plan.checks.probe_types import GPU_FIX, CheckResult, MachineProbe
from orchestrator.plan.checks.probes import probes_for, run_guarded
from orchestrator.plan.inventory.gpus import Gpu
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.types import GIB, MIB

H200 = Gpu(0, "NVIDIA H200", 140 * GIB, 130 * GIB, (9, 0), 132, "GPU-1")
T4 = Gpu(1, "Tesla T4", 16 * GIB, GIB, (7, 5), 40, "GPU-2")
VERSIONS = {"python": "3.12.1", "torch": "2.13.0+cpu", "ray": "2.60.0"}


def machine(*gpus: Gpu, error: str | None = None) -> Inventory:
    return Inventory(gpus, 2, 8 * GIB, 4 * GIB, "a CPU", "aarch64", False, None, VERSIONS, error, 50 * GIB)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


# --- faults


FAULTS: dict[str, tuple[Callable[[], CheckResult], str, str, str]] = {
    "old python": (
        lambda: probes.check_version("python", "3.9.18", probes.MIN_PYTHON, "install Python"),
        "3.9.18",
        ">= 3.11",
        "install Python",
    ),
    "old torch": (
        lambda: probes.check_version("torch", "2.9.1+cu126", probes.MIN_TORCH, "pip install"),
        "2.9.1",
        ">= 2.11",
        "pip install",
    ),
    "no ray": (
        lambda: probes.check_version("ray", None, probes.MIN_RAY, probes.RAY_FIX),
        "not installed",
        ">= 2.56",
        "pip install",
    ),
    "ray does not import": (
        lambda: probes.check_ray_import("import no_such_ray"),
        "No module named 'no_such_ray'",
        "import ray",
        "pip install",
    ),
    "ray hangs": (
        lambda: probes.check_ray_import("import time; time.sleep(60)", 0.2),
        "no answer after 0.2 s",
        "import ray",
        "the machine is busy",
    ),
    "little RAM": (lambda: probes.check_ram(900 * MIB), "900.0 MiB free", "2.0 GiB", "memory limit"),
    "few open files": (lambda: probes.check_open_files(256), "256", "1024", "ulimit -n"),
    "GPU not seen": (
        lambda: probes.check_gpu_count(1, 2),
        "torch sees 1, NVML 2",
        "the same GPUs",
        "CUDA_VISIBLE_DEVICES",
    ),
    "torch without CUDA": (
        lambda: probes.check_gpu_count(0, 2, "no CUDA\nget a build"),
        "no CUDA",
        "the same GPUs",
        "get a build",
    ),
    "GPU in use": (
        lambda: probes.check_gpu_memory(T4, ["jupyter (pid 4711)"]),
        "used by jupyter (pid 4711)",
        "3.2 GiB free",
        "end that process",
    ),
    "GPU in use by an unnamed process": (
        lambda: probes.check_gpu_memory(T4, []),
        "1.0 GiB free of 16.0 GiB",
        "3.2 GiB free",
        "another GPU",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_with_what_was_found_and_needed_and_a_fix(fault: str):
    check, found, needed, fix = FAULTS[fault]
    assert_fails(check(), found, needed, fix)


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path):
    (tmp_path / "file").write_text("a file, not a folder")
    assert_fails(
        probes.check_disk(tmp_path / "file" / "run"),
        "cannot write to",
        "a folder to write to",
        "--run-dir",
    )


def test_a_full_disk_fails(tmp_path: Path):
    assert_fails(
        probes.check_disk(tmp_path, least=2**60),
        f"free at {tmp_path}",
        "1073741824.0 GiB free",
        "free some space",
    )
    assert list(tmp_path.iterdir()) == []


def test_small_shared_memory_fails(tmp_path: Path):
    assert_fails(
        probes.check_shared_memory(tmp_path, least=2**60), f"at {tmp_path}", "GiB free", "--shm-size"
    )


def test_a_machine_without_a_free_port_fails(taken_port: int):
    assert_fails(
        probes.check_ports(free_port(), free_port(), any_port=taken_port),
        "no free port",
        "a free port",
        "ip_local_port_range",
    )


def test_a_device_that_raises_fails_with_the_first_line():
    check = run_guarded(MachineProbe("cuda:9 computes", lambda: arithmetic.check_device("cuda:9"), GPU_FIX))
    assert_fails(check, "Error", "no error", "nvidia-smi")
    assert "\n" not in check.found
    assert len(check.found) < 260


def test_an_error_without_a_message_is_reported_by_its_class():
    def broken() -> CheckResult:
        raise MemoryError

    assert_fails(
        run_guarded(MachineProbe("it", broken, "do that")), "MemoryError: no message", "no error", "do that"
    )


# --- no faults


def test_taken_ports_of_ray_are_no_fault(taken_port: int):
    check = probes.check_ports(ray_port=taken_port, dashboard_port=free_port())
    assert check.status == "pass"
    assert f"{taken_port} in use: a Ray cluster may be running; a run would join it" in check.found
    assert "next free port" in probes.check_ports(ray_port=free_port(), dashboard_port=taken_port).found


def test_mixed_models_are_reported_and_pass():
    check = probes.check_gpu_models([H200, T4])
    assert (check.status, check.found) == (
        "pass",
        "mixed: 1 × NVIDIA H200, 1 × Tesla T4; the slowest sets the pace",
    )
    assert probes.check_gpu_models([H200, H200]).found == "2 × NVIDIA H200"


def test_checks_that_do_not_apply_are_skipped(tmp_path: Path):
    assert probes.check_gpu_count(0, None).status == "skip"
    assert probes.check_gpu_count(0, 0).status == "skip"
    assert "not monitored" in probes.check_gpu_count(2, None).found
    assert probes.check_gpu_models([]).status == "skip"
    assert probes.check_shared_memory(tmp_path / "none").status == "skip"


def test_no_limit_on_open_files_passes():
    import resource

    assert probes.check_open_files(resource.RLIM_INFINITY).found == "no limit"


def test_a_disk_check_leaves_no_files(tmp_path: Path):
    assert probes.check_disk(tmp_path / "results" / "run", least=1).status == "pass"
    assert list(tmp_path.iterdir()) == []


def test_prereleases_and_local_versions_pass():
    assert probes.check_version("torch", "2.11.0a0+git123", (2, 11), "").status == "pass"
    assert probes.check_version("torch", "10.0", (2, 11), "").status == "pass"


# --- Ray jobs


@pytest.mark.parametrize(
    ("script", "status", "found"),
    [
        ("exit 0", "pass", "has the package"),
        (
            "echo \"ModuleNotFoundError: No module named 'orchestrator'\" >&2; exit 1",
            "warn",
            "No module named",
        ),
        (None, "warn", "there is no 'python' on the PATH"),
    ],
)
def test_the_python_of_jobs_needs_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, status: str, found: str
):
    if script is not None:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = probes.check_job_python()
    assert check.status == status
    assert found in check.found
    if status == "warn":
        assert f"ray job submit … -- {sys.executable} -m orchestrator train" in check.fix


class _Dashboard(BaseHTTPRequestHandler):
    """Answers as the dashboard of Ray does to a request without a token."""

    status = 401

    def do_GET(self) -> None:
        assert "authorization" not in self.headers
        self.send_response(self.status if self.path == "/api/version" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("answer", "mode", "status", "found"),
    [
        (401, "", "warn", "'ray job submit' would send none: HTTP 401"),
        (401, "disabled", "warn", "'ray job submit' would send none: HTTP 401"),
        (401, "token", "pass", "RAY_AUTH_MODE=token sends it"),
        (200, "", "pass", "requires no token"),
    ],
)
def test_a_token_that_jobs_would_not_send_is_found(
    monkeypatch: pytest.MonkeyPatch, answer: int, mode: str, status: str, found: str
):
    monkeypatch.setattr(_Dashboard, "status", answer)
    with HTTPServer(("127.0.0.1", 0), _Dashboard) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        check = probes.check_job_token(mode, server.server_port)
        thread.join()
    assert check.status == status
    assert found in check.found
    if status == "warn":
        assert check.fix.startswith("export RAY_AUTH_MODE=token")


def test_without_a_dashboard_no_token_is_checked():
    assert probes.check_job_token("", free_port()).status == "skip"


# --- all probes


def test_every_gpu_is_checked_and_features_on_the_weakest(tmp_path: Path):
    by_name = {probe.name: probe for probe in probes_for(machine(H200, T4), tmp_path)}
    assert {"cuda:0 computes", "cuda:1 computes", "cuda:0 memory", "cuda:1 memory"} <= by_name.keys()
    assert by_name["tf32"].run().found == "compute capability 7.5"
    assert all(probe.fix for probe in by_name.values())


@pytest.mark.slow
def test_all_probes_of_a_cpu_machine_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The one real compilation of these tests."""
    monkeypatch.setattr(probes, "nvml_view", lambda: None)
    checks = [run_guarded(probe) for probe in probes_for(machine(), tmp_path)]
    assert [check.name for check in checks] == [probe.name for probe in probes_for(machine(), tmp_path)]
    assert {check.name: check.found for check in checks if check.status == "fail"} == {}
    assert {check.name for check in checks if check.status == "skip"} <= {
        "GPU count", "GPU models", "tf32", "token of Ray jobs",
    }  # fmt: skip
    assert "GFLOP/s" in next(check.found for check in checks if check.name == "cpu computes")
    assert all(check.seconds > 0 for check in checks)
