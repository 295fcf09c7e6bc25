"""The heartbeat of a host: sent while the loop works, and once more at its end."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from experts.hosts.membership import GroupMembership
from orchestrator.train.group import heartbeat as module
from orchestrator.train.group.heartbeat import Heartbeat, send_heartbeats


class Receiver(list[str]):
    """Heartbeats in the order they were sent."""

    def __init__(self) -> None:
        super().__init__()
        self._more = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._more:
            self.append(text)
            self._more.notify_all()

    def wait(self, count: int) -> None:
        """Wait until ``count`` heartbeats have come."""
        with self._more:
            arrived = self._more.wait_for(lambda: len(self) >= count, 30.0)
        assert arrived, f"{len(self)} heartbeats of {count}"

    def last(self) -> list[Any]:
        return json.loads(self[-1].partition(" ")[2])


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 0.005)


def heartbeat_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_host_starts_in_the_build_phase() -> None:
    assert json.loads(Heartbeat().encode(GroupMembership())) == ["build", 0, 0, False]


def test_a_phase_and_a_completed_wait_are_progress() -> None:
    heartbeat = Heartbeat()
    membership = GroupMembership()
    heartbeat.enter_phase("first step", 7)
    heartbeat.enter_phase("step", 8)
    assert json.loads(heartbeat.encode(membership)) == ["step", 8, 2, False]
    heartbeat.enter_phase("evaluate")
    assert json.loads(heartbeat.encode(membership)) == ["evaluate", 8, 3, False], "the step stays"
    membership.wait_until(lambda: True)
    assert json.loads(heartbeat.encode(membership)) == ["evaluate", 8, 4, False]
    heartbeat.beat()
    assert json.loads(heartbeat.encode(membership)) == ["evaluate", 8, 5, False], "a batch of it"
    waiting: list[Any] = []
    membership.record_wait(lambda: waiting.extend(json.loads(heartbeat.encode(membership))))
    assert waiting == ["evaluate", 8, 5, True]


def test_a_phase_within_a_phase_ends_with_its_block() -> None:
    heartbeat = Heartbeat()
    heartbeat.enter_phase("first step", 7)
    phases: list[str] = []

    def fail() -> None:
        phases.append(heartbeat.phase)
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"), heartbeat.within("data"):
        fail()
    assert phases == ["data"]
    assert (heartbeat.phase, heartbeat.num_changes) == ("first step", 3)


def test_no_two_heartbeats_are_equal() -> None:
    received = Receiver()
    with send_heartbeats(Heartbeat(), GroupMembership(), received):
        received.wait(4)
    assert len(set(received)) == len(received)
    assert [int(text.partition(" ")[0]) for text in received] == list(range(len(received)))


def test_heartbeats_are_sent_while_the_loop_works() -> None:
    received = Receiver()
    heartbeat = Heartbeat()
    with send_heartbeats(heartbeat, GroupMembership(), received):
        heartbeat.enter_phase("step", 3)
        received.wait(len(received) + 2)
        assert received.last() == ["step", 3, 1, False]


def test_the_last_heartbeat_has_the_final_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 600.0)
    received = Receiver()
    heartbeat = Heartbeat()
    with send_heartbeats(heartbeat, GroupMembership(), received):
        received.wait(1)
        heartbeat.enter_phase("rest", 12)
    assert received.last() == ["rest", 12, 1, False]
    assert len(received) == 2
    assert heartbeat_threads() == []


def test_a_last_heartbeat_is_sent_after_an_error() -> None:
    received = Receiver()
    heartbeat = Heartbeat()
    heartbeat.enter_phase("step", 5)
    with (
        pytest.raises(ValueError, match="in the loop"),
        send_heartbeats(heartbeat, GroupMembership(), received),
    ):
        raise ValueError("in the loop")
    assert received.last()[:2] == ["step", 5]
    assert heartbeat_threads() == []


def test_a_host_that_cannot_send_leaves_its_group() -> None:
    membership = GroupMembership()

    def fail_at_third(text: str) -> None:
        if int(text.partition(" ")[0]) == 2:
            raise RuntimeError("the store is gone")

    with send_heartbeats(Heartbeat(), membership, fail_at_third):
        (thread,) = heartbeat_threads()
        thread.join(30.0)
        assert membership.left
    assert heartbeat_threads() == []
