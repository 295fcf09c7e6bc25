"""Membership: a host that has left does not wait, and an observer sees which hosts wait."""

from __future__ import annotations

import threading
import time

import pytest

from experts.hosts import membership as membership_module
from experts.hosts.membership import GroupLeft, GroupMembership, WaitState


def test_a_host_that_has_left_does_not_wait() -> None:
    membership = GroupMembership()
    membership.check()
    membership.leave()
    assert membership.left
    with pytest.raises(GroupLeft):
        membership.check()
    with pytest.raises(GroupLeft):
        membership.wait_until(lambda: False)


def test_a_condition_that_holds_already_ends_the_wait_after_leaving() -> None:
    membership = GroupMembership()
    membership.leave()
    membership.wait_until(lambda: True)
    assert membership.observe() == (1, False)


def test_an_observer_sees_that_a_host_waits() -> None:
    membership = GroupMembership()
    done = threading.Event()
    observed: list[bool] = []

    def condition() -> bool:
        observed.append(membership.observe().waiting)
        return done.is_set()

    thread = threading.Thread(target=membership.wait_until, args=(condition,))
    thread.start()
    while not observed:
        time.sleep(0.001)
    assert membership.observe() == (0, True)
    done.set()
    thread.join()
    assert all(observed)
    assert membership.observe() == (1, False)


def test_leaving_from_another_thread_ends_the_wait() -> None:
    membership = GroupMembership()
    errors: list[GroupLeft] = []

    def wait() -> None:
        try:
            membership.wait_until(lambda: False)
        except GroupLeft as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    membership.leave()
    thread.join(30.0)
    assert len(errors) == 1


def test_a_long_wait_looks_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of hosts may look into one store; a short wait still ends at once."""
    now = 0.0
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    monkeypatch.setattr(membership_module, "sleep", sleep)
    monkeypatch.setattr(membership_module, "monotonic", lambda: now)
    GroupMembership().wait_until(lambda: now > 60.0)
    assert pauses[0] <= 0.002
    assert pauses == sorted(pauses)
    assert all(pause <= max(0.0021, 0.06 * sum(pauses[:index])) for index, pause in enumerate(pauses[:200]))
    assert len(pauses) < 20 * 60 + 200, "at most 20 looks a second later on"
    assert max(pauses) <= 0.05, "a host that is to leave notices soon"


class DeviceThatWaits:
    """A device that has completed two waits and is in the third."""

    def observe(self) -> WaitState:
        return WaitState(2, waiting=True)


def test_waits_of_host_and_device_are_counted_together() -> None:
    membership = GroupMembership()
    membership.wait_until(lambda: True)
    assert membership.observe() == (1, False)
    membership.follow_device(DeviceThatWaits())
    assert membership.observe() == (3, True)


def test_waiting_to_be_left_returns_at_once_when_it_is() -> None:
    membership = GroupMembership()
    assert not membership.wait_until_left(0.0)
    membership.leave()
    assert membership.wait_until_left(3600.0)
