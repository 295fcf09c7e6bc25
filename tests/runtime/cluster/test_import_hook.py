"""The imports of new processes: what is imported, with how many threads, and at which priority."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.runtime.cluster import import_hook
from orchestrator.runtime.cluster.import_hook import make_importer, marked_as_working

PACKAGE = str(Path(__file__).parents[3] / "orchestrator" / "__init__.py")
MARKER = f"expert-orchestrator/test-{os.getpid()}"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_module_that_cannot_be_imported_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module.py").write_text("raise OSError('a library is missing')")
    (tmp_path / "sound_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    make_importer(("no.such.module", "broken_module", "sound_module"), PACKAGE, MARKER)()
    assert "sound_module" in sys.modules
    del sys.modules["sound_module"]


@pytest.mark.parametrize(
    ("package", "is_ours"), [(PACKAGE, True), ("/elsewhere/orchestrator/__init__.py", False)]
)
def test_another_package_of_our_name_is_not_imported(
    package: str, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    make_importer(("torch", "orchestrator.train.worker.run"), package, MARKER)()
    assert imported == ["torch", *["orchestrator.train.worker.run"] * is_ours]


def test_the_number_of_threads_is_set_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, as Ray gives to an actor of one CPU; a value that the node's owner has set stays."""
    seen: list[str | None] = []
    monkeypatch.setattr(importlib, "import_module", lambda _: seen.append(os.environ.get("OMP_NUM_THREADS")))
    for set_before, expected in ((None, "1"), ("5", "5")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if set_before:
            monkeypatch.setenv("OMP_NUM_THREADS", set_before)
        make_importer(("torch",), PACKAGE, MARKER)()
        assert seen.pop() == expected


def test_a_process_without_our_code_can_run_the_hook(tmp_path: Path) -> None:
    """The hook is pickled by value, and its bytes are the same every time."""
    from ray import cloudpickle

    modules = ("colorsys", "orchestrator.errors")
    hooks = [make_importer(modules, "/elsewhere/__init__.py", MARKER) for _ in range(2)]
    pickles = [cloudpickle.dumps(hook) for hook in hooks]
    assert pickles[0] == pickles[1]
    (tmp_path / "hook").write_bytes(pickles[0])
    code = (
        "import sys; sys.modules['orchestrator'] = None; from ray import cloudpickle;"
        "cloudpickle.loads(open('hook', 'rb').read())(); print('colorsys' in sys.modules)"
    )
    with marked_as_working(MARKER):  # also where the run is at work
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
    assert result.stdout.strip() == "True", result.stderr


# Priorities. A process without privileges cannot raise its priority again.

PROBE = """
import importlib.util, os, socket, sys, threading, time
from orchestrator.runtime.cluster.import_hook import make_importer
seen = []
def priority():
    thread = threading.get_native_id()
    return os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)
usual = priority()
lowest = (os.SCHED_OTHER, 19)
importlib.import_module = lambda name: seen.append(priority())
if os.geteuid() == 0:  # after the imports: another user may not read the files
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
make_importer(("torch",), "", sys.argv[1])()
print(seen == [lowest], seen == [usual], priority() == usual, flush=True)
os._exit(0)  # Ray imports more at the end, which the other user may not read
"""


def priorities(threads: str = "1") -> list[bool]:
    """Run the hook in a new process without privileges.

    Return whether it imported at the lowest and at the usual priority, and whether its main thread
    has the usual priority afterwards."""
    environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(Path(PACKAGE).parents[1])}
    result = subprocess.run(
        [sys.executable, "-c", PROBE, MARKER],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert not result.stderr, result.stderr
    return [word == "True" for word in result.stdout.split()]


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_beside_work_a_process_imports_at_the_lowest_priority_and_becomes_a_host_at_the_usual_one() -> None:
    assert priorities() == [False, True, True], "nobody is at work yet: the run waits for this process"
    with marked_as_working(MARKER):
        assert priorities() == [True, False, True]
        assert priorities(threads="5") == [False, True, True], "threads of libraries would stay low"
    assert priorities() == [False, True, True], "the mark has ended with the work"


@pytest.mark.skipif(sys.platform != "linux", reason="the run is not seen to be at work")
def test_a_process_waits_for_its_turn_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may import slowly on busy cores, or never end."""
    actions: list[str] = []
    monkeypatch.setattr(importlib, "import_module", lambda _: actions.append("import"))
    monkeypatch.setattr(time, "sleep", lambda _: actions.append("wait"))
    with marked_as_working(MARKER), socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0{MARKER}/import")
        make_importer(("torch",), PACKAGE, MARKER)()
    assert actions == ["wait"] * import_hook._MAX_TURNS + ["import"]


@pytest.mark.skipif(sys.platform != "linux", reason="the run is not seen to be at work")
def test_beside_work_processes_import_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    actions: list[str] = []
    other = socket.socket(socket.AF_UNIX)
    other.bind(f"\0{MARKER}/import")

    def sleep(seconds: float) -> None:
        actions.append("wait")
        if len(actions) == 3:
            other.close()  # the other process has imported, or died

    monkeypatch.setattr(importlib, "import_module", lambda _: actions.append("import"))
    monkeypatch.setattr(time, "sleep", sleep)
    with marked_as_working(MARKER):
        make_importer(("torch",), PACKAGE, MARKER)()
        assert actions == ["wait", "wait", "wait", "import"]
        make_importer(("torch",), PACKAGE, MARKER)()
        assert actions[4:] == ["import"], "the turn ends with the imports"
