"""The pulses of hosts as the driver sees them: with a clock and a store that the test turns."""

from __future__ import annotations

import json

import pytest

from orchestrator.runtime.expert_parallel import heartbeats as module
from orchestrator.runtime.expert_parallel.heartbeats import Heartbeats
from orchestrator.runtime.expert_parallel.host_worker import beat_key
from orchestrator.runtime.recovery import stuck


class Store:
    """What hosts have said, by key; how often anyone looked."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.looks = 0

    def check(self, keys: list[str]) -> bool:
        self.looks += 1
        return all(key in self.held for key in keys)

    def get(self, key: str) -> bytes:
        return self.held[key]


class Scene:
    """Hosts 4, 0 and 2 in epoch 3, from second 100 on."""

    def __init__(self) -> None:
        self.now, self.store, self.beats = 100.0, Store(), 0
        self.vitals = Heartbeats(self.store, lambda: self.now)
        self.vitals.follow(3, (4, 0, 2))

    def says(
        self, seat: int, phase: str, step: int, progress: int, waiting: bool = False, epoch: int = 3
    ) -> None:
        self.beats += 1
        self.store.held[beat_key(epoch, seat)] = (
            f"{self.beats} {json.dumps([phase, step, progress, waiting])}".encode()
        )

    def at(self, second: float) -> None:
        self.now = second
        self.vitals.look()

    def of(self, seat: int) -> tuple[str, bool, float, float]:
        found = next(vital for vital in self.vitals.all() if vital.host_id == seat)
        return found.phase, found.waiting, found.silent_s, found.still_s


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_hosts_that_have_said_nothing_are_joining(scene: Scene) -> None:
    scene.at(107.0)
    assert [vital.host_id for vital in scene.vitals.all()] == [4, 0, 2]
    assert {scene.of(seat) for seat in (0, 2, 4)} == {("join", False, 7.0, 7.0)}
    assert scene.vitals.step == 0


def test_what_a_host_said_last(scene: Scene) -> None:
    scene.says(2, "evaluate", 8, 30, waiting=True)
    scene.at(101.0)
    scene.at(103.0)
    assert scene.of(2) == ("evaluate", True, 2.0, 2.0)
    assert scene.of(0) == ("join", False, 3.0, 3.0)


def test_a_beat_is_a_sign_of_life_and_not_of_progress(scene: Scene) -> None:
    scene.says(2, "step", 8, 30)
    scene.at(101.0)
    scene.says(2, "step", 8, 30)
    scene.at(104.0)
    assert scene.of(2) == ("step", False, 0.0, 3.0)
    scene.says(2, "step", 8, 31)
    scene.at(105.0)
    assert scene.of(2) == ("step", False, 0.0, 0.0)


def test_the_same_beat_again_is_no_sign_of_life(scene: Scene) -> None:
    scene.says(2, "step", 8, 30)
    for second in (101.0, 105.0, 111.5):
        scene.at(second)
    assert scene.of(2) == ("step", False, 10.5, 10.5)
    assert [vital.host_id for vital in stuck(scene.vitals.all(), 10.0)] == [2], (
        "the others have not begun to speak, for which there is time"
    )


def test_the_store_is_not_asked_all_the_time(scene: Scene) -> None:
    scene.now = 100.1
    assert not scene.vitals.look()
    assert scene.store.looks == 0
    assert scene.vitals.look(at_once=True)
    assert scene.store.looks == 3
    scene.now = 100.2
    assert not scene.vitals.look()
    scene.now = 100.4
    assert scene.vitals.look()


def test_a_new_epoch_knows_nothing_of_the_one_before(scene: Scene) -> None:
    scene.says(2, "step", 8, 30)
    scene.at(101.0)
    scene.now = 110.0
    scene.vitals.follow(4, (2, 5))
    scene.says(2, "step", 9, 33)  # of a host that has not heard of it yet
    scene.at(111.0)
    assert [vital.host_id for vital in scene.vitals.all()] == [2, 5]
    assert scene.of(2) == ("join", False, 1.0, 1.0)
    assert scene.vitals.step == 0
    scene.says(2, "first step", 8, 2, epoch=4)
    scene.at(112.0)
    assert scene.of(2) == ("first step", False, 0.0, 0.0)


def test_the_step_is_that_of_the_host_that_has_come_furthest(scene: Scene) -> None:
    for seat, step in ((0, 7), (2, 9), (4, 8)):
        scene.says(seat, "step", step, 1)
    scene.at(101.0)
    assert scene.vitals.step == 9


def test_the_slowest_step(scene: Scene) -> None:
    assert scene.vitals.slowest_s == 0.0
    for second, step in ((101.0, 5), (103.0, 6), (108.0, 7), (109.0, 8)):
        scene.says(2, "step", step, step)
        scene.at(second)
    assert scene.vitals.slowest_s == 5.0
    scene.says(2, "step", 18, 90)
    scene.at(140.0)
    assert scene.vitals.slowest_s == 5.0, "ten steps that were done unseen are not one"


def test_a_step_that_took_several_looks_is_one(scene: Scene) -> None:
    scene.says(2, "step", 5, 1)
    scene.at(101.0)
    for second, progress in ((103.0, 2), (105.0, 3)):
        scene.says(2, "step", 5, progress)
        scene.at(second)
    scene.says(2, "data", 5, 4)
    scene.at(106.0)
    scene.says(2, "step", 6, 5)
    scene.at(107.0)
    assert scene.vitals.slowest_s == 6.0


def long_before_a_step(scene: Scene, phase: str, step: int) -> float:
    """A host is at something for a minute, saying so, and then does step after step in a second each."""
    second = 101.0
    scene.says(2, "step" if step else "build", step, 0)
    scene.at(second)
    for beat in range(60):
        second += 1.0
        scene.says(2, phase, step, 1 + beat // 30)
        scene.at(second)
    for done in (1, 2, 3):
        second += 1.0
        scene.says(2, "step", step + done, 10 + done)
        scene.at(second)
    return scene.vitals.slowest_s


@pytest.mark.parametrize("phase", ["evaluate", "save", "snapshot", "rest"])
def test_what_lies_between_two_steps_is_no_slow_step(scene: Scene, phase: str) -> None:
    """A limit that grew with an evaluation would find a frozen host minutes late."""
    assert long_before_a_step(scene, phase, 5) <= 2.0


def test_building_and_the_first_step_are_no_slow_step(scene: Scene) -> None:
    assert long_before_a_step(scene, "build", 0) <= 2.0
    assert long_before_a_step(Scene(), "first step", 0) <= 2.0


def test_when_each_was_heard_of(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", lambda: 5000.0 + scene.now)
    scene.says(0, "step", 1, 1)
    scene.at(102.0)
    scene.says(2, "step", 1, 1)
    scene.at(104.0)
    scene.now = 110.0
    signs = scene.vitals.signs()
    assert (signs[0], signs[2]) == (5102.0, 5104.0)
