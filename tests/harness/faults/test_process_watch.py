"""The search for leaks in the readings of a run's processes."""

from __future__ import annotations

from pathlib import Path

from harness.faults.process_watch import ProcessWatch, Reading, find_leaks


def test_files_and_threads_that_pile_up_are_found(tmp_path: Path) -> None:
    """A host that joins late and loads what all have does not leak; one that keeps a file per fault
    does."""
    fault_times = [10.0 * number for number in range(1, 10)]
    calm = ProcessWatch(1, tmp_path)
    calm.member_since = {5: 5.0}
    calm.readings = {
        1: [Reading(1.0, 9, 3, 9)],
        5: [Reading(1.0, 20, 5, 9), Reading(2.0, 25, 5, 9), Reading(3.0, 19, 5, 9)],
    }
    watch = ProcessWatch(2, tmp_path)
    watch.member_since = {7: 5.0, 8: 55.0}
    growing = [Reading(float(second), 20 + 2 * second // 8, 5, 9) for second in range(100)]
    settling = [Reading(float(second), 20 + 3 * min(second, 4), 5, 9) for second in range(100)]
    exiting = Reading(2.0, 0, 1, 0)
    watch.readings = {2: [Reading(1.0, 9, 23, 9), exiting], 7: growing, 8: settling, 9: growing}
    assert [(held.pid, held.faults) for held in watch.holdings(fault_times)] == [(7, 9), (8, 4), (2, 0)]
    assert find_leaks(watch, calm, fault_times) == [
        "host process 7 had 44 files after 9 faults, where 25 are usual",
        "the driver had 23 threads after 0 faults, where 3 are usual",
    ]
