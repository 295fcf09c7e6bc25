"""The tensors alive at the peak of memory, from traces of torch's allocator made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.steps import memory_peak
from benchmarks.steps.memory_peak import BEFORE, OTHER, alive_at_peak, place_of

ROOT = str(Path(memory_peak.__file__).parents[2])


def frame(path: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": path, "line": line, "name": name}


TORCH = frame("/usr/lib/python3/site-packages/torch/_ops.py", 7, "__call__")
BACKWARD = frame(f"{ROOT}/experts/backward.py", 10, "backward")
TABLES = frame(f"{ROOT}/experts/backward.py", 3, "tables")
INSTALLED = frame(f"{ROOT}/.venv/lib/site-packages/torch/_ops.py", 7, "__call__")


def event(action: str, address: int, size: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "frames": list(frames), "stream": 0}


def test_freed_memory_does_not_count_and_addresses_are_used_again() -> None:
    trace = [
        event("free_requested", 1, 100),  # a gradient of the step before
        event("free_completed", 1, 100),
        event("segment_alloc", 2, 4096),
        event("alloc", 2, 300, BACKWARD),
        event("free_requested", 2, 300),
        event("alloc", 2, 700, TORCH, TABLES, BACKWARD),  # the peak
        event("free_requested", 2, 700),
        event("alloc", 3, 650, BACKWARD),
    ]
    tables = "experts/backward.py:3 tables < experts/backward.py:10 backward"
    assert alive_at_peak(trace, before=1000) == {BEFORE: 900, tables: 700}


def test_the_peak_may_be_before_the_step() -> None:
    assert alive_at_peak([event("free_requested", 1, 100)], before=1000) == {BEFORE: 1000}


def test_layers_of_compiled_code_are_one_place(tmp_path: Path) -> None:
    folder = tmp_path / "torchinductor_user"
    folder.mkdir()
    path = folder / "graph.py"
    path.write_text("    buf1 = empty((3, 64))\n    buf27 = empty((3, 64))\n    buf3 = empty((4, 64))\n")
    trace = [event("alloc", line, 10 * line, frame(str(path), line, "call"), TORCH) for line in (1, 2, 3)]
    assert alive_at_peak(trace, 0) == {"`buf = empty((3, 64))`": 30, "`buf = empty((4, 64))`": 30}


def test_code_of_others_has_no_place() -> None:
    assert place_of([TORCH, INSTALLED]) == OTHER
    assert place_of([TORCH, INSTALLED, BACKWARD]) == "experts/backward.py:10 backward"
