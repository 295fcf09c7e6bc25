"""The pool of hosts: devices that are reserved together, with one actor on each.

A host id names a reserved device. Its actor trains, stands by, or is being started; when it is
lost, a new actor is started under the same id, on another device if its node is lost too."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from experts.hosts.actor_host import ExpertHost
from orchestrator.runtime.cluster.environment import priority_variables
from orchestrator.runtime.cluster.session import answers
from orchestrator.runtime.expert_parallel.host_worker import preload, prestart_successor, rehearse
from orchestrator.runtime.failures import cause_of
from orchestrator.types import first_line

_MAX_FAILED_STARTS = 3
"""Failed starts in a row after which a host id is excluded."""
_RETRY_SECONDS = 600.0
"""Time after which an excluded host id is tried again."""
_CHECK_SECONDS = 1.0
"""Between two checks of the nodes of reserved devices."""
_DIVIDE_SECONDS = 10.0
"""In which devices that were given back are reserved again."""
_SPREAD_SECONDS = 3.0
"""In which a device on a node without other hosts is looked for."""
_NODE_LABEL = "ray.io/node-id"


@dataclass
class _Host:
    """An actor, with the calls that tell when it is ready and when it dies."""

    actor: Any
    warm_up: Any
    lifetime: Any
    node_id: str | None = None
    """Set once the host is ready."""
    pid: int = 0
    has_rehearsed: bool = False


@dataclass
class _FailedStarts:
    """Starts of a host that failed in a row."""

    count: int
    error: BaseException
    last_at: float


class HostPool:
    """The hosts of a run, by host id.

    A host is ready once it has loaded what it needs to join a group."""

    def __init__(
        self,
        size: int,
        gpu: bool,
        assignment: Any,
        store_address: tuple[str, int],
        variables: Mapping[str, str],
        warn: Callable[[str], None],
    ) -> None:
        """``assignment`` is an object reference; ``store_address`` is that of the driver's store.

        ``variables`` are environment variables of the hosts. They say what a process imports as it
        starts; with them, each node keeps a process ready for the next host. ``warn`` is called with
        the reason when a host is given up for some time."""
        self.size = size
        self._gpu = gpu
        self._assignment = assignment
        self._store_address = store_address
        self._variables = dict(variables)
        self._warn = warn
        self._bundle = {"GPU": 1.0} if gpu else {"CPU": 1.0}
        self._gang: PlacementGroup | None = self._reserve_all()
        """Reserves all devices at once, before each has a reservation of its own."""
        self._reservations: dict[int, PlacementGroup] = {}
        self._reserved_nodes: dict[int, str] = {}
        """The nodes of the devices that Ray has reserved."""
        self._spread_since: dict[int, float] = {}
        """When a device on a node without other hosts was first asked for."""
        self._checked_at = 0.0
        self._hosts: dict[int, _Host] = {}
        self._node_ids: dict[int, str] = {}
        """The node of each host, also of the last one under an id whose host is lost."""
        self._failed_starts: dict[int, _FailedStarts] = {}
        self._failed_joins = Counter[int]()
        """How often in a row the hosts of an id were lost while they joined a group."""
        self._prestarted_nodes = set[str]()
        self._awaited = set[int]()
        """Ids without a host, whose device is not reserved yet."""

    def reserve(self, timeout_s: float) -> bool:
        """Return whether the devices are reserved; once they are, start the hosts."""
        if self._gang is not None and self._gang.wait(timeout_s):
            self._gang = None if self._divide(self._gang) else self._reserve_all()
            if self._gang is None:
                for host_id in range(self.size):
                    self.start(host_id)
        return self._gang is None

    def _reserve_all(self) -> PlacementGroup:
        """Reserve all devices at once: of two runs that wait for devices, none holds a part of them."""
        return placement_group([self._bundle] * self.size, strategy="PACK" if self._gpu else "SPREAD")

    def _divide(self, gang: PlacementGroup) -> bool:
        """Replace the reservation of all devices by one for each, on the same nodes.

        Ray's control store tries without a pause to move the part of a reservation that was on a lost node
        (ray-project/ray#65007): on a loaded machine it answers nobody for minutes, nodes that join included.
        A device that is reserved by itself can be given back. Return False, with all given back, if another
        program has taken a device meanwhile."""
        node_of = placement_group_table(gang)["bundles_to_node_id"]
        remove_placement_group(gang)
        for host_id in range(self.size):
            self._reservations[host_id] = self._reserve_one(node_of[host_id])
        end = monotonic() + _DIVIDE_SECONDS
        if all(each.wait(max(0.0, end - monotonic())) for each in self._reservations.values()):
            return True
        for host_id in range(self.size):
            self._give_back(host_id)
        return False

    def _reserve_one(self, nodes: str | None = None) -> PlacementGroup:
        """Reserve a device, on nodes that a label selector names."""
        selector = None if nodes is None else [{_NODE_LABEL: nodes}]
        return placement_group([self._bundle], bundle_label_selector=selector)

    def start(self, host_id: int) -> None:
        """Start a new host under an id, in place of the one before, as soon as its device is reserved.

        A device on a lost node is given back, and another one is reserved."""
        self.stop(host_id)
        self._awaited.add(host_id)
        # Where Ray does not answer, the next check tries again.
        with suppress(RayError, ConnectionError, TimeoutError):
            if self._is_reserved(host_id):
                self._create(host_id)
                self._awaited.discard(host_id)

    def _is_reserved(self, host_id: int) -> bool:
        """Return whether the device of a host is reserved, on a live node. If there is none, look for one."""
        node_id = self._reserved_nodes.get(host_id)
        if node_id is not None and is_node_alive(node_id):
            return True
        state = self._reservation_state(host_id)
        if node_id is not None or state == "RESCHEDULING" or self._is_spread_too_long(host_id):
            self._give_back(host_id)
        if host_id not in self._reservations:
            self._reservations[host_id] = self._reserve_another(host_id)
        return host_id in self._reserved_nodes

    def _reservation_state(self, host_id: int) -> str | None:
        """Return the state of a reservation, and keep its node once there is one."""
        reservation = self._reservations.get(host_id)
        if reservation is None:
            return None
        entry = placement_group_table(reservation)
        if entry["state"] == "CREATED":
            self._reserved_nodes[host_id] = entry["bundles_to_node_id"][0]
            self._spread_since.pop(host_id, None)
        return entry["state"]

    def _reserve_another(self, host_id: int) -> PlacementGroup:
        """Reserve another device: on a CPU first on nodes without other hosts, then on any.

        Snapshots of a host are backed up on another node than its own."""
        others = {node for other, node in self._reserved_nodes.items() if other != host_id}
        if self._gpu or not others or self._spread_since.pop(host_id, None) is not None:
            return self._reserve_one()
        self._spread_since[host_id] = monotonic()
        return self._reserve_one(f"!in({','.join(sorted(others))})")

    def _is_spread_too_long(self, host_id: int) -> bool:
        since = self._spread_since.get(host_id)
        return since is not None and monotonic() - since > _SPREAD_SECONDS

    def _give_back(self, host_id: int) -> None:
        reservation = self._reservations.get(host_id)
        if reservation is not None:
            remove_placement_group(reservation)
        self._reservations.pop(host_id, None)
        self._reserved_nodes.pop(host_id, None)

    def _check_reservations(self) -> None:
        """Start hosts whose devices are reserved now, and give back those that Ray knows to be lost."""
        if monotonic() - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = monotonic()
        with suppress(RayError, ConnectionError, TimeoutError):
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            for host_id, node_id in list(self._reserved_nodes.items()):
                if node_id in alive:
                    continue
                self._give_back(host_id)
                if host_id in self._hosts and self._hosts[host_id].node_id is None:
                    self.start(host_id)
        for host_id in list(self._awaited):
            self.start(host_id)

    def _create(self, host_id: int) -> None:
        # The new host uses up the process that its node kept ready.
        self._prestarted_nodes.discard(self._reserved_nodes.get(host_id, ""))
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._reservations[host_id], placement_group_bundle_index=0
        )
        actor = ExpertHost.options(  # pyrefly: ignore[missing-attribute]
            num_cpus=0 if self._gpu else 1,
            num_gpus=1 if self._gpu else 0,
            scheduling_strategy=strategy,
            max_restarts=0,
            runtime_env={"env_vars": {**priority_variables(), **self._variables}},
        ).remote()
        warm_up = actor.warm_up.remote(preload, self._assignment, self._store_address)
        self._hosts[host_id] = _Host(actor, warm_up, actor.block_until_death.remote())

    def stop(self, host_id: int, frozen: bool = False) -> None:
        """End the host of an id.

        ``frozen``: send SIGKILL first. Ray asks a process to exit and waits; a frozen one may wake
        up meanwhile and go on as if nothing had happened."""
        self._awaited.discard(host_id)
        host = self._hosts.pop(host_id, None)
        if host is None:
            return
        if frozen and host.node_id is not None:
            strategy = NodeAffinitySchedulingStrategy(host.node_id, soft=False)
            with suppress(Exception):
                _kill.options(scheduling_strategy=strategy).remote(host.pid)
        with suppress(Exception):
            ray.kill(host.actor)

    def actor(self, host_id: int) -> Any:
        return self._hosts[host_id].actor

    def node_id(self, host_id: int) -> str | None:
        """Return the node of a host, or of the last one under that id; None before the first."""
        return self._node_ids.get(host_id)

    def poll(self, busy: Iterable[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the hosts that are ready, and those that are being started.

        A host that died while it started or stood by is started again, a few times. ``busy`` hosts
        train. They are not checked: their calls show whether they live. While there are any, the others
        stand by, and have time to rehearse."""
        for host_id, host in list(self._hosts.items()):
            if host_id not in busy:
                self._check(host_id, host)
        self._check_reservations()
        for host_id, failed in list(self._failed_starts.items()):
            if host_id not in self._hosts and monotonic() - failed.last_at > _RETRY_SECONDS:
                self._failed_starts.pop(host_id)
                self.start(host_id)
        ready = tuple(host_id for host_id, host in sorted(self._hosts.items()) if host.node_id is not None)
        starting = tuple(sorted({*self._hosts, *self._awaited}.difference(ready)))
        if busy:
            for host_id in set(ready).difference(busy):
                self._rehearse(self._hosts[host_id])
        return ready, starting

    def _rehearse(self, host: _Host) -> None:
        """Let a standby prepare its first step, once. A host that joins meanwhile ends it first."""
        if self._gpu and not host.has_rehearsed:
            host.has_rehearsed = True
            host.actor.warm_up.remote(rehearse, self._assignment)

    def _check(self, host_id: int, host: _Host) -> None:
        call = host.warm_up if host.node_id is None else host.lifetime
        if not ray.wait([call], timeout=0)[0]:
            return
        try:
            node_id, host.pid = ray.get(call)
        except RayError as error:
            self._restart(host_id, error)
            return
        host.node_id = str(node_id)
        self._node_ids[host_id] = host.node_id
        self._failed_starts.pop(host_id, None)
        if self._variables and host.node_id not in self._prestarted_nodes:
            self._prestarted_nodes.add(host.node_id)
            host.actor.warm_up.remote(prestart_successor)

    def _restart(self, host_id: int, error: BaseException) -> None:
        failed = self._failed_starts.get(host_id)
        count = failed.count + 1 if failed is not None else 1
        self._failed_starts[host_id] = _FailedStarts(count, cause_of(error), monotonic())
        if host_id not in self.excluded:
            self.start(host_id)
            return
        self.stop(host_id)
        self._warn(
            f"host {host_id} could not be started {count} times: {first_line(cause_of(error))}; "
            f"it is tried again in {_RETRY_SECONDS / 60:.0f} minutes"
        )

    def join_failed(self, host_id: int, error: BaseException) -> None:
        """Count a host that was lost while it joined a group; exclude it after a few in a row."""
        self._failed_joins[host_id] += 1
        if self._failed_joins[host_id] >= _MAX_FAILED_STARTS:
            self.exclude(host_id, error)

    def joined(self, host_ids: Iterable[int]) -> None:
        """These hosts have joined a group: earlier failures to do so count no more."""
        for host_id in host_ids:
            self._failed_joins.pop(host_id, None)

    def exclude(self, host_id: int, error: BaseException) -> None:
        """End a host that cannot train, such as one on a node without the data.

        It is not started again soon."""
        self.stop(host_id)
        self._failed_joins.pop(host_id, None)
        self._failed_starts[host_id] = _FailedStarts(_MAX_FAILED_STARTS, error, monotonic())

    @property
    def excluded(self) -> set[int]:
        """Host ids whose hosts failed to start repeatedly, or cannot train.

        They are tried again much later."""
        return {
            host_id for host_id, failed in self._failed_starts.items() if failed.count >= _MAX_FAILED_STARTS
        }

    @property
    def last_error(self) -> BaseException | None:
        """The error of the last failed start, if any."""
        latest = max(self._failed_starts.values(), key=lambda failed: failed.last_at, default=None)
        return latest.error if latest is not None else None

    def startable(self, host_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the ids whose hosts can start: not excluded, and with a device on a live node."""
        return tuple(
            host_id for host_id in host_ids if host_id not in self.excluded and self._on_live_node(host_id)
        )

    def _on_live_node(self, host_id: int) -> bool:
        node_id = self._reserved_nodes.get(host_id)
        return node_id is not None and is_node_alive(node_id)

    def close(self) -> None:
        for host_id in list(self._hosts):
            self.stop(host_id)
        gangs = [self._gang] if self._gang is not None else []
        for each in [*gangs, *self._reservations.values()]:
            with suppress(Exception):
                remove_placement_group(each)


def is_node_alive(node_id: str) -> bool:
    """Return whether a node answers.

    Ray itself needs half a minute to notice that a node was killed."""
    node = next((entry for entry in ray.nodes() if entry["NodeID"] == node_id), None)
    if node is None or not node["Alive"]:
        return False
    return answers(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")


@ray.remote(num_cpus=0, max_retries=0)
def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
