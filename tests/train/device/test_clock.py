"""Seconds per phase, by a clock of the test and by events of a GPU that the test invents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from orchestrator.train.device import clock as clock_module
from orchestrator.train.device.clock import DevicePhaseClock, PhaseClock


class FakeTime:
    """The host's clock, which the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(clock_module, "perf_counter", fake)
    return fake


def run_step(clock: PhaseClock, time: FakeTime, phases: Sequence[tuple[str, float]]) -> float:
    """Run a step whose phases take so many seconds, and one more second after the last."""
    clock.begin()
    for phase, seconds in phases:
        time.now += seconds
        clock.mark(phase)
    time.now += 1.0
    return clock.end()


def test_means_are_over_the_steps_since_the_last_call(time: FakeTime) -> None:
    clock = PhaseClock()
    assert clock.take() == {}
    first = run_step(clock, time, [("data", 1.0), ("forward", 2.0), ("data", 4.0)])
    time.now += 50.0  # between steps: counted nowhere
    second = run_step(clock, time, [("forward", 6.0)])
    assert (first, second) == (8.0, 7.0)
    assert clock.take() == {"steps": 2, "data": 2.5, "forward": 4.0, "total": 7.5}
    assert clock.take() == {}
    run_step(clock, time, [("data", 3.0)])
    assert clock.take() == {"steps": 1, "data": 3.0, "total": 4.0}


class FakeEvent:
    """An event that is reached 20 ms of the device after the one before it."""

    recorded: list[FakeEvent]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.is_waited_for = False

    def record(self, stream: Any) -> None:
        assert stream == "the stream"
        self.place = len(FakeEvent.recorded)
        FakeEvent.recorded.append(self)

    def synchronize(self) -> None:
        self.is_waited_for = True

    def elapsed_time(self, end: FakeEvent) -> float:
        return 20.0 * (end.place - self.place)


@pytest.fixture
def device_clock(monkeypatch: pytest.MonkeyPatch) -> DevicePhaseClock:
    FakeEvent.recorded = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the stream")
    return DevicePhaseClock(torch.device("cuda"))


PHASES = [("data", 3.0), ("forward", 0.1), ("backward", 0.1), ("forward", 0.1)]


def test_phases_of_the_device_are_timed_by_its_events(time: FakeTime, device_clock: DevicePhaseClock) -> None:
    """The forward passes take 20 ms each on the device; the wait for data is the host's."""
    assert run_step(device_clock, time, PHASES) == pytest.approx(4.3)
    assert [event.is_waited_for for event in FakeEvent.recorded] == [False] * 4, "no step waits"
    means = device_clock.take()
    assert [event.is_waited_for for event in FakeEvent.recorded] == [False, False, False, True]
    assert means == pytest.approx({"steps": 1, "data": 3.0, "forward": 0.04, "backward": 0.02, "total": 4.3})
    assert device_clock.take() == {}


def test_one_step_of_ten_carries_events(time: FakeTime, device_clock: DevicePhaseClock) -> None:
    for _ in range(21):
        run_step(device_clock, time, PHASES)
    assert len(FakeEvent.recorded) == 3 * 4
    means = device_clock.take()
    assert (means["steps"], means["data"], means["forward"]) == pytest.approx((21, 3.0, 0.04))


def test_steps_without_events_have_no_phases_of_the_device(
    time: FakeTime, device_clock: DevicePhaseClock
) -> None:
    run_step(device_clock, time, PHASES)
    device_clock.take()
    run_step(device_clock, time, PHASES)
    assert device_clock.take() == pytest.approx({"steps": 1, "data": 3.0, "total": 4.3})


def test_the_wait_for_data_begins_after_the_phase_before_it(
    time: FakeTime, device_clock: DevicePhaseClock
) -> None:
    run_step(device_clock, time, [("data", 1.0), ("forward", 5.0), ("data", 2.0)])
    assert device_clock.take()["data"] == 3.0
