"""Tests of prestarted processes: their imports, that the next group takes them, and that none is left."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from orchestrator.record.events import of_kind, read_events
from orchestrator.runtime.cluster.prestart import make_importer
from tests.support.cli_runs import finish_run, kill_worker, start_run, wait_for_steps
from tests.support.cluster import RayCluster

PACKAGE = str(Path(__file__).parents[3] / "orchestrator" / "__init__.py")


def test_a_module_that_cannot_be_imported_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("raise OSError('a library is missing')")
    (tmp_path / "sound_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    make_importer(("no.such.module", "broken_module", "sound_module"), PACKAGE)()
    assert "sound_module" in sys.modules
    del sys.modules["sound_module"]


@pytest.mark.parametrize(
    ("package", "is_ours"), [(PACKAGE, True), ("/elsewhere/orchestrator/__init__.py", False)]
)
def test_another_package_of_our_name_is_not_imported(
    package: str, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(importlib, "import_module", imported.append)
    make_importer(("torch", "orchestrator.train.worker.run"), package)()
    assert imported == ["torch", *["orchestrator.train.worker.run"] * is_ours]


def test_the_number_of_threads_is_set_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, as Ray gives to an actor of one CPU; a value that the node's owner has set stays."""
    seen: list[str | None] = []
    monkeypatch.setattr(importlib, "import_module", lambda _: seen.append(os.environ.get("OMP_NUM_THREADS")))
    for set_before, expected in ((None, "1"), ("5", "5")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if set_before:
            monkeypatch.setenv("OMP_NUM_THREADS", set_before)
        make_importer(("torch",), PACKAGE)()
        assert seen.pop() == expected


def test_a_process_without_our_code_can_run_the_hook(tmp_path: Path) -> None:
    """The hook is pickled by value, and its bytes are the same every time."""
    from ray import cloudpickle

    hooks = [make_importer(("colorsys", "orchestrator.errors"), "/elsewhere/__init__.py") for _ in range(2)]
    pickles = [cloudpickle.dumps(hook) for hook in hooks]  # pyright: ignore[reportPrivateImportUsage]
    assert pickles[0] == pickles[1]
    (tmp_path / "hook").write_bytes(pickles[0])
    code = (
        "import sys; sys.modules['orchestrator'] = None; from ray import cloudpickle;"
        "cloudpickle.loads(open('hook', 'rb').read())(); print('colorsys' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "True", result.stderr


def idle_processes(cluster: RayCluster) -> set[int]:
    """Return the ids of Ray's idle processes on the head."""
    pids: set[int] = set()
    for process in psutil.Process(cluster.nodes[0].pid).children(recursive=True):
        with suppress(psutil.Error):
            if process.name() == "ray::IDLE":
                pids.add(process.pid)
    return pids


def with_library(library: str, pids: set[int]) -> set[int]:
    """Return the processes that have loaded a library.

    A worker's successor has torch, a controller's has pandas, a process of Ray's for any job has
    neither.
    """
    loaded: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            if library in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"):
                loaded.add(pid)
    return loaded


def wait_until(ready: Callable[[], object], message: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, message
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_next_group_takes_the_successors_and_none_is_left(
    shared_cluster: RayCluster, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    before = idle_processes(shared_cluster)

    def new_processes() -> set[int]:
        return idle_processes(shared_cluster) - before

    settings = ("--epochs", "100000", "--checkpoint-every", "10", "--workers", "2")
    process = start_run(shared_cluster, run_dir, *settings)
    wait_for_steps(process, run_dir, 20)
    wait_until(
        lambda: len(with_library("libtorch", new_processes())) >= 2, "no successors of the two workers"
    )
    successors = new_processes()
    wait_until(
        lambda: with_library("pandas", successors) > with_library("libtorch", successors),
        "no successor of the controller",
    )
    kill_worker(run_dir, 1)
    wait_until(lambda: of_kind(read_events(run_dir / "events.jsonl"), "recovery"), "not recovered")
    workers = {int((run_dir / "logs" / f"worker_{rank}.pid").read_text()) for rank in (0, 1)}
    assert workers <= successors
    process.send_signal(signal.SIGINT)
    finish_run(process, code=130, timeout=60)
    wait_until(
        lambda: not with_library("pandas", idle_processes(shared_cluster)),
        "a finished job left processes behind",
        seconds=30,
    )
