"""An expert host's part of a run: its segments, and its connections to the driver's store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from experts.hosts.actor_host import HostContext, Outbox
from experts.hosts.membership import GroupMembership
from orchestrator.runtime.expert_parallel.host_worker import (
    HostWorker,
    JoinRequest,
    Segment,
    _reusing_client,
    _sender,
)
from orchestrator.train.group.stores import unseal


def broken(*_: Any) -> bool:
    raise RuntimeError("connection reset by peer")


@pytest.mark.parametrize(
    ("connecting", "check", "reused"),
    [(False, lambda keys: False, True), (True, lambda keys: False, False), (False, broken, False)],
    ids=["idle", "busy", "broken"],
)
def test_a_client_that_is_busy_or_broken_is_not_used_again(
    connecting: bool, check: Any, reused: bool
) -> None:
    store = SimpleNamespace(check=check)
    context = HostContext(GroupMembership(), Outbox(), {"store": store})
    factory: Any = SimpleNamespace(connecting=connecting, store=store)
    with _reusing_client(context, factory):
        pass
    assert ("store" in context.cache) == reused


def test_a_heartbeat_is_written_under_the_key_of_its_generation_and_host() -> None:
    written: dict[str, str] = {}
    store = SimpleNamespace(set=written.__setitem__)
    context = HostContext(GroupMembership(), Outbox(), {"heartbeat store": store})
    send = _sender(context, store, JoinRequest(3, 7, 0, 2, ("127.0.0.1", 1)), "a secret")
    send("1 text")
    assert written.keys() == {"beat/3/7"}
    assert unseal(written["beat/3/7"].encode(), "beat/3/7", "a secret") == "1 text"
    assert "heartbeat store" in context.cache


def test_a_broken_heartbeat_connection_is_not_used_again() -> None:
    store = SimpleNamespace(set=broken)
    context = HostContext(GroupMembership(), Outbox(), {"heartbeat store": store})
    send = _sender(context, store, JoinRequest(3, 7, 0, 2, ("127.0.0.1", 1)), "a secret")
    with pytest.raises(RuntimeError, match="connection reset"):
        send("1 text")
    assert context.cache == {}


def test_a_segment_granted_beyond_the_end_of_the_run_reports_the_end_again() -> None:
    progress = SimpleNamespace(step=0)

    def run_steps(steps: int, take_snapshot: bool) -> Any:
        assert progress.step < 5, "the run has ended"
        progress.step = min(5, progress.step + steps)
        return SimpleNamespace(status="completed") if progress.step == 5 else None

    intervals: list[int] = []
    loop = SimpleNamespace(progress=progress, set_snapshot_interval=intervals.append)
    run: Any = SimpleNamespace(run_steps=run_steps, loop=loop, prepared=SimpleNamespace(hidden=()))
    worker = HostWorker(run)
    results = [worker.run_segment(Segment(3, snapshot_every=every)) for every in (7, 8, 9, 10)]
    assert [result.step for result in results] == [3, 5, 5, 5]
    assert [result.status for result in results] == [None, *["completed"] * 3]
    assert intervals == [7, 8], "each segment sets the interval of the snapshots"
