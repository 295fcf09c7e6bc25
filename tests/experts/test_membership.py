"""Membership: a host that has left does not wait, and an observer sees which hosts wait."""

from __future__ import annotations

import threading
import time

import pytest

from experts.membership import GroupLeft, GroupMembership


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
    assert (membership.completed_waits, membership.waiting) == (1, False)


def test_an_observer_sees_that_a_host_waits() -> None:
    membership = GroupMembership()
    done = threading.Event()
    observed: list[bool] = []

    def condition() -> bool:
        observed.append(membership.waiting)
        return done.is_set()

    thread = threading.Thread(target=membership.wait_until, args=(condition,))
    thread.start()
    while not observed:
        time.sleep(0.001)
    assert membership.waiting
    assert membership.completed_waits == 0
    done.set()
    thread.join()
    assert all(observed)
    assert (membership.waiting, membership.completed_waits) == (False, 1)


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
