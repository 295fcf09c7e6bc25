"""Snapshots of the hosts' state, fetched while the hosts train.

The driver owns the snapshots; their bytes stay in the memory of the node where they were taken.
With several nodes, a host on another node keeps a backup. A snapshot set is complete when the
snapshots of all hosts for a step are there and their backups are confirmed. Only then is the
previous set dropped, so that there always is a complete one, and only then does the next set begin to
come in: there are two at most, however slow the transfers are. Hosts that are ahead wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import time
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from orchestrator.runtime.expert_parallel.host_pool import HostPool, is_node_alive
from orchestrator.runtime.expert_parallel.segments import SnapshotCost
from orchestrator.runtime.expert_parallel.snapshot_references import SnapshotReferences
from orchestrator.runtime.failures import cause_of
from orchestrator.types import first_line


@dataclass
class _SnapshotSet:
    """The snapshots of all hosts at one step. The dictionaries are by rank."""

    generation: int
    size: int
    references: dict[int, SnapshotReferences] = field(default_factory=dict)
    node_ids: dict[int, str | None] = field(default_factory=dict)
    backup_hosts: dict[int, int] = field(default_factory=dict)
    """The host that keeps a backup."""
    backup_actors: dict[int, Any] = field(default_factory=dict)
    """Its process: one that has taken its place since has no backups."""
    backup_calls: dict[int, Any] = field(default_factory=dict)
    """The call that returns when the backup is stored."""
    lost: bool = False
    """Whether a snapshot was lost before its backup was stored: the set can never become complete."""


@dataclass(frozen=True)
class _Fetch:
    """A call for a host's next snapshot."""

    host_id: int
    own: Any
    dense: Any
    actor: Any


class SnapshotStore:
    """The newest complete snapshot set, and the sets that are coming in."""

    def __init__(self, pool: HostPool, warn: Callable[[str], None], backups: bool = True) -> None:
        """``backups``: whether hosts of other nodes keep copies, if there is more than one node."""
        self._pool = pool
        self._warn = warn
        self._backups = backups
        self._costs: list[SnapshotCost] = []
        self._generation = -1
        self._members: tuple[int, ...] = ()
        self.dead_hosts: set[int] = set()
        """Members whose fetch failed: their processes are dead."""
        self._fetches: dict[Any, _Fetch] = {}
        """By the reference to the header."""
        self._incoming: dict[int, _SnapshotSet] = {}
        """By step."""
        self._dropped_steps = set[int]()
        self._complete: tuple[int, _SnapshotSet] | None = None

    @property
    def step(self) -> int:
        """The step of the newest complete set; -1 if there is none."""
        return self._complete[0] if self._complete is not None else -1

    def pending_calls(self, all_hosts: bool) -> list[Any]:
        """Return the calls to wait for.

        Usually that of the main host is enough: the other hosts take their snapshots at the same
        step. Waking the driver for each would take time from hosts on the same machine."""
        main = self._members[:1]
        of_main = [header for header, fetch in self._fetches.items() if fetch.host_id in main]
        # Without one, the main host's snapshot has come in, and those of the others are on their way.
        return list(self._fetches) if all_hosts else of_main or list(self._fetches)

    def follow(self, generation: int, members: tuple[int, ...]) -> None:
        """Fetch the snapshots of a new group from now on."""
        self._generation = generation
        self._members = members
        self._incoming = {}
        self.dead_hosts = set()
        self._dropped_steps = set()
        self._fetch_next()

    def clear(self) -> None:
        """Drop all snapshots."""
        self._complete = None
        self._incoming = {}

    def _actor(self, host_id: int) -> Any:
        with suppress(KeyError):
            return self._pool.actor(host_id)

    def _fetch_next(self) -> None:
        """Fetch the next snapshot of each member, unless its last one waits for its set to be complete.

        A host keeps one snapshot in its mailbox meanwhile, and waits with the one after it."""
        # The call to a survivor of the last group is still open: it returns the next snapshot.
        fetched = {
            fetch.host_id for fetch in self._fetches.values() if fetch.actor is self._actor(fetch.host_id)
        }
        incoming = {self._members[rank] for one_set in self._incoming.values() for rank in one_set.references}
        for host_id in self._members:
            actor = self._actor(host_id)
            if actor is None or host_id in fetched | incoming | self.dead_hosts:
                continue
            header, own, dense = actor.next_snapshot.remote()
            self._fetches[header] = _Fetch(host_id, own, dense, actor)

    def collect(self) -> None:
        """Take in the snapshots that have arrived."""
        done: list[Any] = []
        if self._fetches:
            done, _ = ray.wait(list(self._fetches), num_returns=len(self._fetches), timeout=0)
        for reference in done:
            fetch = self._fetches.pop(reference)
            is_current = fetch.actor is self._actor(fetch.host_id)
            try:
                header: Any = ray.get(reference)
            except RayError:
                if is_current and fetch.host_id in self._members:
                    self.dead_hosts.add(fetch.host_id)
                continue
            # A host may have put a snapshot before it left the last group. Its step may occur in
            # this generation too, with other contents.
            if header.generation == self._generation and header.step not in self._dropped_steps:
                self._add(fetch.host_id, SnapshotReferences(header, fetch.own, fetch.dense))
        self._update_complete()
        self._fetch_next()

    def _add(self, host_id: int, references: SnapshotReferences) -> None:
        header = references.header
        incoming = self._incoming.setdefault(header.step, _SnapshotSet(header.generation, header.size))
        node_id = self._pool.node_id(host_id)
        incoming.references[header.rank] = references
        incoming.node_ids[header.rank] = node_id
        elsewhere = [host for host in self._members if self._pool.node_id(host) not in (None, node_id)]
        if elsewhere and self._backups:
            # The backups are spread over the hosts of the other nodes.
            backup_host = elsewhere[header.rank % len(elsewhere)]
            # With the generation: a step can occur in several, with other ranks and contents.
            key = header.generation, header.rank, header.step
            actor = self._pool.actor(backup_host)
            complete = (self._complete[1].generation, self.step) if self._complete is not None else None
            call = actor.store_backup.remote(key, references.own, references.dense, complete)
            incoming.backup_hosts[header.rank] = backup_host
            incoming.backup_actors[header.rank] = actor
            incoming.backup_calls[header.rank] = call

    def _update_complete(self) -> None:
        """Let the newest complete set replace all earlier ones; drop sets that are lost."""
        for step in sorted(self._incoming, reverse=True):
            incoming = self._incoming[step]
            if len(incoming.references) == incoming.size and self._is_backed_up(incoming):
                self._complete = step, incoming
                self._costs.append(_cost(incoming))
                self._incoming = {later: other for later, other in self._incoming.items() if later > step}
                return
        self._dropped_steps |= {step for step, incoming in self._incoming.items() if incoming.lost}
        self._incoming = {step: incoming for step, incoming in self._incoming.items() if not incoming.lost}

    def take_costs(self) -> list[SnapshotCost]:
        """Return the costs of the sets that have become complete since the last call."""
        costs = self._costs
        self._costs = []
        return costs

    def expects(self, step: int) -> bool:
        """Return whether the set of a step may still become complete."""
        return self.step < step and step not in self._dropped_steps

    def _is_backed_up(self, incoming: _SnapshotSet) -> bool:
        """Return whether no backup is under way any more.

        A backup that failed because its host died or has no memory is forgone: the snapshot itself
        still exists, and the set survives that one loss. A backup that failed because the snapshot
        is lost makes the set lost."""
        for rank, call in list(incoming.backup_calls.items()):
            if not ray.wait([call], timeout=0)[0]:
                return False
            try:
                ray.get(call)
            except RayError as error:
                cause = cause_of(error)
                if isinstance(cause, ObjectLostError):
                    incoming.lost = True
                    return False
                incoming.backup_hosts.pop(rank)
                incoming.backup_calls.pop(rank)
                # The death of a host is reported as a failure, so it needs no warning here.
                if not isinstance(cause, RayActorError):
                    self._warn(
                        f"the backup of host {rank}'s snapshot on another node failed: {first_line(cause)}"
                    )
        return True

    def references(self) -> tuple[SnapshotReferences, ...]:
        """Return the newest complete set, by rank; empty if a snapshot is lost.

        Snapshots on a node that is gone come from their backups."""
        if self._complete is None:
            return ()
        step, complete = self._complete
        node_ids = {node_id for node_id in complete.node_ids.values() if node_id is not None}
        dead_nodes = {node_id for node_id in node_ids if not is_node_alive(node_id)}
        found: list[SnapshotReferences] = []
        for rank, references in sorted(complete.references.items()):
            if complete.node_ids[rank] not in dead_nodes:
                found.append(references)
                continue
            backup_host = self._actor(complete.backup_hosts.get(rank, -1))
            if backup_host is not complete.backup_actors.get(rank) or backup_host is None:
                return ()
            own, dense = backup_host.load_backup.remote((complete.generation, rank, step))
            found.append(SnapshotReferences(references.header, own, dense))
        return tuple(found)


def _cost(complete: _SnapshotSet) -> SnapshotCost:
    """Return the cost of a set that has just become complete.

    Clocks of nodes differ a little. A transfer that seems too short shows in the stall of the next
    snapshot, which waits for it."""
    headers = [references.header for references in complete.references.values()]
    taken_at = max(header.taken_at for header in headers)
    return SnapshotCost(max(header.stall_s for header in headers), max(0.0, time() - taken_at))
