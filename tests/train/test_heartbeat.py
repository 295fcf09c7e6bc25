"""What a host says of itself from beside its loop."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from experts.membership import GroupMembership
from orchestrator.train import heartbeat as module
from orchestrator.train.heartbeat import Heartbeat, send_heartbeats


class Heard(list[str]):
    """Beats, in order; ``wait`` until so many are there."""

    def __init__(self) -> None:
        super().__init__()
        self._more = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._more:
            self.append(text)
            self._more.notify_all()

    def wait(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self) >= count, 30.0), f"{len(self)} beats of {count}"

    def told(self, number: int) -> list[Any]:
        return json.loads(self[number].partition(" ")[2])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 0.005)


def pulses() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_a_host_begins_by_building() -> None:
    assert json.loads(Heartbeat().encode(GroupMembership())) == ["build", 0, 0, False]


def test_every_change_is_progress_and_so_is_every_answer() -> None:
    pulse, life = Heartbeat(), GroupMembership()
    pulse.enter_phase("first step", 7)
    pulse.enter_phase("step", 8)
    assert json.loads(pulse.encode(life)) == ["step", 8, 2, False]
    pulse.enter_phase("evaluate")
    assert json.loads(pulse.encode(life)) == ["evaluate", 8, 3, False], "the step stays"
    life.wait_until(lambda: True)
    assert json.loads(pulse.encode(life)) == ["evaluate", 8, 4, False]
    life.waiting = True
    assert json.loads(pulse.encode(life)) == ["evaluate", 8, 4, True]


def test_no_two_beats_are_alike() -> None:
    heard = Heard()
    with send_heartbeats(Heartbeat(), GroupMembership(), heard):
        heard.wait(4)
    assert len(set(heard)) == len(heard)
    assert [int(text.partition(" ")[0]) for text in heard] == list(range(len(heard)))


def test_it_beats_while_the_loop_is_busy() -> None:
    heard, pulse = Heard(), Heartbeat()
    with send_heartbeats(pulse, GroupMembership(), heard):
        pulse.enter_phase("step", 3)
        heard.wait(len(heard) + 2)
        assert heard.told(-1) == ["step", 3, 1, False]


def test_the_last_word_tells_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 600.0)
    heard, pulse = Heard(), Heartbeat()
    with send_heartbeats(pulse, GroupMembership(), heard):
        heard.wait(1)
        pulse.enter_phase("rest", 12)
    assert heard.told(-1) == ["rest", 12, 1, False]
    assert len(heard) == 2
    assert pulses() == []


def test_the_last_word_comes_after_an_error_too() -> None:
    heard, pulse = Heard(), Heartbeat()
    pulse.enter_phase("step", 5)
    with pytest.raises(ValueError, match="of the loop"), send_heartbeats(pulse, GroupMembership(), heard):
        raise ValueError("of the loop")
    assert heard.told(-1)[:2] == ["step", 5]
    assert pulses() == []


def test_a_host_that_nobody_hears_leaves() -> None:
    life, left = GroupMembership(), threading.Event()

    def broken(text: str) -> None:
        if int(text.partition(" ")[0]) == 2:
            raise RuntimeError("the store is gone")

    with send_heartbeats(Heartbeat(), life, broken):
        for _ in range(6000):
            if life.left:
                break
            left.wait(0.005)
        assert life.left
    assert pulses() == []
