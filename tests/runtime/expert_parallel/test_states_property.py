"""The life of a run on expert hosts, whatever happens to it: what holds of all ways through the state machine."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.runtime.expert_parallel.states import (
    Advance,
    AllClosed,
    AllJoined,
    Apart,
    Broken,
    Close,
    Closing,
    Happening,
    HostsReady,
    Join,
    Joining,
    Leave,
    Leaving,
    OutOfTime,
    Over,
    Replace,
    RunEnded,
    SegmentDone,
    Starting,
    State,
    Terms,
    Training,
    Waiting,
    after,
)
from orchestrator.runtime.recovery import Failure, HostStatus, Kind
from tests.runtime.expert_parallel.test_states import HAPPENINGS, MEMBERS, TERMS

SEATS = st.integers(0, 6)
MENDABLE: tuple[Kind, ...] = ("worker", "memory", "resources", "communication", "fault")


class AnyLife(RuleBasedStateMachine):
    """Whatever happens, in whatever order. What Ray tells is drawn so that it could be true: who is lost was a member."""

    @initialize(
        wanted=st.integers(1, 4), spares=st.integers(0, 2), failures=st.integers(0, 6), grows=st.booleans()
    )
    def begin(self, wanted: int, spares: int, failures: int, grows: bool) -> None:
        self.terms, self.seats = Terms(wanted, failures, grows), range(wanted + spares)
        self.state: State = Starting()
        self.epochs: list[int] = []
        self.counted = 0

    def tell(self, happening: Happening) -> None:
        before = self.state
        self.state, commands = after(before, happening, self.terms)
        for command in commands:
            match command:
                case Join(generation=epoch, members=members, failure=failure):
                    self.joined(before, epoch, members, failure)
                case Leave(generation=epoch, members=members):
                    assert isinstance(before, Joining | Training)
                    assert (epoch, members) == (before.generation, before.members)
                case Replace(seats=seats):
                    assert isinstance(before, Leaving)
                    assert seats <= set(before.members)
                case Advance(keep=keep):
                    assert isinstance(self.state, Training)
                    assert keep == self.state.keeping
                case Close(members=members):
                    assert isinstance(before, Training)
                    assert members == before.members
        self.counted += isinstance(before, Leaving) and not isinstance(self.state, Leaving | Over)

    def joined(self, before: State, epoch: int, members: tuple[int, ...], failure: Failure | None) -> None:
        assert isinstance(self.state, Joining)
        assert (self.state.generation, self.state.members) == (epoch, members)
        assert epoch == len(self.epochs), "epochs are counted, each is used once"
        assert (failure is None) == isinstance(before, Starting | Training), (
            "a failure says why, growth needs none"
        )
        self.epochs.append(epoch)
        old = before.seats.members if isinstance(before, Waiting) else getattr(before, "members", ())
        stayed = [seat for seat in members if seat in old]
        assert stayed == [seat for seat in old if seat in stayed], "those who stay keep their order"
        if isinstance(before, Leaving | Waiting):
            assert len(members) <= len(old)

    @rule(ready=st.lists(SEATS, unique=True), coming=st.lists(SEATS, unique=True), patient=st.booleans())
    def hosts(self, ready: list[int], coming: list[int], patient: bool) -> None:
        there = tuple(sorted(seat for seat in ready if seat in self.seats))
        self.tell(
            HostsReady(
                there, tuple(seat for seat in coming if seat in self.seats and seat not in there), patient
            )
        )

    @rule()
    def all_joined(self) -> None:
        self.tell(AllJoined())

    @rule(ready=st.lists(SEATS, unique=True))
    def segment_done(self, ready: list[int]) -> None:
        self.tell(SegmentDone(tuple(sorted(seat for seat in ready if seat in self.seats))))

    @rule()
    def broken(self) -> None:
        self.tell(Broken())

    @precondition(lambda self: isinstance(self.state, Leaving))
    @rule(data=st.data(), step=st.integers(0, 3), patient=st.booleans())
    def all_apart(self, data: st.DataObject, step: int, patient: bool) -> None:
        assert isinstance(self.state, Leaving)
        members = self.state.members
        lost = frozenset(data.draw(st.lists(st.sampled_from(members), unique=True)))
        ready = data.draw(
            st.lists(st.sampled_from([seat for seat in self.seats if seat not in lost] or [-1]), unique=True)
        )
        coming = data.draw(st.lists(st.sampled_from(self.seats), unique=True))
        failures = [
            Failure(
                data.draw(st.sampled_from(MENDABLE)),
                "something",
                micro_batch=data.draw(st.sampled_from([1, 4, 8])),
            )
        ]
        failures += [Failure("worker", "lost", seat) for seat in lost]
        there = tuple(seat for seat in ready if seat >= 0)
        self.tell(
            Apart(
                tuple(failures),
                HostStatus(members, lost, there, tuple(seat for seat in coming if seat not in there)),
                step,
                patient,
            )
        )

    @precondition(lambda self: isinstance(self.state, Training) and len(self.epochs) > 2)
    @rule()
    def ended(self) -> None:
        self.tell(RunEnded("completed"))

    @invariant()
    def members_are_sound(self) -> None:
        state = getattr(self, "state", Starting())
        if isinstance(state, Joining | Training | Leaving):
            assert 1 <= len(state.members) <= self.terms.wanted
            assert len(set(state.members)) == len(state.members)
            assert set(state.members) <= set(self.seats)
        if isinstance(state, Joining | Training | Leaving | Waiting):
            assert state.tally.failures == self.counted <= self.terms.max_failures
            assert state.tally.halvings <= state.tally.failures

    @invariant()
    def an_end_says_why(self) -> None:
        state = getattr(self, "state", Starting())
        if isinstance(state, Over):
            assert (state.status is None) == (state.failure is not None) == (state.given_up is not None)

    def teardown(self) -> None:
        """From wherever it stands there is an end, and from the end nothing leads away."""
        if not hasattr(self, "state"):
            return
        for _ in range(8):
            match self.state:
                case Starting():
                    self.tell(OutOfTime("no CPUs"))
                case Joining() | Training():
                    self.tell(Broken())
                case Leaving(members=members):
                    self.tell(Apart((Failure("error", "the run's own"),), HostStatus(members), 0))
                case Waiting():
                    self.tell(HostsReady((), (), patient=False))
                case Closing():
                    self.tell(AllClosed())
                case Over():
                    break
        assert isinstance(self.state, Over)
        assert all(after(self.state, happening, self.terms) == (self.state, ()) for happening in HAPPENINGS)


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


@given(kinds=st.lists(st.sampled_from((*MENDABLE, "error")), max_size=12), most=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_failures_one_after_the_other_always_come_to_an_end(kinds: list[Kind], most: int) -> None:
    """A life that fails before each segment, with hosts in abundance: after so many failures as are allowed it is over."""
    state, terms = after(Starting(), HostsReady(MEMBERS), TERMS)[0], Terms(3, most)
    for step, kind in enumerate(kinds):
        state, _ = after(after(state, AllJoined(), terms)[0], Broken(), terms)
        failure = Failure(kind, "something", micro_batch=8)
        state, _ = after(state, Apart((failure,), HostStatus(MEMBERS), step), terms)
        if isinstance(state, Over):
            assert kind == "error" or step == most
            return
    assert "error" not in kinds
    assert len(kinds) <= most
