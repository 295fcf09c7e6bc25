"""Expert hosts on a real Ray cluster that train nothing (see ``idle_worker``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError

from experts.hosts.actor_host import ExpertHost
from harness.hosts.idle_worker import idle_worker


@dataclass
class IdlePool:
    """Hosts by host id, on nodes that the test names; only the name of the real node is one that
    answers."""

    node_ids: tuple[str | None, ...]
    actors: dict[int, Any] = field(default_factory=dict)

    def start(self, *host_ids: int) -> None:
        for host_id in host_ids:
            # pyrefly: ignore[missing-attribute]
            self.actors[host_id] = ExpertHost.options(num_cpus=0, max_restarts=0).remote()

    def actor(self, host_id: int) -> Any:
        return self.actors[host_id]

    def node_id(self, host_id: int) -> str | None:
        return self.node_ids[host_id]

    def stop(self, host_id: int, frozen: bool = False) -> None:
        actor = self.actors.pop(host_id, None)
        if actor is not None:
            ray.kill(actor)

    def join(self, generation: int, *members: int) -> None:
        """Make hosts the members of a generation, in the order of ranks."""
        size = len(members)
        calls = [
            self.actor(host_id).join.remote(idle_worker, generation, generation, rank, size)
            for rank, host_id in enumerate(members)
        ]
        ray.get(calls)

    def run_segment(self, action: str, step: int, *host_ids: int) -> list[Any]:
        return ray.get([self.actor(host_id).run_segment.remote((action, step)) for host_id in host_ids])


@contextmanager
def idle_pool() -> Iterator[IdlePool]:
    """A pool of up to three hosts on the node of this process."""
    pool = IdlePool((str(ray.get_runtime_context().get_node_id()),) * 3)
    yield pool
    for host_id in list(pool.actors):
        pool.stop(host_id)


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s:g} s"
        time.sleep(0.02)


def kill_and_wait(actor: Any) -> None:
    ray.kill(actor)
    wait_until(lambda: is_dead(actor))


def is_dead(actor: Any) -> bool:
    try:
        ray.get(actor.leave.remote(-1))
    except RayActorError:
        return True
    return False
