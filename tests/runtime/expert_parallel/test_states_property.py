"""Properties of the state machine that hold for any sequence of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.runtime.expert_parallel.states import (
    AllClosed,
    AllJoined,
    CloseHosts,
    Closing,
    Ended,
    Event,
    FailureSeen,
    GroupStopped,
    HostsReady,
    JoinGroup,
    Joining,
    LeaveGroup,
    Leaving,
    ReplaceHosts,
    RunFinished,
    RunLimits,
    Running,
    RunSegment,
    SegmentDone,
    StartFailed,
    Starting,
    State,
    WaitingForHosts,
    next_state,
)
from orchestrator.runtime.recovery import Failure, FailureKind, HostStatus
from tests.runtime.expert_parallel.test_states import EVENTS, LIMITS, MEMBERS

HOST_IDS = st.integers(0, 6)
UNIQUE_IDS = st.lists(HOST_IDS, unique=True)
RETRYABLE: tuple[FailureKind, ...] = ("worker", "memory", "resources", "communication", "fault")


class AnyRun(RuleBasedStateMachine):
    """Any events in any order. They are drawn so that they could be true: a lost host was a member."""

    @initialize(
        num_hosts=st.integers(1, 4),
        spares=st.integers(0, 2),
        max_failures=st.integers(0, 6),
        can_grow=st.booleans(),
    )
    def begin(self, num_hosts: int, spares: int, max_failures: int, can_grow: bool) -> None:
        self.limits = RunLimits(num_hosts, max_failures, can_grow)
        self.host_ids = range(num_hosts + spares)
        self.state: State = Starting()
        self.num_generations = 0
        self.num_failures = 0

    def handle(self, event: Event) -> None:
        before = self.state
        self.state, commands = next_state(before, event, self.limits)
        for command in commands:
            match command:
                case JoinGroup():
                    self.check_join(before, command)
                case LeaveGroup(generation=generation, members=members):
                    assert isinstance(before, Joining | Running)
                    assert (generation, members) == (before.generation, before.members)
                case ReplaceHosts(host_ids=host_ids):
                    assert isinstance(before, Leaving)
                    assert host_ids <= set(before.members)
                case RunSegment(snapshot_at_end=snapshot_at_end):
                    assert isinstance(self.state, Running)
                    assert snapshot_at_end == self.state.snapshot_at_end
                case CloseHosts(members=members):
                    assert isinstance(before, Running)
                    assert members == before.members
        if isinstance(before, Leaving) and not isinstance(self.state, Leaving | Ended):
            self.num_failures += 1

    def check_join(self, before: State, join: JoinGroup) -> None:
        assert isinstance(self.state, Joining)
        assert (self.state.generation, self.state.members) == (join.generation, join.members)
        assert join.generation == self.num_generations, "generations are counted, and each is used once"
        self.num_generations += 1
        without_failure = isinstance(before, Starting | Running)
        assert (join.failure is None) == without_failure
        members_before: tuple[int, ...] = getattr(before, "members", ())
        lost: frozenset[int] = frozenset()
        if isinstance(before, WaitingForHosts):
            members_before = before.hosts.members
            lost = before.hosts.lost  # another process may have come back under the id, in any place
        stayed = [host for host in join.members if host in members_before and host not in lost]
        assert stayed == [host for host in members_before if host in stayed], "survivors keep their order"
        if isinstance(before, Leaving | WaitingForHosts):
            assert len(join.members) <= len(members_before)

    def existing(self, host_ids: list[int]) -> tuple[int, ...]:
        return tuple(sorted(host for host in host_ids if host in self.host_ids))

    @rule(ready=UNIQUE_IDS, starting=UNIQUE_IDS, may_wait=st.booleans())
    def hosts_ready(self, ready: list[int], starting: list[int], may_wait: bool) -> None:
        are_ready = self.existing(ready)
        are_starting = tuple(host for host in self.existing(starting) if host not in are_ready)
        self.handle(HostsReady(are_ready, are_starting, may_wait))

    @rule()
    def all_joined(self) -> None:
        self.handle(AllJoined())

    @rule(ready=UNIQUE_IDS)
    def segment_done(self, ready: list[int]) -> None:
        self.handle(SegmentDone(self.existing(ready)))

    @rule()
    def failure_seen(self) -> None:
        self.handle(FailureSeen())

    @precondition(lambda self: isinstance(self.state, Leaving))
    @rule(data=st.data(), step=st.integers(0, 3))
    def group_stopped(self, data: st.DataObject, step: int) -> None:
        assert isinstance(self.state, Leaving)
        members = self.state.members
        lost = frozenset(data.draw(st.lists(st.sampled_from(members), unique=True)))
        alive = [host for host in self.host_ids if host not in lost]
        ready = tuple(data.draw(st.lists(st.sampled_from(alive), unique=True)) if alive else [])
        drawn = data.draw(st.lists(st.sampled_from(self.host_ids), unique=True))
        starting = tuple(host for host in drawn if host not in ready)
        kind = data.draw(st.sampled_from(RETRYABLE))
        micro_batch = data.draw(st.sampled_from([1, 4, 8]))
        failure = Failure(kind, "something", micro_batch=micro_batch)
        losses = [Failure("worker", "lost", host) for host in lost]
        hosts = HostStatus(members, lost, ready, starting)
        self.handle(GroupStopped((failure, *losses), hosts, step))

    @precondition(lambda self: isinstance(self.state, Running) and self.num_generations > 2)
    @rule()
    def run_finished(self) -> None:
        self.handle(RunFinished("completed"))

    @invariant()
    def members_are_valid(self) -> None:
        state = getattr(self, "state", Starting())
        if isinstance(state, Joining | Running | Leaving):
            assert 1 <= len(state.members) <= self.limits.num_hosts
            assert len(set(state.members)) == len(state.members)
            assert set(state.members) <= set(self.host_ids)
        if isinstance(state, Joining | Running | Leaving | WaitingForHosts):
            assert state.history.failures == self.num_failures <= self.limits.max_failures
            assert state.history.halvings <= self.num_failures

    @invariant()
    def an_end_has_a_status_or_a_reason(self) -> None:
        state = getattr(self, "state", Starting())
        if isinstance(state, Ended):
            assert (state.status is None) == (state.failure is not None) == (state.given_up is not None)

    def teardown(self) -> None:
        """Every state has a way to the end, and nothing leads away from the end."""
        if not hasattr(self, "state"):
            return
        for _ in range(8):
            match self.state:
                case Starting():
                    self.handle(StartFailed("no CPUs"))
                case Joining() | Running():
                    self.handle(FailureSeen())
                case Leaving(members=members):
                    error = Failure("error", "an error of the run itself")
                    self.handle(GroupStopped((error,), HostStatus(members), 0))
                case WaitingForHosts():
                    self.handle(HostsReady((), (), may_wait=False))
                case Closing():
                    self.handle(AllClosed())
                case Ended():
                    break
        assert isinstance(self.state, Ended)
        assert all(next_state(self.state, event, self.limits) == (self.state, ()) for event in EVENTS)


TestAnyRun = AnyRun.TestCase
TestAnyRun.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


@given(kinds=st.lists(st.sampled_from((*RETRYABLE, "error")), max_size=12), max_failures=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_repeated_failures_always_end_the_run(kinds: list[FailureKind], max_failures: int) -> None:
    """A run that fails before each segment, with enough hosts, ends after the allowed number of
    failures."""
    limits = RunLimits(3, max_failures)
    state, _ = next_state(Starting(), HostsReady(MEMBERS), LIMITS)
    for step, kind in enumerate(kinds):
        state, _ = next_state(state, AllJoined(), limits)
        state, _ = next_state(state, FailureSeen(), limits)
        failure = Failure(kind, "something", micro_batch=8)
        state, _ = next_state(state, GroupStopped((failure,), HostStatus(MEMBERS), step), limits)
        if isinstance(state, Ended):
            assert kind == "error" or step == max_failures
            return
    assert "error" not in kinds
    assert len(kinds) <= max_failures
