"""Processes that are ready before they are needed: what they import, that the next group takes them, and that none is left."""

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
from orchestrator.runtime.cluster.prestart import importing
from tests.support.cli_runs import finish, kill_worker, start, wait_for_steps
from tests.support.cluster import Cluster

PACKAGE = str(Path(__file__).parents[3] / "orchestrator" / "__init__.py")


def test_what_cannot_be_imported_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("raise OSError('a library is missing')")
    (tmp_path / "sound_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    importing(("no.such.module", "broken_module", "sound_module"), PACKAGE)()
    assert "sound_module" in sys.modules
    del sys.modules["sound_module"]


@pytest.mark.parametrize(
    ("package", "ours"), [(PACKAGE, True), ("/elsewhere/orchestrator/__init__.py", False)]
)
def test_another_package_of_our_name_is_left_alone(
    package: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(importlib, "import_module", asked.append)
    importing(("torch", "orchestrator.train.worker.run"), package)()
    assert asked == ["torch", *["orchestrator.train.worker.run"] * ours]


def test_threads_are_counted_before_torch_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One each, as Ray gives to an actor of one CPU; what the node's owner has set, stays."""
    seen: list[str | None] = []
    monkeypatch.setattr(importlib, "import_module", lambda _: seen.append(os.environ.get("OMP_NUM_THREADS")))
    for set_before, expected in ((None, "1"), ("5", "5")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if set_before:
            monkeypatch.setenv("OMP_NUM_THREADS", set_before)
        importing(("torch",), PACKAGE)()
        assert seen.pop() == expected


def test_a_process_without_our_code_can_prepare_itself(tmp_path: Path) -> None:
    """The hook is sent by value, and is the same to the letter every time."""
    from ray import cloudpickle

    hooks = [importing(("colorsys", "orchestrator.errors"), "/elsewhere/__init__.py") for _ in range(2)]
    sent = [cloudpickle.dumps(hook) for hook in hooks]  # pyright: ignore[reportPrivateImportUsage]
    assert sent[0] == sent[1]
    (tmp_path / "hook").write_bytes(sent[0])
    code = (
        "import sys; sys.modules['orchestrator'] = None; from ray import cloudpickle;"
        "cloudpickle.loads(open('hook', 'rb').read())(); print('colorsys' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "True", done.stderr


def idle(here: Cluster) -> set[int]:
    """Ray's idle processes on the head."""
    found = set()
    for process in psutil.Process(here.nodes[0].pid).children(recursive=True):
        with suppress(psutil.Error):
            found |= {process.pid} if process.name() == "ray::IDLE" else set()
    return found


def holding(library: str, pids: set[int]) -> set[int]:
    """Those that have loaded a library: a worker's has torch, a controller's pandas, one that waits for any job neither."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            found |= {pid} if library in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8") else set()
    return found


def wait_until(ready: Callable[[], object], otherwise: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_next_group_takes_them_and_none_is_left(shared_cluster: Cluster, tmp_path: Path) -> None:
    run_dir, before = tmp_path / "run", idle(shared_cluster)
    process = start(
        shared_cluster, run_dir, "--epochs", "100000", "--checkpoint-every", "10", "--workers", "2"
    )
    wait_for_steps(process, run_dir, 20)
    wait_until(
        lambda: len(holding("libtorch", idle(shared_cluster) - before)) >= 2,
        "no successors of the two workers",
    )
    successors = idle(shared_cluster) - before
    wait_until(
        lambda: holding("pandas", successors) > holding("libtorch", successors),
        "no successor of the controller",
    )
    kill_worker(run_dir, 1)
    wait_until(lambda: of_kind(read_events(run_dir / "events.jsonl"), "recovery"), "not recovered")
    taken = {int((run_dir / "logs" / f"worker_{rank}.pid").read_text()) for rank in (0, 1)}
    assert taken <= successors
    process.send_signal(signal.SIGINT)
    finish(process, code=130, timeout=60)
    wait_until(
        lambda: not holding("pandas", idle(shared_cluster)),
        "a finished job left processes behind",
        seconds=30,
    )
