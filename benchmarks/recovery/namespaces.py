"""Three nodes in network namespaces of this machine: runs that are disturbed from outside, and the scaling
of two nodes over a slow link against the cost model's prediction.

Needs root, ``ip`` and ``tc``. Each node has an address, process ids, shared memory and a monotonic clock of
its own, and a raylet; ``orchestrator train`` joins their cluster.

    python -m benchmarks.recovery.namespaces [--only NAME ...] [--out FILE]
    python -m benchmarks.recovery.namespaces --scaling [--mbit 1000] [--delay-ms 10] [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from dataclasses import dataclass

from benchmarks.planning.costmodel import TracedCase
from benchmarks.planning.costmodel_cases import Case, vectors
from benchmarks.recovery.node_link import read_link
from benchmarks.support import benchmark_parser, header, markdown_table, publish
from harness.fakes.cost_machines import device
from harness.hosts.namespace_cluster import NamespaceCluster, namespace_cluster
from harness.hosts.namespace_runs import (
    CASES,
    STEPS,
    STRATEGIES,
    Outcome,
    failed,
    run_case,
    undisturbed,
)
from harness.hosts.namespace_runs import Case as DisturbedCase
from harness.hosts.namespaces import LinkSpec, reason_not_allowed
from harness.runs.records import by_step
from orchestrator.plan.cost.machine import Interconnect, Link, Machine, Parallelism
from orchestrator.plan.cost.traffic import traffic_seconds
from orchestrator.record.files.reading import read_events

MODEL = vectors(width=256, experts=8, expert_hidden_size=512, layers=1)
BATCH = 1024
NUM_STEPS = 72
TIMED_STEPS = 36
"""The last steps of a run: the first twenty of data-parallel runs check that the workers agree."""
_PROBE_PORT = 29555
QUIET = shlex.split("--evaluate-every 1000 --checkpoint-every 1000 --trackers --no-monitor-gpu")
SCALED = (
    Case(MODEL, BATCH // 2, 2, "expert_parallel"),
    Case(MODEL, BATCH // 2, 2, "data_parallel"),
)


# Disturbances


def disturbances(only: list[str]) -> str:
    """Run every case, and return their table."""
    cases = [case for case in CASES if not only or case.name in only]
    rows: list[list[str]] = []
    with namespace_cluster(3) as cluster:
        for strategy in STRATEGIES:
            chosen = [case for case in cases if case.strategy == strategy]
            if chosen:
                calm = run_case(cluster, undisturbed(strategy))
                rows.append(_row(calm))
                rows += [_row(_outcome(cluster, case, calm)) for case in chosen]
    columns = ("strategy", "disturbance", "expected", "seen", "largest difference of a loss", "as expected")
    return markdown_table(columns, rows)


def _outcome(cluster: NamespaceCluster, case: DisturbedCase, calm: Outcome) -> Outcome:
    """Run a case. One that fails is a row of the table too."""
    try:
        return run_case(cluster, case, calm)
    except Exception as error:
        return failed(case, error)


def _row(outcome: Outcome) -> list[str]:
    case = outcome.case
    verdict = "; ".join(outcome.problems) or "yes"
    difference = "–" if case.disturbance == "none" else f"{outcome.largest_difference:.1e}"
    row = [case.strategy, case.disturbance, case.expected, outcome.seen, difference, verdict]
    print(" | ".join(row), flush=True)
    return row


# Scaling


@dataclass(frozen=True)
class Scaled:
    """A configuration on two nodes: its step as measured, and its communication as predicted."""

    case: Case
    measured_s: float
    traffic_s: dict[str, float]


def scaling(wire: LinkSpec) -> str:
    """Measure steps on one and on two nodes, and return the table beside the predictions.

    The computation is that of a worker's share of the batch, measured on one node; the cost model
    predicts the communication from the link as a calibration measures it."""
    # A node has one CPU, as a worker has: one process on one node must not take both cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    with namespace_cluster(2, wire) as cluster:
        link = _measured_link(cluster)
        whole_s = _measure(cluster, Case(MODEL, BATCH))
        share_s = _measure(cluster, Case(MODEL, BATCH // 2))
        rows = [Scaled(case, _measure(cluster, case), _traffic(case, link, share_s)) for case in SCALED]
    columns = ("", "measured step", "predicted step", "error", "measured speed-up", "predicted speed-up")
    alone = ["1 node", f"{1000 * whole_s:.0f} ms", "–", "–", "1", "1"]
    table = markdown_table(columns, [alone, *(_scaling_row(row, whole_s, share_s) for row in rows)])
    lines = "\n".join(f"- {row.case.strategy}: {_parts_text(row.traffic_s)}" for row in rows)
    share = f"A worker's share of the batch takes {1000 * share_s:.0f} ms on one node (measured)."
    links = f"The link as measured: {_link_text('all-reduce', link.sums)}; "
    links += f"{_link_text('all-to-all', link.exchange)}."
    return f"{table}\n{share} {links} Predicted communication of a step:\n\n{lines}\n"


def _link_text(name: str, link: Link) -> str:
    return f"{name} {1000 * link.latency_s:.0f} ms and {link.bytes_per_s / 1e6:.0f} MB/s"


def _measured_link(cluster: NamespaceCluster) -> Interconnect:
    command = [sys.executable, "-m", "benchmarks.recovery.node_link"]
    address = [cluster.head.address, str(_PROBE_PORT)]
    logs = [cluster.folder / f"link_{node.number}.txt" for node in cluster.nodes]
    environment = {**cluster.environment, "GLOO_SOCKET_IFNAME": "eth0"}
    started = [
        node.start([*command, str(rank), *address], environment, log, cluster.folder)
        for rank, (node, log) in enumerate(zip(cluster.nodes, logs, strict=True))
    ]
    # A program that fails leaves the other one waiting.
    while any(process.poll() is None for process in started):
        assert not any(process.returncode for process in started), [log.read_text() for log in logs]
        time.sleep(0.1)
    return read_link(logs[0].read_text())


def _measure(cluster: NamespaceCluster, case: Case) -> float:
    """Return the median time of the last steps."""
    settings = {**case.settings, "batch_size": case.batch, "max_steps": NUM_STEPS, "log_every": 1}
    # Without a number of workers, a run takes both nodes.
    settings |= {"workers": case.workers}
    if case.workers > 1:
        settings |= {"parallel_strategy": case.strategy}
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    name = f"{case.strategy}-{case.batch}".replace("_", "-")
    cluster.finish_run(cluster.start_run(name, *flags, *QUIET), name)
    steps = by_step(read_events(cluster.folder / "shared" / name / "events.jsonl"))
    seconds = statistics.median(step["seconds"] for step in steps[-TIMED_STEPS:])
    print(case.where, case.batch, seconds, flush=True)
    return seconds


def _traffic(case: Case, link: Interconnect, compute_s: float) -> dict[str, float]:
    """Return the predicted seconds of each kind of communication, between nodes with one worker each.

    Gradients are summed while the backward pass computes: the part that it hides is left out."""
    traced = TracedCase.of(case, on_gpu=False)
    nodes = Machine(device(asynchronous=False), case.workers, 1, outer=link)
    parallelism = Parallelism(
        case.workers,
        traced.plan.strategy.value,
        traced.plan.accumulation_steps.value,
        chunks=traced.plan.exchange_chunks.value,
    )
    return traffic_seconds(traced.work, nodes, parallelism, compute_s)


def _scaling_row(row: Scaled, whole_s: float, share_s: float) -> list[str]:
    predicted_s = share_s + sum(row.traffic_s.values())
    return [
        row.case.where,
        f"{1000 * row.measured_s:.0f} ms",
        f"{1000 * predicted_s:.0f} ms",
        f"{predicted_s / row.measured_s - 1:+.0%}",
        f"{whole_s / row.measured_s:.2f}",
        f"{whole_s / predicted_s:.2f}",
    ]


def _parts_text(traffic_s: dict[str, float]) -> str:
    return ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in traffic_s.items() if seconds)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=None, help="names of cases")
    parser.add_argument("--scaling", action="store_true", help="measure two nodes over a slow link")
    parser.add_argument("--mbit", type=int, default=1000, help="bandwidth of the link")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="delay from node to node")
    arguments = parser.parse_args()
    reason = reason_not_allowed()
    if reason is not None:
        parser.error(reason)
    publish(_result(arguments), arguments.out)


def _result(arguments: argparse.Namespace) -> str:
    if arguments.scaling:
        link = LinkSpec(arguments.mbit, arguments.delay_ms / 1000)
        title = f"Two nodes over {link.mbit_s} Mbit/s with {arguments.delay_ms:g} ms delay"
        return header(title, arguments) + scaling(link)
    title = "Three nodes in network namespaces, disturbed"
    text = f"{STEPS} steps of the digits on three workers, one on each node; 7 experts, fp32.\n\n"
    return header(title, arguments) + text + disturbances(arguments.only or [])


if __name__ == "__main__":
    main()
