"""The driver's side of a run on expert hosts, without Ray: actors are stand-ins whose answers the test gives, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.events import EventLog, of_kind, read_events
from orchestrator.runtime.driver import Ended
from orchestrator.runtime.expert_parallel import calls as muster_module
from orchestrator.runtime.expert_parallel import run as module
from orchestrator.runtime.expert_parallel.run import ExpertParallelRun
from orchestrator.runtime.expert_parallel.states import Closing, Joining, Leaving, Over, Training, Waiting
from orchestrator.runtime.recovery import HostHealth


@dataclass(eq=False)
class Call:
    """Something that an actor was asked."""

    name: str
    arguments: tuple[Any, ...]
    answer: Any = None
    done: bool = False

    def give(self, answer: Any = None) -> None:
        self.answer, self.done = answer, True


class Actor:
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Call:
            self.calls.append(Call(name, arguments))
            return self.calls[-1]

        return SimpleNamespace(remote=remote)

    def last(self, name: str) -> Call:
        return next(call for call in reversed(self.calls) if call.name == name)


def wait(calls: Sequence[Call], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Call], list[Call]]:
    return [call for call in calls if call.done], [call for call in calls if not call.done]


def get(call: Call) -> Any:
    if isinstance(call.answer, BaseException):
        raise call.answer
    return call.answer


RAY = SimpleNamespace(
    wait=wait, get=get, put=lambda value: value, util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
)


class Seats:
    """All hosts are ready as soon as they are started, but for those ``late``."""

    def __init__(self, count: int, *_: Any) -> None:
        self.count, self.actors = count, dict[int, Actor]()
        self.given_up: set[int] = set()
        self.late: set[int] = set()
        self.error: BaseException | None = None
        self.complaint = "of the test"
        self.frozen: list[int] = []

    def reserve(self, seconds: float) -> bool:
        for number in range(self.count):
            self.start(number)
        return True

    def start(self, number: int) -> None:
        self.actors[number] = Actor()

    def end(self, number: int, frozen: bool = False) -> None:
        self.actors.pop(number, None)
        self.frozen += [number] if frozen else []

    def rule_out(self, number: int, error: BaseException) -> None:
        self.end(number)
        self.given_up.add(number)

    def actor(self, number: int) -> Actor:
        return self.actors[number]

    def look(self, busy: Sequence[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ready = tuple(number for number in sorted(self.actors) if number not in self.late)
        return ready, tuple(sorted(self.late & self.actors.keys()))

    def startable(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(number for number in numbers if number not in self.given_up)

    def close(self) -> None:
        self.actors = {}


class Copies:
    def __init__(self, *_: Any) -> None:
        self.step, self.gone, self.held = -1, set[int](), True
        self.waits_for: set[int] = set()
        self.forgotten = False

    def look(self) -> None: ...
    def calls(self, all_of_them: bool) -> list[Any]:
        return []

    def follow(self, epoch: int, members: tuple[int, ...]) -> None:
        self.gone = set()

    def forget(self) -> None:
        self.forgotten = True

    def expects(self, step: int) -> bool:
        return step in self.waits_for

    def references(self) -> tuple[Any, ...]:
        return (("header", "data"),) if self.held and self.step >= 0 else ()


class Vitals:
    def __init__(self, *_: Any) -> None:
        self.step, self.slowest_s = 7, 0.0
        self.told: list[HostHealth] = []

    def follow(self, *_: Any) -> None: ...
    def look(self, at_once: bool = False) -> bool:
        return True

    def signs(self) -> dict[int, float]:
        return {seat: time.time() - 0.25 for seat in range(8)}

    def all(self) -> list[HostHealth]:
        return self.told


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Run:
    """A run on so many hosts, and what it has come to."""

    hosts: ExpertParallelRun
    clock: Clock
    run_dir: Path
    seats: Any = field(init=False)
    copies: Any = field(init=False)
    vitals: Any = field(init=False)

    def __post_init__(self) -> None:
        self.seats, self.copies, self.vitals = self.hosts._seats, self.hosts._copies, self.hosts._vitals

    @property
    def state(self) -> Any:
        return self.hosts._state

    def turn(self, times: int = 1) -> Ended | None:
        for _ in range(times):
            ended = self.hosts.wait(0.0)
            if ended is not None:
                return ended
        return None

    def answer(self, name: str, answer: Any = None, *seats: int) -> None:
        """Of these hosts, or of all members."""
        for seat in seats or self.state.members:
            self.seats.actor(seat).last(name).give(answer)
        self.turn()

    def train(self) -> None:
        """To the first segment."""
        self.turn()
        self.answer("join")
        assert isinstance(self.state, Training)


Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    clock = Clock()
    for name, stand_in in (
        ("ray", RAY),
        ("HostPool", Seats),
        ("SnapshotStore", Copies),
        ("Heartbeats", Vitals),
        ("perf_counter", clock),
    ):
        monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(module, "for_host", lambda task: {})
    monkeypatch.setattr(module, "open_store", lambda host: (None, (host, 1)))
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(muster_module, "ray", RAY)

    def made(hosts: int = 3, **settings: Any) -> Run:
        config = Config.of(run_dir=tmp_path, **settings)
        assignment: Any = SimpleNamespace(
            prepared=SimpleNamespace(resolved=SimpleNamespace(config=config)), run_dir=tmp_path
        )
        return Run(
            ExpertParallelRun(assignment, hosts, False, EventLog(tmp_path / "events.jsonl")), clock, tmp_path
        )

    return made


def test_from_the_first_segment_to_the_end(make: Make) -> None:
    run = make()
    run.train()
    run.answer("advance", (None, 5))
    assert isinstance(run.state, Training)
    run.answer("advance", ("completed", 9))
    assert isinstance(run.state, Closing)
    run.answer("close", None, 0, 1, 2)
    ended = run.turn()
    assert ended is not None
    assert (ended.status, ended.failure) == ("completed", None)


def test_a_lost_host_is_replaced_and_the_others_leave_and_join_again(make: Make) -> None:
    run = make()
    run.train()
    run.copies.step = 5
    before = run.seats.actor(0)
    run.answer("advance", RayActorError(), 1)
    assert isinstance(run.state, Leaving)
    assert before.last("leave").arguments == (0,)
    run.answer("advance", RuntimeError("gloo/ connection closed by peer"), 0, 2)
    assert isinstance(run.state, Waiting), "another is being started"
    (failure,) = of_kind(read_events(run.run_dir / "events.jsonl"), "failure")
    assert failure["message"] == "host 1 was lost; waiting for 1 host to take over", (
        "told at once, not when it is there"
    )
    run.turn()
    assert isinstance(run.state, Joining)
    assert run.state.generation == 1
    assert run.seats.actor(0) is before, "who is not lost keeps its process"
    assert run.seats.actor(1).last("join").arguments[3].copies
    (failure,) = of_kind(read_events(run.run_dir / "events.jsonl"), "failure")
    assert (failure["rank"], failure["step"]) == (1, 7)


def test_all_that_are_lost_are_named(make: Make) -> None:
    run = make(hosts=4)
    run.train()
    for seat in (3, 0, 1):
        run.seats.actor(seat).last("advance").give(RayActorError())
    run.turn()
    run.answer("advance", RuntimeError("gloo/ connection closed by peer"), 2)
    (failure,) = of_kind(read_events(run.run_dir / "events.jsonl"), "failure")
    assert failure["message"] == "hosts 0, 1 and 3 were lost; waiting for 3 hosts to take over"
    assert failure["rank"] == 0


def test_how_it_goes_on_after_all_is_in_the_account(make: Make) -> None:
    """Told once; where the one that was waited for does not come, the recovery says how it went on."""
    run = make()
    run.train()
    run.answer("advance", RayActorError(), 1)
    run.seats.late = {1}
    run.answer("advance", RuntimeError("gloo/ connection closed by peer"), 0, 2)
    run.clock.now += 10_000.0
    run.turn()
    assert isinstance(run.state, Joining)
    run.answer("join")
    run.answer("advance", (None, 8))
    run.answer("advance", (None, 99))
    events = read_events(run.run_dir / "events.jsonl")
    assert len(of_kind(events, "failure")) == 1
    (recovery,) = of_kind(events, "recovery")
    assert recovery["reason"] == "host 1 was lost; 2 of 3 hosts can go on, with the same global batch"
    assert recovery["detect_seconds"] == pytest.approx(0.25, abs=0.05), "since it was heard of last"


def test_who_dies_after_its_last_answer_is_missed(make: Make) -> None:
    run = make()
    run.train()
    run.seats.actor(2).last("advance").give((None, 5))
    run.copies.gone = {2}
    run.turn()
    assert isinstance(run.state, Leaving)


@pytest.mark.parametrize("first", [0, 2])
def test_a_run_that_the_main_host_has_ended_is_over_whoever_dies_then(make: Make, first: int) -> None:
    """Before its own answer, or after it."""
    run = make()
    run.train()
    run.answer("advance", ("completed", 9), 0)
    assert isinstance(run.state, Training), "the others have a moment"
    if first == 0:
        run.copies.gone = {0}
        run.turn()
    else:
        run.answer("advance", RayActorError(), 2)
    assert isinstance(run.state, Closing)
    for seat in {0, 1, 2} - {first}:
        run.seats.actor(seat).last("close").give()
    run.turn()
    ended = run.turn()
    assert ended is not None
    assert ended.status == "completed"
    assert of_kind(read_events(run.run_dir / "events.jsonl"), "failure") == []


def test_who_does_not_close_is_not_waited_for(make: Make) -> None:
    run = make(collective_timeout=10)
    run.train()
    run.answer("advance", ("completed", 9))
    run.answer("close", None, 0, 1)
    assert isinstance(run.state, Closing)
    run.clock.now += 61.0
    run.turn()
    assert isinstance(run.state, Over)


def stuck(seat: int, waiting: bool = False, silent: float = 0.0) -> HostHealth:
    return HostHealth(seat, "step", waiting, silent, 1000.0)


def test_a_frozen_host_is_killed_at_once(make: Make) -> None:
    run = make(collective_timeout=10)
    run.train()
    run.vitals.told = [stuck(0, waiting=True), stuck(1, silent=11.0), stuck(2, waiting=True)]
    run.turn()
    assert isinstance(run.state, Leaving)
    assert run.seats.frozen == [1]


def test_all_wait_for_each_other(make: Make) -> None:
    run = make(collective_timeout=10)
    run.train()
    run.vitals.told = [stuck(seat, waiting=True) for seat in range(3)]
    run.turn()
    assert isinstance(run.state, Leaving)
    assert run.seats.frozen == [], "nobody is to blame"
    run.turn()
    assert run.seats.frozen == [0, 1, 2], "but who does not leave when it is told to is"


def test_who_freezes_before_its_copy_is_there_is_found(make: Make) -> None:
    run = make(collective_timeout=10)
    run.train()
    run.hosts._state = Training(0, (0, 1, 2), keeping=True)
    run.copies.waits_for = {5}
    run.answer("advance", (None, 5))
    assert isinstance(run.state, Training)
    run.vitals.told = [stuck(0, silent=11.0)]
    run.turn()
    assert isinstance(run.state, Leaving)


def grown(make: Make) -> Run:
    """Two of three hosts have a whole set of copies, and the third is there again."""
    run = make()
    run.seats.late = {2}
    run.hosts._state = Training(0, (0, 1), keeping=True)
    run.seats.reserve(0.0)
    run.hosts._muster.form((0, 1))
    run.hosts._trained, run.hosts._proven = True, (0, 1)
    run.hosts._muster.ask(lambda actor, *_: actor.advance.remote(None))
    run.seats.late = set()
    run.copies.step = 5
    return run


def test_more_hosts_join_at_the_end_of_a_segment(make: Make) -> None:
    run = grown(make)
    run.answer("advance", (None, 5))
    assert isinstance(run.state, Joining)
    assert run.state.members == (0, 1, 2)


def test_they_do_not_where_a_copy_is_lost(make: Make) -> None:
    run = grown(make)
    run.copies.held = False
    run.answer("advance", (None, 5))
    assert run.state == Training(0, (0, 1), run.state.tally), "on as before"


def test_a_newcomer_that_cannot_join_is_ruled_out_and_the_others_go_on(make: Make) -> None:
    run = grown(make)
    run.answer("advance", (None, 5))
    run.answer("join", UserError("does not see the run folder"), 2)
    run.answer("join", RuntimeError("gloo/ connection closed by peer"), 0, 1)
    assert isinstance(run.state, Joining)
    assert run.state.members == (0, 1)
    assert run.seats.given_up == {2}
    assert 2 not in run.seats.actors, "it is not started again"
    assert not run.copies.forgotten


def test_a_mistake_that_all_make_ends_the_run(make: Make) -> None:
    run = make()
    run.turn()
    run.answer("join", UserError("no such data"))
    run.turn()
    assert isinstance(run.state, Over)
    ended = run.turn()
    assert ended is not None
    assert isinstance(ended.error, UserError)


def test_all_lost_are_waited_for_as_long_as_for_resources(make: Make) -> None:
    run = make(resource_timeout=300)
    run.train()
    run.seats.late = {0, 1, 2}
    run.answer("advance", RayActorError())
    run.turn()
    assert isinstance(run.state, Waiting)
    run.clock.now += 200.0
    run.turn()
    assert isinstance(run.state, Waiting)
    run.clock.now += 101.0
    run.turn()
    assert isinstance(run.state, Over)
    assert "no host is left" in str(run.state.given_up)


@pytest.mark.parametrize(("deterministic", "state"), [(False, Joining), (True, Waiting)])
def test_one_that_is_late_is_waited_for_where_bits_count(
    make: Make, deterministic: bool, state: type
) -> None:
    run = make(deterministic=deterministic)
    run.train()
    run.seats.late = {1}
    run.answer("advance", RayActorError(), 1)
    run.answer("advance", RuntimeError("gloo/ connection closed by peer"), 0, 2)
    assert isinstance(run.state, Waiting)
    run.clock.now += 21.0
    run.turn()
    assert isinstance(run.state, state)


def test_copies_older_than_a_checkpoint_that_is_there_are_not_used(make: Make) -> None:
    run = make()
    log = EventLog(run.run_dir / "events.jsonl")
    log.write("checkpoint", step=500, path="checkpoints/step_00000500")  # set aside since
    log.write("checkpoint", step=100, path="checkpoints/step_00000100")
    log.write("checkpoint", path="checkpoints/step_00000100")
    (run.run_dir / "checkpoints" / "step_00000100").mkdir(parents=True)
    assert run.hosts._saved_step() == 100


def test_hosts_that_cannot_be_started(make: Make) -> None:
    run = make(spares=1)
    run.seats.late = {0, 1, 2, 3}
    run.turn()
    run.seats.given_up = {0}
    run.turn()
    assert not isinstance(run.state, Over), "there is a spare"
    run.seats.given_up = {0, 1}
    run.turn()
    assert isinstance(run.state, Over)
    assert "2 of 4 hosts could not be started: of the test" in str(run.state.given_up)


def test_a_users_mistake_is_told_as_it_is(make: Make) -> None:
    run = make()
    run.seats.late, run.seats.error = {0}, UserError("does not see the run folder")
    with pytest.raises(UserError, match="run folder"):
        run.turn()
