"""Wait until a cluster has all its nodes: ``python -m orchestrator.runtime.cluster.await_nodes HOST:PORT 4``.

Scripts that start the nodes of a cluster call it before the run: nodes join in any order, and a run
that finds fewer devices than it needs ends.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from time import monotonic, sleep

import ray

from orchestrator.errors import OrchestratorError, ResourceError, UserError
from orchestrator.runtime.cluster.session import answers

_TIMEOUT_S = 300.0
_POLL_S = 0.5


def main(argv: Sequence[str]) -> int:
    try:
        if len(argv) != 2 or not argv[1].isdecimal():
            raise UserError(f"found {' '.join(argv)!r}; HOST:PORT and the number of nodes were needed")
        await_nodes(argv[0], int(argv[1]), _TIMEOUT_S)
    except OrchestratorError as error:
        sys.stderr.write(f"orchestrator: {error}\n")
        return error.exit_code
    return 0


def await_nodes(address: str, num_nodes: int, timeout_s: float) -> None:
    """Return when so many nodes are alive. Raises ResourceError after the timeout."""
    deadline = monotonic() + timeout_s
    # Ray itself would print its attempts to connect.
    _await(lambda: answers(address), deadline, f"no Ray cluster answers at {address}")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        _await(
            lambda: _alive() >= num_nodes,
            deadline,
            f"the cluster at {address} has fewer than {num_nodes} nodes",
        )
    finally:
        ray.shutdown()


def _alive() -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())


def _await(condition: Callable[[], bool], deadline: float, problem: str) -> None:
    while not condition():
        if monotonic() > deadline:
            raise ResourceError(f"{problem}; look at the logs of the nodes that are missing")
        sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
