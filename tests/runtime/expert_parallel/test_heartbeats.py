"""The heartbeats of hosts as the driver reads them, with a clock and a store that the test sets."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest

from orchestrator.runtime.expert_parallel import heartbeats as module
from orchestrator.runtime.expert_parallel.heartbeats import Heartbeats, heartbeat_key
from orchestrator.runtime.expert_parallel.stuck import find_stuck
from orchestrator.train.group.stores import seal

SECRET = "a secret"


class Store:
    """A store that counts how often it is read."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_checks = 0

    def check(self, keys: list[str]) -> bool:
        self.num_checks += 1
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def set_sealed(self, key: str, text: str, secret: str = SECRET) -> None:
        self.values[key] = seal(text, key, secret).encode()


class Group:
    """Hosts 4, 0 and 2 in generation 3, from second 100 on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = Store()
        self.num_beats = 0
        self.warnings: list[str] = []
        self.heartbeats = Heartbeats(self.store, SECRET, self.warnings.append, lambda: self.now)
        self.heartbeats.follow(3, (4, 0, 2))

    def send(
        self,
        host_id: int,
        phase: str,
        step: int,
        progress: int,
        waiting: bool = False,
        generation: int = 3,
    ) -> None:
        self.num_beats += 1
        text = f"{self.num_beats} {json.dumps([phase, step, progress, waiting])}"
        self.store.set_sealed(heartbeat_key(generation, host_id), text)

    def read_at(self, second: float) -> None:
        self.now = second
        self.heartbeats.read()

    def health(self, host_id: int) -> tuple[str, bool, float, float]:
        host = next(host for host in self.heartbeats.health() if host.host_id == host_id)
        return host.phase, host.waiting, host.silent_s, host.unchanged_s


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.mark.extended
def test_the_module_does_not_import_ray() -> None:
    program = (
        "import sys, orchestrator.runtime.expert_parallel.heartbeats, orchestrator.runtime.recovery_log,"
        " orchestrator.runtime.expert_parallel.states; sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_hosts_without_a_heartbeat_are_joining(group: Group) -> None:
    group.read_at(107.0)
    assert [host.host_id for host in group.heartbeats.health()] == [4, 0, 2]
    assert {group.health(host_id) for host_id in (0, 2, 4)} == {("join", False, 7.0, 7.0)}
    assert group.heartbeats.last_step == 0


def test_the_last_heartbeat_counts(group: Group) -> None:
    group.send(2, "evaluate", 8, 30, waiting=True)
    group.read_at(101.0)
    group.read_at(103.0)
    assert group.health(2) == ("evaluate", True, 2.0, 2.0)
    assert group.health(0) == ("join", False, 3.0, 3.0)


def test_a_heartbeat_is_a_sign_of_life_but_not_of_progress(group: Group) -> None:
    group.send(2, "step", 8, 30)
    group.read_at(101.0)
    group.send(2, "step", 8, 30)
    group.read_at(104.0)
    assert group.health(2) == ("step", False, 0.0, 3.0)
    group.send(2, "step", 8, 31)
    group.read_at(105.0)
    assert group.health(2) == ("step", False, 0.0, 0.0)


def test_the_same_heartbeat_read_again_is_no_sign_of_life(group: Group) -> None:
    group.send(2, "step", 8, 30)
    for second in (101.0, 105.0, 111.5):
        group.read_at(second)
    assert group.health(2) == ("step", False, 10.5, 10.5)
    stuck = find_stuck(group.heartbeats.health(), 10.0)
    assert [host.host_id for host in stuck] == [2], "the others are joining, which may take longer"


def test_the_store_is_not_read_all_the_time(group: Group) -> None:
    group.now = 100.1
    assert not group.heartbeats.read()
    assert group.store.num_checks == 0
    assert group.heartbeats.read(immediately=True)
    assert group.store.num_checks == 3
    group.now = 100.2
    assert not group.heartbeats.read()
    group.now = 100.4
    assert group.heartbeats.read()


def test_heartbeats_of_an_earlier_generation_are_ignored(group: Group) -> None:
    group.send(2, "step", 8, 30)
    group.read_at(101.0)
    group.now = 110.0
    group.heartbeats.follow(4, (2, 5))
    group.send(2, "step", 9, 33)  # the host has not joined generation 4 yet
    group.read_at(111.0)
    assert [host.host_id for host in group.heartbeats.health()] == [2, 5]
    assert group.health(2) == ("join", False, 1.0, 1.0)
    assert group.heartbeats.last_step == 0
    group.send(2, "first step", 8, 2, generation=4)
    group.read_at(112.0)
    assert group.health(2) == ("first step", False, 0.0, 0.0)


def test_the_last_step_is_that_of_the_host_furthest_ahead(group: Group) -> None:
    for host_id, step in ((0, 7), (2, 9), (4, 8)):
        group.send(host_id, "step", step, 1)
    group.read_at(101.0)
    assert group.heartbeats.last_step == 9


def longest(group: Group, host_id: int = 2) -> tuple[float, float]:
    """Return the longest time without progress in the host's phase, and without a heartbeat."""
    host = next(host for host in group.heartbeats.health() if host.host_id == host_id)
    return host.longest_work_s, host.longest_silence_s


def stay(group: Group, phase: str, step: int, progress: int, until: float, **options: Any) -> None:
    """Let host 2 send heartbeats without progress until a second, and the driver read them."""
    while group.now < until:
        group.send(2, phase, step, progress, **options)
        group.read_at(min(until, group.now + 0.5))


def test_the_longest_time_without_progress_is_measured_from_the_first_step_on(group: Group) -> None:
    stay(group, "first step", 0, 1, until=131.0)
    assert longest(group) == (0.0, 0.5), "the step has not ended"
    stay(group, "step", 1, 2, until=131.5)
    assert longest(group)[0] == 31.0


def test_one_slow_host_raises_the_limit_of_all(group: Group) -> None:
    """Any of them may get the long sequence next."""
    group.send(0, "step", 1, 1)
    stay(group, "step", 1, 1, until=108.0)
    stay(group, "step", 2, 2, until=108.5)
    assert longest(group, 0)[0] == 8.0


@pytest.mark.parametrize("phase", ["evaluate", "save", "snapshot", "build", "compile"])
def test_each_phase_has_a_limit_of_its_own(group: Group, phase: str) -> None:
    """A limit of steps that grew with an evaluation would find a hung host minutes late."""
    stay(group, phase, 5, 1, until=160.0)
    stay(group, "step", 5, 2, until=160.5)
    assert longest(group)[0] == 0.0
    stay(group, phase, 5, 3, until=161.0)
    assert longest(group)[0] == 60.0


def test_a_wait_does_not_raise_the_limit_of_work(group: Group) -> None:
    """A peer that waited for a compilation of minutes says nothing of how long a step takes."""
    stay(group, "step", 5, 1, until=400.0, waiting=True)
    stay(group, "step", 5, 2, until=400.5)
    host = next(host for host in group.heartbeats.health() if host.host_id == 2)
    assert (host.longest_work_s, host.longest_wait_s) == (0.0, 300.0)


@pytest.mark.parametrize("num_quick_parts", [1, 10, 1000])
def test_quick_parts_of_a_step_do_not_hide_its_slow_one(group: Group, num_quick_parts: int) -> None:
    progress = 0
    for step in range(1, 4):
        for _ in range(num_quick_parts):
            progress += 1
            group.send(2, "step", step, progress)
            group.read_at(group.now + 0.2)
        stay(group, "step", step, progress, until=group.now + 12.0)
    group.send(2, "step", 4, progress + 1)
    group.read_at(group.now + 0.2)
    assert longest(group)[0] >= 12.0


def test_a_slow_first_step_is_forgotten_once_steps_are_known(group: Group) -> None:
    """Else a hung host would be found late."""
    stay(group, "first step", 0, 0, until=160.0)
    for step in range(1, 5):
        stay(group, "step", step, step, until=160.0 + step)
        assert longest(group)[0] == (60.0 if step < 4 else 1.0), step


def test_a_slow_step_is_forgotten_after_five_others(group: Group) -> None:
    stay(group, "step", 1, 1, until=130.0)
    for step in range(2, 8):
        stay(group, "step", step, step, until=129.0 + step)
        assert longest(group)[0] == (30.0 if step < 7 else 1.0), step


def test_a_driver_that_was_away_measures_nothing(group: Group) -> None:
    stay(group, "step", 1, 1, until=101.0)
    group.send(2, "step", 2, 2)
    group.read_at(106.0)
    assert longest(group) == (0.0, 0.5)


def test_measured_limits_survive_a_regroup(group: Group) -> None:
    """The steps of the next generation take as long as those of the last."""
    stay(group, "step", 1, 1, until=120.0)
    stay(group, "step", 2, 2, until=120.5)
    group.heartbeats.follow(4, (2, 5))
    group.send(2, "step", 2, 1, generation=4)
    group.read_at(121.0)
    assert longest(group)[0] == 20.0


def test_a_host_that_closes_its_part_of_the_last_group_shows_that_it_lives(group: Group) -> None:
    """It may have a checkpoint to write before it joins."""
    group.send(2, "save", 8, 30)
    group.read_at(101.0)
    group.heartbeats.follow(4, (2, 5))
    group.read_at(102.0)
    for second in (112.0, 152.0, 200.0):
        group.send(2, "save", 8, 31)
        group.read_at(second)
    assert group.health(2) == ("join", False, 0.0, 88.0)
    group.send(2, "save", 8, 32)
    group.read_at(201.0)
    assert group.health(2) == ("join", False, 0.0, 0.0)
    assert group.health(5) == ("join", False, 100.0, 100.0)
    assert group.heartbeats.last_step == 0


def test_the_time_of_each_hosts_last_heartbeat(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", lambda: 5000.0 + group.now)
    group.send(0, "step", 1, 1)
    group.read_at(102.0)
    group.send(2, "step", 1, 1)
    group.read_at(104.0)
    group.now = 110.0
    last_seen = group.heartbeats.last_seen()
    assert (last_seen[0], last_seen[2]) == (5102.0, 5104.0)


KEY = heartbeat_key(3, 2)
HOSTILE_TEXTS = [
    "9 x",
    "",
    "9",
    '9 ["step", 8, 30, false]',
    '9 ["step", -1, 30, false]',
    '9 ["step", 1e308, 30, false]',
    '9 ["step", true, 30, false]',
    '9 ["step", NaN, 30, false]',
    '9 [["step"], 8, 30, false]',
    '9 {"a": 1, "b": 2, "c": 3, "d": 4}',
    "9 " + "[" * 400,
    "9" * 700 + ' ["step", 8, 30, false]',
    '-1 ["step", 8, 30, false]',
]


def hostile_values(count: int) -> list[bytes]:
    """Values that no host wrote: without a MAC, with that of another key or secret, and random bytes."""
    generator = random.Random(0)
    values = [text.encode() for text in HOSTILE_TEXTS]
    values += [seal(text, KEY, "another secret").encode() for text in HOSTILE_TEXTS]
    values += [seal(text, heartbeat_key(2, 2), SECRET).encode() for text in HOSTILE_TEXTS]
    values += [b"[" * 2**20, b"\xff" * 100, seal("9 x", KEY, SECRET).encode()[:-1]]
    good = bytearray(seal('9 ["step", 8, 30, false]', KEY, SECRET).encode())
    while len(values) < count:
        changed = bytearray(good)
        changed[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        values += [bytes(changed), generator.randbytes(generator.randrange(200))]
    return values


def test_values_that_no_host_wrote_count_as_no_heartbeat_and_are_reported_once(group: Group) -> None:
    group.send(2, "step", 8, 30)
    group.read_at(101.0)
    before = group.health(2)[:2]
    for value in hostile_values(3000):
        group.store.values[KEY] = value
        group.read_at(group.now + 0.25)
        assert group.health(2)[:2] == before, value[:100]
    assert len(group.warnings) == 1
    assert "host 2" in group.warnings[0]
    assert SECRET not in group.warnings[0]
    assert group.heartbeats.last_step == 8


@pytest.mark.parametrize("text", [text for text in HOSTILE_TEXTS if text != '9 ["step", 8, 30, false]'])
def test_a_heartbeat_with_the_right_secret_and_wrong_fields_counts_as_none(group: Group, text: str) -> None:
    group.store.set_sealed(KEY, text)
    group.read_at(101.0)
    assert group.health(2)[0] == "join"


def test_a_host_whose_heartbeats_others_replace_all_the_time_is_not_stuck(group: Group) -> None:
    group.send(2, "step", 8, 30)
    group.read_at(101.0)
    for number in range(200):
        for host_id in (4, 0):
            group.send(host_id, "step", 8, number)
        group.store.values[KEY] = b"garbage %d" % number
        group.read_at(group.now + 0.5)
    assert find_stuck(group.heartbeats.health(), 10.0) == ()


def test_a_host_that_is_frozen_behind_a_value_of_others_is_stuck(group: Group) -> None:
    group.send(2, "step", 8, 30)
    group.read_at(101.0)
    group.store.values[KEY] = b"garbage"
    for number in range(30):
        for host_id in (4, 0):
            group.send(host_id, "step", 8, number)
        group.read_at(group.now + 0.5)
    assert [host.host_id for host in find_stuck(group.heartbeats.health(), 10.0)] == [2]


def test_an_old_heartbeat_that_is_written_again_is_no_sign_of_life(group: Group) -> None:
    group.send(2, "step", 8, 30)
    old = group.store.values[KEY]
    group.read_at(101.0)
    group.send(2, "step", 9, 31)
    group.read_at(102.0)
    group.store.values[KEY] = old
    group.read_at(112.0)
    assert group.health(2) == ("step", False, 10.0, 10.0)
    assert group.heartbeats.last_step == 9


def test_deleted_heartbeats_count_as_none(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is deleted between two calls to the store, and in the generation before."""
    group.send(2, "step", 8, 30)
    group.read_at(101.0)
    monkeypatch.setattr(group.store, "check", lambda keys: True)
    group.store.values.clear()
    group.read_at(103.0)
    group.heartbeats.follow(4, (2, 5))
    group.read_at(104.0)
    assert group.health(2) == ("join", False, 1.0, 1.0)
