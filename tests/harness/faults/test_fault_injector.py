"""The fault injector, on processes that only sleep."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.faults.fault_injector import FaultInjector, idle_ranks, is_alive
from harness.faults.fault_schedule import FaultFolder, FaultSchedule
from orchestrator.record.events.kinds import JsonEvent as Event

NO_PROCESS = 2**22 + 1
"""A number that no process has."""


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    """Three children of this process, in place of hosts."""
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


def make_injector(
    folder: Path, pids: list[int], schedule: FaultSchedule, root: int | None = None
) -> FaultInjector:
    run_dir = folder / "run"
    (run_dir / "logs").mkdir(parents=True)
    for rank, pid in enumerate(pids):
        (run_dir / "logs" / f"worker_{rank}.pid").write_text(str(pid))
    FaultFolder.of_run(run_dir).write(schedule)
    return FaultInjector(run_dir, schedule, len(pids), NO_PROCESS, frozenset({root or os.getpid()}))


def record_step(injector: FaultInjector, step: int) -> None:
    event: dict[str, Any] = {"time": time.time(), "event": "step", "step": step}
    with (injector.run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 10 s"
        time.sleep(0.005)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_kill_happens_when_its_step_is_recorded(tmp_path: Path, sleepers: list[int]) -> None:
    injector = make_injector(tmp_path, sleepers, FaultSchedule().kill(1, step=5))
    for step in (3, 4):
        record_step(injector, step)
        injector.carry_out_due()
    assert [is_alive(pid) for pid in sleepers] == [True, True, True]
    record_step(injector, 5)
    injector.carry_out_due()
    wait_until(lambda: not is_alive(sleepers[1]))
    assert [is_alive(pid) for pid in sleepers] == [True, False, True]
    (fired,) = injector.folder.fired()
    assert (fired.rank, fired.pid, fired.step) == (1, sleepers[1], 5)


def test_two_ranks_at_once_and_then_the_buddy(tmp_path: Path, sleepers: list[int]) -> None:
    schedule = FaultSchedule().kill((0, 1), step=1).kill("buddy", phase="recovery")
    injector = make_injector(tmp_path, sleepers, schedule)
    record_step(injector, 1)
    injector.carry_out_due()
    wait_until(lambda: not is_alive(sleepers[0]) and not is_alive(sleepers[1]))
    assert is_alive(sleepers[2])
    injector.carry_out_due()
    wait_until(lambda: not is_alive(sleepers[2]))
    assert injector.folder.fired()[-1].rank == 2, "rank 2 follows rank 1"


def test_a_newcomer_is_waited_for(tmp_path: Path, sleepers: list[int]) -> None:
    schedule = FaultSchedule().kill(0, step=1).kill("newcomer", phase="recovery")
    injector = make_injector(tmp_path, sleepers, schedule)
    record_step(injector, 1)
    injector.carry_out_due()
    injector.carry_out_due()
    assert len(injector.folder.fired()) == 1, "the rank has no new process yet"
    (injector.run_dir / "logs" / "worker_0.pid").write_text(str(sleepers[2]))
    injector.carry_out_due()
    assert injector.folder.fired()[-1].pid == sleepers[2]


def test_no_process_outside_the_run_is_sent_a_signal(tmp_path: Path, sleepers: list[int]) -> None:
    injector = make_injector(tmp_path, sleepers, FaultSchedule().kill(1, step=1), root=NO_PROCESS)
    record_step(injector, 1)
    injector.carry_out_due()
    time.sleep(0.05)
    assert all(map(is_alive, sleepers))
    assert injector.folder.fired() == []


def test_a_stopped_process_is_woken(tmp_path: Path, sleepers: list[int]) -> None:
    injector = make_injector(tmp_path, sleepers, FaultSchedule().stop(2, step=1, wakes_after_s=0.2))
    record_step(injector, 1)
    injector.carry_out_due()
    wait_until(lambda: state_of(sleepers[2]) == "T")
    time.sleep(0.2)
    injector.carry_out_due()
    wait_until(lambda: state_of(sleepers[2]) == "S")


def test_hosts_without_experts_are_read_from_the_placement() -> None:
    placement: Event = {"event": "placement", "layers": [{"host_of": [0, 0, 2]}, {"host_of": [2, 2, 0]}]}
    assert idle_ranks([placement], 3) == [1]
    assert idle_ranks([], 3) == []
