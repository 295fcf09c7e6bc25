"""What a host reads to resume, and the rounds in which it joins, as hosts are added.

    python -m benchmarks.recovery.host_counts [--hosts 2 8 64 512] [--out FILE]

The hosts are simulated in one process; the code of snapshots, restoring and joining is the real one.
Each host has two experts, so that more hosts train more experts: the dense part grows by their rows of
the gate. Another placement is that of one host fewer.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from harness.hosts.joining import join_counts
from harness.hosts.many_hosts import ManyHosts
from orchestrator.types import bytes_text

EXPERTS_PER_HOST = 2


def restore_row(hosts: int) -> list[object]:
    """Return the bytes that a host reads from the snapshots of so many hosts."""
    experts = EXPERTS_PER_HOST * hosts
    case = ManyHosts(hosts, experts, width=64, hidden=128, dense_rows=20_000)
    snapshots = case.take_snapshots()
    ranks = sorted({0, 1, hosts // 2, hosts - 1})
    read = [case.restore(snapshots, rank)[1] for rank in ranks]
    fewer = ManyHosts(hosts - 1, experts, case.width, case.hidden, case.dense_rows)
    read_by_fewer = [fewer.restore(snapshots, rank)[1] for rank in ranks if rank < hosts - 1]
    whole_set = sum(parts.own.size + parts.dense.size for parts in snapshots)
    sizes = [snapshots[0].dense.size, snapshots[0].own.size, max(read), max(read_by_fewer), whole_set]
    return [hosts, *map(bytes_text, sizes)]


def join_row(hosts: int) -> list[object]:
    """Return the most that any of so many hosts does from the rendezvous to the first step."""
    with tempfile.TemporaryDirectory() as folder:
        counts = join_counts(hosts, Path(folder) / "run")
    collectives = max(sum(host.collectives.values()) for host in counts)
    operations = max(sum(host.store.values()) for host in counts)
    keys = max(host.most_keys for host in counts)
    return [hosts, collectives, max(host.waits for host in counts), operations, keys]


def tables(arguments: argparse.Namespace) -> str:
    restore_columns = [
        "hosts",
        "dense part",
        "a host's experts",
        "a host reads",
        "another placement",
        "all snapshots (read by every host before)",
    ]
    join_columns = ["hosts", "collectives", "waits", "store operations", "most keys in one look"]
    restore_rows = [restore_row(hosts) for hosts in arguments.hosts]
    join_rows = [join_row(hosts) for hosts in arguments.hosts]
    return (
        header("Costs of a host as hosts are added", arguments)
        + "Bytes that a host reads to resume from snapshots:\n\n"
        + markdown_table(restore_columns, restore_rows)
        + "\nRounds of a host from the rendezvous to the first step:\n\n"
        + markdown_table(join_columns, join_rows)
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 8, 64, 512])
    arguments = parser.parse_args()
    publish(tables(arguments), arguments.out)


if __name__ == "__main__":
    main()
