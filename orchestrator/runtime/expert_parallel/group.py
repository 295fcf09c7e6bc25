"""The current group of hosts: its calls, heartbeats and snapshots."""

from __future__ import annotations

from time import sleep
from typing import Any

import ray

from orchestrator.runtime.expert_parallel.calls import GroupCalls
from orchestrator.runtime.expert_parallel.heartbeats import Heartbeats
from orchestrator.runtime.expert_parallel.host_pool import HostPool
from orchestrator.runtime.expert_parallel.host_worker import JoinRequest, Segment, host_worker
from orchestrator.runtime.expert_parallel.snapshot_references import SnapshotReferences, references_for
from orchestrator.runtime.expert_parallel.snapshot_store import SnapshotStore
from orchestrator.runtime.expert_parallel.states import JoinGroup
from orchestrator.runtime.expert_parallel.stuck import HostHealth, find_stuck, silence_limit_s
from orchestrator.runtime.failures import HostsDeadlocked

_PAUSE_S = 0.02


class HostGroup:
    """One group of hosts after the other: each generation takes the place of the one before."""

    def __init__(
        self,
        pool: HostPool,
        heartbeats: Heartbeats,
        store_address: tuple[str, int],
        assignment: Any,
        step_limit_s: float,
        snapshots: SnapshotStore,
    ) -> None:
        """``assignment`` is an object reference."""
        self._pool = pool
        self._store_address = store_address
        self._assignment = assignment
        self._step_limit_s = step_limit_s
        self.calls = GroupCalls(pool)
        self.heartbeats = heartbeats
        self.snapshots = snapshots

    def join(
        self, command: JoinGroup, snapshots: tuple[SnapshotReferences, ...], checkpoint_is_newer: bool
    ) -> None:
        """Make hosts the members of a new generation.

        They resume from ``snapshots``, if any, or from a newer checkpoint that is good."""
        self.calls.set_members(command.members)
        self.heartbeats.follow(command.generation, command.members)
        size = len(command.members)

        def call_join(actor: Any, host_id: int, rank: int) -> Any:
            request = JoinRequest(
                command.generation,
                host_id,
                rank,
                size,
                self._store_address,
                resumed=command.generation > 0,
                halvings=command.halvings,
                snapshots=references_for(snapshots, rank, size, command.generation),
                checkpoint_is_newer=checkpoint_is_newer,
            )
            return actor.join.remote(host_worker, command.generation, self._assignment, request)

        self.calls.call_all(call_join)
        self.snapshots.follow(command.generation, command.members)

    def grant_segment(self, segment: Segment) -> None:
        """Let the members run a segment, after those that they were granted before."""
        self.calls.queue_all(lambda actor, *_: actor.run_segment.remote(segment))

    def leave(self, generation: int) -> None:
        """Make all members leave the group, wherever they wait for each other."""
        for host_id in self.calls.members:
            if host_id not in self.calls.lost:
                self._pool.actor(host_id).leave.remote(generation)

    def close(self) -> None:
        self.calls.call_all(lambda actor, *_: actor.close.remote())

    def poll(self, timeout_s: float, *, leaving: bool, closing: bool) -> None:
        """Wait for a call, take in what has arrived, and drop members that died or are stuck.

        ``leaving``: the members were told to leave. ``closing``: the run has finished, and no one
        is dropped."""
        calls = self.calls
        pending = [*calls.pending, *self.snapshots.pending_calls(all_hosts=not calls.pending)]
        if pending:
            ray.wait(pending, num_returns=1, timeout=timeout_s)
        else:
            sleep(min(timeout_s, _PAUSE_S))  # backups of snapshots are under way between nodes
        self.snapshots.collect()
        calls.collect()
        # A host that died after its last call returned shows by the call for its next snapshot.
        for host_id in self.snapshots.dead_hosts - calls.lost.keys():
            calls.drop(host_id, "died", "was lost")
        if self.heartbeats.read() and not closing:
            self._drop_stuck_hosts(leaving)

    def _drop_stuck_hosts(self, leaving: bool) -> None:
        """Drop members whose heartbeats have shown no progress for too long."""
        calls = self.calls
        # If all calls have returned, the driver waits for the snapshots of all members.
        expected = set(calls.pending.values()) or set(calls.members) - calls.lost.keys()
        health = [host for host in self.heartbeats.health() if host.host_id in expected]
        # Members that have left wait for those that have not.
        stuck = find_stuck(health, self._step_limit_s, waited_for=leaving)
        if stuck and not leaving and all(host.waiting for host in stuck):
            limit_s = self._step_limit_s
            silent = tuple(
                host for host in stuck if host.silent_s >= min(limit_s, silence_limit_s(host, limit_s))
            )
            if not silent:
                # They wait for each other, and none is known to have failed: all leave and join
                # again. A host that does not leave is dropped then.
                calls.errors[stuck[0].host_id] = HostsDeadlocked("all hosts wait for each other")
                return
            stuck = silent  # the others wait for these
        for host in stuck:
            calls.drop(host.host_id, "stuck", _describe(host), frozen=True)


def _describe(host: HostHealth) -> str:
    """Return why a host counts as stuck, for the failure's message."""
    if host.silent_s >= 0.9 * host.unchanged_s:
        return f"was stuck: it sent no heartbeat for {host.silent_s:.1f} s (in phase: {host.phase})"
    return f"was stuck: it made no progress for {host.unchanged_s:.1f} s (in phase: {host.phase})"
