"""The link between two nodes as a calibration measures it: what collectives take, not what the wire promises.

One program on each node; the first of them prints the link.

    python -m benchmarks.recovery.node_link RANK ADDRESS PORT
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch

from orchestrator.measure.calibration.link_bandwidth import measured_links
from orchestrator.plan.cost.machine import Interconnect, Link
from orchestrator.train.group.stores import tcp_store
from orchestrator.train.group.world import process_group_world

_TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rank", type=int, help="0 on the first node, 1 on the second")
    parser.add_argument("address", help="of the first node")
    parser.add_argument("port", type=int)
    arguments = parser.parse_args()
    rank = arguments.rank
    torch.set_num_threads(1)
    store = tcp_store(arguments.address, arguments.port, rank == 0, _TIMEOUT_S, secret="")
    with process_group_world(store, rank, 2, torch.device("cpu"), "gloo", _TIMEOUT_S) as world:
        links = measured_links(world, "network")
        if world.is_main:
            print(json.dumps(asdict(links)), flush=True)


def read_link(output: str) -> Interconnect:
    """Return the link that the program has printed last."""
    links = json.loads(output.strip().splitlines()[-1])
    return Interconnect(Link(**links["sums"]), Link(**links["exchange"]))


if __name__ == "__main__":
    main()
