"""The driver of a run on expert hosts, without Ray: start, end, losses and stuck hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import RayActorError

from harness.fakes.fake_hosts import MakeRun, fake_runs
from orchestrator.errors import UserError
from orchestrator.record.events import kinds
from orchestrator.record.files.event_log import EventLog
from orchestrator.runtime.expert_parallel.host_worker import SegmentResult
from orchestrator.runtime.expert_parallel.states import (
    Closing,
    Ended,
    Joining,
    Leaving,
    Running,
    WaitingForHosts,
)
from orchestrator.runtime.expert_parallel.stuck import HostHealth

CONNECTION_CLOSED = RuntimeError("gloo/ connection closed by peer")


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    return fake_runs(tmp_path, monkeypatch)


def test_a_run_from_the_first_segment_to_the_end(make_run: MakeRun) -> None:
    run = make_run()
    run.begin_first_segment()
    run.finish("run_segment", (None, 5))
    assert isinstance(run.state, Running)
    run.finish("run_segment", ("completed", 9))
    assert isinstance(run.state, Closing)
    run.finish("close", None, 0, 1, 2)
    result = run.poll()
    assert result is not None
    assert (result.status, result.failure) == ("completed", None)


# Start


def test_hosts_that_cannot_be_started_end_the_run(make_run: MakeRun) -> None:
    run = make_run(spares=1)
    run.pool.late = {0, 1, 2, 3}
    run.pool.last_error = OSError("of the test")
    run.poll()
    run.pool.excluded = {0}
    run.poll()
    assert not isinstance(run.state, Ended), "there is a spare"
    run.pool.excluded = {0, 1}
    run.poll()
    assert isinstance(run.state, Ended)
    assert "2 of 4 hosts could not be started: of the test" in str(run.state.given_up)


def test_hosts_that_do_not_start_in_time_end_the_run(make_run: MakeRun) -> None:
    run = make_run(resource_timeout=300)
    run.pool.late = {0}
    run.poll()
    run.clock.now += 301.0
    run.poll()
    assert isinstance(run.state, Ended)
    assert "3 CPUs for the hosts were not available within 300 s" in str(run.state.given_up)


def test_a_users_mistake_in_the_start_is_raised_as_it_is(make_run: MakeRun) -> None:
    run = make_run()
    run.pool.late = {0}
    run.pool.last_error = UserError("does not see the run folder")
    with pytest.raises(UserError, match="run folder"):
        run.poll()


def test_a_mistake_that_all_hosts_make_ends_the_run(make_run: MakeRun) -> None:
    run = make_run()
    run.poll()
    run.finish("join", UserError("no such data"))
    run.poll()
    assert isinstance(run.state, Ended)
    result = run.poll()
    assert result is not None
    assert isinstance(result.error, UserError)


# Losses


def test_a_lost_host_is_replaced_and_the_others_leave_and_join_again(make_run: MakeRun) -> None:
    run = make_run()
    run.begin_first_segment()
    run.snapshots.step = 5
    survivor = run.pool.actor(0)
    run.finish("run_segment", RayActorError(), 1)
    assert isinstance(run.state, Leaving)
    assert survivor.last_call("leave").arguments == (0,)
    run.finish("run_segment", CONNECTION_CLOSED, 0, 2)
    assert isinstance(run.state, WaitingForHosts), "a new host is being started"
    (failure,) = run.events("failure")
    message = "host 1 was lost; waiting for 1 host to take over"
    assert failure["message"] == message, "recorded at once, not when the host is ready"
    run.poll()
    assert isinstance(run.state, Joining)
    assert run.state.generation == 1
    assert run.pool.actor(0) is survivor, "a survivor keeps its process"
    assert run.pool.actor(1).last_call("join").arguments[3].snapshots
    (failure,) = run.events("failure")
    assert (failure["rank"], failure["step"]) == (1, 7)


def test_all_hosts_that_died_are_named(make_run: MakeRun) -> None:
    run = make_run(hosts=4)
    run.begin_first_segment()
    for host_id in (3, 0, 1):
        run.pool.actor(host_id).finish("run_segment", RayActorError())
    run.poll()
    run.finish("run_segment", CONNECTION_CLOSED, 2)
    (failure,) = run.events("failure")
    assert failure["message"] == "hosts 0, 1 and 3 were lost; waiting for 3 hosts to take over"
    assert failure["rank"] == 0


def test_a_host_whose_device_failed_is_lost(make_run: MakeRun) -> None:
    run = make_run()
    run.begin_first_segment()
    run.finish("run_segment", RuntimeError("CUDA error: misaligned address"), 1)
    run.finish("run_segment", CONNECTION_CLOSED, 0, 2)
    (failure,) = run.events("failure")
    assert failure["message"].startswith("host 1 lost its device: CUDA error: misaligned address")


def test_the_recovery_says_how_the_run_went_on(make_run: MakeRun) -> None:
    """The failure is recorded once; if the awaited host does not come, the recovery has the other
    reason."""
    run = make_run()
    run.begin_first_segment()
    run.finish("run_segment", RayActorError(), 1)
    run.pool.late = {1}
    run.finish("run_segment", CONNECTION_CLOSED, 0, 2)
    run.clock.now += 10_000.0
    run.poll()
    assert isinstance(run.state, Joining)
    run.finish("join")
    run.finish("run_segment", (None, 8))
    run.finish("run_segment", (None, 99))
    assert len(run.events("failure")) == 1
    (recovery,) = run.events("recovery")
    assert recovery["reason"] == "host 1 was lost; continuing on 2 of 3 hosts with the same global batch"
    assert recovery["detect_seconds"] == pytest.approx(0.25, abs=0.05), "since its last heartbeat"


def test_expert_groups_are_chosen_anew_for_the_hosts_that_are_left(make_run: MakeRun) -> None:
    run = make_run(hosts=4, expert_replicas=2)
    run.begin_first_segment()
    run.finish("run_segment", RayActorError(), 1)
    run.pool.late = {1}
    run.finish("run_segment", CONNECTION_CLOSED, 0, 2, 3)
    run.clock.now += 10_000.0
    run.poll()
    run.finish("join")
    run.finish("run_segment", (None, 8))
    run.finish("run_segment", (None, 99))
    (recovery,) = run.events("recovery")
    assert (recovery["workers_before"], recovery["workers"]) == (4, 3)
    assert (recovery["expert_replicas_before"], recovery["expert_replicas"]) == (2, 1)
    groups = "with the experts in 1 group instead of 2: 2 groups of equal size cannot be made of 3 hosts"
    assert groups in recovery["reason"]


def test_a_host_that_dies_after_its_last_call_returned_is_missed(make_run: MakeRun) -> None:
    run = make_run()
    run.begin_first_segment()
    run.pool.actor(2).finish("run_segment", SegmentResult(None, 5))
    run.snapshots.dead_hosts = {2}
    run.poll()
    assert isinstance(run.state, Leaving)


@pytest.mark.parametrize("dying", [0, 2])
def test_a_run_that_the_main_host_has_ended_is_over_though_a_host_dies(make_run: MakeRun, dying: int) -> None:
    """The main host itself, or another one that has not returned yet."""
    run = make_run()
    run.begin_first_segment()
    run.finish("run_segment", ("completed", 9), 0)
    assert isinstance(run.state, Running), "the others may finish"
    if dying == 0:
        run.snapshots.dead_hosts = {0}
        run.poll()
    else:
        run.finish("run_segment", RayActorError(), 2)
    assert isinstance(run.state, Closing)
    for host_id in {0, 1, 2} - {dying}:
        run.pool.actor(host_id).last_call("close").finish()
    run.poll()
    result = run.poll()
    assert result is not None
    assert result.status == "completed"
    assert run.events("failure") == []


def test_a_host_that_does_not_close_is_not_waited_for(make_run: MakeRun) -> None:
    run = make_run(collective_timeout=10)
    run.begin_first_segment()
    run.finish("run_segment", ("completed", 9))
    run.finish("close", None, 0, 1)
    assert isinstance(run.state, Closing)
    run.clock.now += 61.0
    run.poll()
    assert isinstance(run.state, Ended)


def test_the_loss_of_all_hosts_is_waited_out_as_long_as_resources_may_take(make_run: MakeRun) -> None:
    run = make_run(resource_timeout=300)
    run.begin_first_segment()
    run.pool.late = {0, 1, 2}
    run.finish("run_segment", RayActorError())
    run.poll()
    assert isinstance(run.state, WaitingForHosts)
    run.clock.now += 200.0
    run.poll()
    assert isinstance(run.state, WaitingForHosts)
    run.clock.now += 101.0
    run.poll()
    assert isinstance(run.state, Ended)
    assert "no host is left" in str(run.state.given_up)


@pytest.mark.parametrize(
    ("settings", "state"),
    [({}, Joining), ({"deterministic": True}, WaitingForHosts), ({"reproducible": True}, Joining)],
    ids=["rounded", "deterministic", "reproducible"],
)
def test_a_deterministic_run_waits_for_a_late_host(
    make_run: MakeRun, settings: dict[str, bool], state: type
) -> None:
    """A reproducible one has the same bits on fewer hosts, and goes on."""
    run = make_run(**settings)
    run.begin_first_segment()
    run.pool.late = {1}
    run.finish("run_segment", RayActorError(), 1)
    run.finish("run_segment", CONNECTION_CLOSED, 0, 2)
    assert isinstance(run.state, WaitingForHosts)
    run.clock.now += 21.0
    run.poll()
    assert isinstance(run.state, state)


@pytest.mark.parametrize(("checkpoint_step", "is_newer"), [(4, False), (5, False), (6, True)])
def test_hosts_get_the_snapshots_even_if_a_checkpoint_is_newer(
    make_run: MakeRun, checkpoint_step: int, is_newer: bool
) -> None:
    """They are told that it is newer, and take the snapshots if it is damaged."""
    run = make_run()
    run.begin_first_segment()
    run.snapshots.step = 5
    (run.run_dir / "checkpoints" / f"step_0000000{checkpoint_step}").mkdir(parents=True)
    run.finish("run_segment", RayActorError(), 1)
    run.finish("run_segment", CONNECTION_CLOSED, 0, 2)
    run.poll()
    for host_id in range(3):
        request = run.pool.actor(host_id).last_call("join").arguments[3]
        assert request.snapshots
        assert request.checkpoint_is_newer == is_newer
    assert not run.snapshots.cleared


def test_the_newest_checkpoint_is_the_one_on_disk(make_run: MakeRun) -> None:
    """An event about a checkpoint proves nothing: it may be gone."""
    run = make_run()
    log = EventLog(run.run_dir / "events.jsonl")
    log.write(kinds.Checkpoint(step=500, path="checkpoints/step_00000500"))
    log.write(kinds.Checkpoint(step=100, path="checkpoints/step_00000100"))
    log.write(kinds.Checkpoint(path="checkpoints/step_00000100"))
    (run.run_dir / "checkpoints" / "step_00000100").mkdir(parents=True)
    assert run.run._checkpoint_step() == 100


# Stuck hosts


def stuck(host_id: int, waiting: bool = False, silent_s: float = 0.0) -> HostHealth:
    return HostHealth(host_id, "step", waiting, silent_s, 1000.0)


def test_a_frozen_host_is_killed_at_once(make_run: MakeRun) -> None:
    run = make_run(collective_timeout=10)
    run.begin_first_segment()
    run.heartbeats.hosts = [stuck(0, waiting=True), stuck(1, silent_s=11.0), stuck(2, waiting=True)]
    run.poll()
    assert isinstance(run.state, Leaving)
    assert run.pool.killed_frozen == [1]


def test_a_host_that_freezes_in_a_wait_is_killed_at_its_limit_of_silence(make_run: MakeRun) -> None:
    """The limit is shorter than that of a step. Between the two, the hosts were taken for deadlocked."""
    run = make_run(collective_timeout=10)
    run.begin_first_segment()
    frozen = HostHealth(1, "step", waiting=True, silent_s=9.7, unchanged_s=9.7)
    run.heartbeats.hosts = [
        HostHealth(0, "step", True, 0.1, 5.0),
        frozen,
        HostHealth(2, "step", True, 0.1, 5.0),
    ]
    run.poll()
    assert run.pool.killed_frozen == [1]


def test_hosts_that_wait_for_each_other_leave_and_are_killed_only_if_they_do_not(make_run: MakeRun) -> None:
    run = make_run(collective_timeout=10)
    run.begin_first_segment()
    run.heartbeats.hosts = [stuck(host_id, waiting=True) for host_id in range(3)]
    run.poll()
    assert isinstance(run.state, Leaving)
    assert run.pool.killed_frozen == [], "none is known to have failed"
    run.poll()
    assert run.pool.killed_frozen == [0, 1, 2]


def test_a_host_that_freezes_in_a_wait_does_not_cost_the_others(make_run: MakeRun) -> None:
    """Its limit of silence may be longer than the limit of their waits, where silences were seen."""
    run = make_run(collective_timeout=10)
    run.begin_first_segment()
    frozen = HostHealth(1, "step", True, 12.0, 12.0, longest_silence_s=5.0)
    run.heartbeats.hosts = [stuck(0, waiting=True), frozen, stuck(2, waiting=True)]
    run.poll()
    assert run.pool.killed_frozen == [1]


def test_a_host_that_freezes_before_its_snapshot_arrives_is_found(make_run: MakeRun) -> None:
    run = make_run(collective_timeout=10)
    run.begin_first_segment()
    run.run._state = Running(0, (0, 1, 2), snapshot_at_end=True)
    run.snapshots.expected_steps = {5}
    for step in (3, 4):
        run.finish("run_segment", (None, step))
    run.finish("run_segment", (None, 5))
    assert isinstance(run.state, Running)
    run.heartbeats.hosts = [stuck(0, silent_s=11.0)]
    run.poll()
    assert isinstance(run.state, Leaving)
