"""Experts on one and two hosts of one core each: our step against a layer by hand, the exchange
against Ray's object store.

``layer``: tokens per second of one MoE layer in training, by the median and by the mean step, ours
(with live recovery) against ``spmd_layer.py`` under torchrun, on one host and on two, and the
weak-scaling efficiency of both. ``exchange``: two actors
send each other rows and get as many back (``exchange_actors.py``), by ``all_to_all_single`` in a
gloo group and by ``ray.put`` and ``ray.get``. Rounds alternate; medians are compared.

    python -m benchmarks.parallel.expert_parallel [--rounds 5] [--parts layer exchange] [--contestants hand
    ours] [--out FILE]
"""

from __future__ import annotations

import json
import logging
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from benchmarks.parallel.exchange_actors import LONGEST_S, WARM_UP, ExchangeActor
from benchmarks.parallel.spmd_layer import TOKENS, TOP_K, WIDTH
from benchmarks.processes import started, tail
from benchmarks.support import benchmark_parser, header, markdown_table, publish
from orchestrator.record.files.reading import of_kind, read_events

HOSTS = (1, 2)
# torch.set_num_threads does not reach every product: without the variable some took both cores
ONE_THREAD = ("env", "OMP_NUM_THREADS=1")


def run_to_end(command: list[str], folder: Path) -> int | None:
    """Run a command. Returns its exit code, or None where it did not end in time."""
    with started(command, folder) as process:
        try:
            return process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            return None


def _ending(code: int | None) -> str:
    return f"ended with code {code}" if code is not None else f"did not end within {LONGEST_S:.0f} s"


@dataclass(frozen=True)
class StepTimes:
    """The median and the mean step of a run, in seconds."""

    median: float
    mean: float


def by_hand(hosts: int, steps: int) -> StepTimes:
    """Return the step times of ``spmd_layer.py``."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(hosts)]
    module = ["benchmarks.parallel.spmd_layer", "--steps", str(steps)]
    command = [*ONE_THREAD, sys.executable, "-m", *launcher, "-m", *module]
    with tempfile.TemporaryDirectory(prefix="expert-parallel-") as name:
        folder = Path(name)
        code = run_to_end(command, folder)
        output = (folder / "output.txt").read_text(errors="replace")
        results = [line for line in output.splitlines() if line.startswith("{")]
        # The exit code alone is no failure: gloo sometimes aborts when a process ends, after the
        # result was printed
        if not results:
            raise RuntimeError(f"the layer by hand on {hosts} ranks {_ending(code)}:\n{tail(folder)}")
    figures = json.loads(results[-1])
    return StepTimes(figures["median_step_s"], figures["mean_step_s"])


def ours(hosts: int, steps: int) -> StepTimes:
    """Return the step times of ``orchestrator train`` with the same layer.

    One host is one process on one core, as under torchrun; two are Ray actors.
    """
    with tempfile.TemporaryDirectory(prefix="expert-parallel-") as name:
        folder = Path(name)
        code = run_to_end(our_command(hosts, steps, folder / "run"), folder)
        events = folder / "run" / "events.jsonl"
        if code != 0 or not events.is_file():
            raise RuntimeError(f"our run on {hosts} hosts {_ending(code)}:\n{tail(folder)}")
        measured = of_kind(read_events(events), "step")[WARM_UP:]
    seconds = [step["seconds"] for step in measured]
    return StepTimes(statistics.median(seconds), statistics.mean(seconds))


def our_command(hosts: int, steps: int, run_dir: Path) -> list[str]:
    flags = {
        "--task": "benchmarks.parallel.one_layer:OneLayer",
        "--run-dir": run_dir,
        "--max-steps": WARM_UP + steps,
        "--epochs": 1000,
        "--workers": hosts,
        "--batch-size": TOKENS,
        "--clip-norm": 0,
        "--evaluate-every": 100_000,
        "--checkpoint-every": 100_000,
        "--log-every": 10,
        "--gpu-mode": "cpu",
    }
    words = [str(part) for flag in flags.items() for part in flag]
    command = [sys.executable, "-m", "orchestrator", "train", *words, "--trackers", "--no-monitor-gpu"]
    if hosts == 1:
        return [*ONE_THREAD, "taskset", "--cpu-list", "0", *command]
    return [*ONE_THREAD, *command, "--parallel-strategy", "expert_parallel"]


CONTESTANTS: dict[str, tuple[str, Callable[[int, int], StepTimes]]] = {
    "hand": ("by hand, torchrun", by_hand),
    "ours": ("orchestrator", ours),
}


def compare_layers(names: Sequence[str], rounds: int, steps: int) -> str:
    times: dict[str, dict[int, list[StepTimes]]] = {name: {hosts: [] for hosts in HOSTS} for name in names}
    for number in range(rounds):
        # the order alternates, so that none is always first
        for name in names if number % 2 == 0 else list(reversed(names)):
            label, measure = CONTESTANTS[name]
            for hosts in HOSTS:
                step = measure(hosts, steps)
                times[name][hosts].append(step)
                milliseconds = f"median step {1000 * step.median:.1f} ms, mean {1000 * step.mean:.1f} ms"
                print(f"{label}, {hosts} hosts: {milliseconds}", flush=True)
    rows = []
    for statistic in ("median", "mean"):
        rates = {name: tokens_per_second(times[name], statistic) for name in names}
        rows += [
            [
                f"tokens/s by the {statistic} step, {hosts} host{'s'[: hosts - 1]}",
                *cells([rates[name][hosts] for name in names], ",.0f"),
            ]
            for hosts in HOSTS
        ]
        efficiency = [efficiencies(rates[name]) for name in names]
        rows.append([f"weak-scaling efficiency by the {statistic} step", *cells(efficiency, ".2f")])
    labels = [CONTESTANTS[name][0] for name in names]
    return markdown_table(["median (range)", *labels, "last to first"], rows)


def tokens_per_second(times: dict[int, list[StepTimes]], statistic: str) -> dict[int, list[float]]:
    """Return the tokens per second of each round, by the number of hosts."""
    return {
        hosts: [hosts * TOKENS / getattr(step, statistic) for step in steps] for hosts, steps in times.items()
    }


def efficiencies(rates: dict[int, list[float]]) -> list[float]:
    """Return the weak-scaling efficiency of each round."""
    fewer, more = HOSTS
    return [after / (more * before) for before, after in zip(rates[fewer], rates[more], strict=True)]


def cells(measured: Sequence[Sequence[float]], form: str) -> list[str]:
    """Return median and range of each, and the ratio of the last median to the first."""
    medians = [statistics.median(values) for values in measured]
    shown = [
        f"{median:{form}} ({min(values):{form}}–{max(values):{form}})"
        for median, values in zip(medians, measured, strict=True)
    ]
    return [*shown, f"{medians[-1] / medians[0]:.2f}" if len(medians) > 1 else "–"]


def compare_exchanges(sizes: Sequence[int], rounds: int, repeats: int) -> str:
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    try:
        with tempfile.TemporaryDirectory(prefix="expert-parallel-") as folder:
            remote: Any = ray.remote
            # two threads: one exchanges, one takes the peer's references
            actor = remote(num_cpus=1, max_concurrency=2)(ExchangeActor)
            actors = [actor.remote(rank, f"{folder}/store") for rank in range(2)]
            times = {rows: measure_exchanges(actors, rows, rounds, repeats) for rows in sizes}
    finally:
        ray.shutdown()
    columns = ["rows each way (MB)", "all_to_all_single, ms", "object store, ms", "last to first"]
    lines = [
        [f"{rows:,} ({rows * WIDTH * 4 / 1e6:.1f})", *cells([group, store], ".2f")]
        for rows, (group, store) in times.items()
    ]
    return markdown_table(columns, lines)


def measure_exchanges(
    actors: list[Any], rows: int, rounds: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Return the milliseconds for out and back, a median for each round: in a group, through the
    object store.
    """
    group: list[float] = []
    store: list[float] = []
    for _ in range(rounds):
        calls = [actor.by_group.remote(rows, repeats) for actor in actors]
        group.append(slower_ms(ray.get(calls, timeout=LONGEST_S)))
        pairs = zip(actors, reversed(actors), strict=True)
        calls = [actor.by_store.remote(peer, rows, repeats) for actor, peer in pairs]
        store.append(slower_ms(ray.get(calls, timeout=LONGEST_S)))
        print(f"{rows:,} rows: group {group[-1]:.2f} ms, object store {store[-1]:.2f} ms", flush=True)
    return group, store


def slower_ms(seconds: list[list[float]]) -> float:
    """Return the median time of an exchange. It is over when both hosts have their rows."""
    return 1000 * statistics.median(max(pair) for pair in zip(*seconds, strict=True))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        default=[64, TOKENS * TOP_K // 2, 16384],
        help="rows that a host sends the other",
    )
    parser.add_argument("--parts", nargs="+", choices=["layer", "exchange"], default=["layer", "exchange"])
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    arguments = parser.parse_args()
    text = header("Experts on two hosts: the layer and the exchange", arguments)
    if "layer" in arguments.parts:
        text += compare_layers(arguments.contestants, arguments.rounds, arguments.steps)
    if "exchange" in arguments.parts:
        text += "\nRows to the other host and as many back:\n\n"
        text += compare_exchanges(arguments.rows, arguments.rounds, arguments.steps)
    publish(text, arguments.out)


if __name__ == "__main__":
    main()
