"""Waits of a device: the device writes how far it is, and the host reads it from its own memory."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from itertools import pairwise
from typing import Any

import pytest
import torch

from experts.hosts import device_waits
from experts.hosts.device_waits import DeviceWaits
from experts.hosts.membership import WaitState

CPU = torch.device("cpu")


class QueuedWaits(DeviceWaits):
    """The waits of a device that works later than its host records them."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.stream = 0
        self.queues = defaultdict[int, deque[tuple[Any, int]]](deque)

    @property
    def queue(self) -> deque[tuple[Any, int]]:
        return self.queues[self.stream]

    def _current_stream(self) -> int:
        return self.stream

    def _write(self, waits: Any, position: int) -> None:
        self.queue.append((waits, position))

    def pass_points(self, num_points: int) -> None:
        for _ in range(num_points):
            super()._write(*self.queue.popleft())

    def record_waits(self, num_waits: int) -> None:
        for _ in range(2 * num_waits):
            self.record_point()


def test_a_device_waits_from_its_arrival_at_a_collective_to_the_end_of_it() -> None:
    waits = QueuedWaits()
    assert waits.observe() == (0, False)
    waits.record_waits(1)
    assert waits.observe() == (0, False), "the device still computes"
    waits.pass_points(1)
    assert waits.observe() == (0, True)
    waits.pass_points(1)
    assert waits.observe() == (1, False)
    assert waits.observe() == (1, False), "a wait is counted once"


def test_a_device_that_computes_between_two_collectives_does_not_wait() -> None:
    """The host has recorded later waits already."""
    waits = QueuedWaits()
    waits.record_waits(3)
    waits.pass_points(2)
    assert waits.observe() == (1, False)
    waits.pass_points(1)
    assert waits.observe() == (1, True)


def test_another_stream_does_not_end_the_wait_of_a_stream() -> None:
    """FSDP2 gathers the next weights on a stream of its own, while the tokens of a peer are awaited."""
    waits = QueuedWaits()
    waits.record_waits(1)
    waits.pass_points(1)
    waits.stream = 1
    waits.record_waits(1)
    assert waits.observe() == (0, True)
    waits.pass_points(2)
    assert waits.observe() == (1, True), "the gather is done, the tokens are still awaited"
    waits.stream = 0
    waits.pass_points(1)
    assert waits.observe() == (2, False)


def test_a_device_without_a_queue_has_done_all_that_was_recorded() -> None:
    waits = DeviceWaits(CPU)
    waits.record_point()
    assert waits.observe() == (0, True)
    waits.record_point()
    assert waits.observe() == (1, False)


@pytest.mark.parametrize("num_behind", [0, 1, 2, 7])
def test_waits_are_counted_beyond_the_last_position(monkeypatch: pytest.MonkeyPatch, num_behind: int) -> None:
    """Positions repeat; the device is at most one round of them behind its host."""
    monkeypatch.setattr(device_waits, "_NUM_POSITIONS", 8)
    waits = QueuedWaits()
    num_passed = 0
    for num_recorded in range(1, 60):
        waits.record_point()
        if len(waits.queue) > num_behind:
            waits.pass_points(1)
            num_passed += 1
        assert waits.observe() == (num_passed // 2, num_passed % 2 == 1), num_recorded


def test_an_observer_in_another_thread_sees_waits_only_grow() -> None:
    waits = DeviceWaits(CPU)
    observed: list[WaitState] = []
    ended = threading.Event()

    def observe() -> None:
        while not ended.is_set():
            observed.append(waits.observe())

    thread = threading.Thread(target=observe)
    thread.start()
    num_waits = 3 * device_waits._NUM_POSITIONS
    for _ in range(2 * num_waits):
        waits.record_point()
    ended.set()
    thread.join()
    assert waits.observe() == (num_waits, False)
    counts = [state.num_completed for state in observed]
    assert all(earlier <= later for earlier, later in pairwise(counts))
    assert max(counts) <= num_waits
