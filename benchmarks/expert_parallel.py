"""Experts on one and two hosts of one core each: our step against a layer by hand, and the exchange against Ray's object store.

``layer``: tokens per second of one MoE layer in training, ours against ``spmd_layer.py`` under torchrun, on one host and on
two, and the weak-scaling efficiency of both. ``exchange``: two actors send each other rows and get as many back, by
``all_to_all_single`` in a gloo group of their own and by ``ray.put`` and ``ray.get``. Rounds alternate; medians are compared.

    python -m benchmarks.expert_parallel [--rounds 5] [--parts layer exchange] [--contestants hand ours] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from benchmarks.ray_start import started, tail
from benchmarks.spmd_layer import TOKENS, TOP_K, WIDTH
from benchmarks.support import header, markdown_table, write_result
from orchestrator.record.events import of_kind, read_events

HOSTS = (1, 2)
LONGEST_S = 300.0
WARM_UP = 3
ONE_THREAD = (
    "env",
    "OMP_NUM_THREADS=1",
)  # torch.set_num_threads does not reach every product: some took both cores


def by_hand(hosts: int, steps: int) -> float:
    """Tokens per second of ``spmd_layer.py``."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(hosts)]
    command = [
        *ONE_THREAD,
        sys.executable,
        "-m",
        *launch,
        "-m",
        "benchmarks.spmd_layer",
        "--steps",
        str(steps),
    ]
    with tempfile.TemporaryDirectory(prefix="expert-parallel-") as name:
        folder = Path(name)
        with started(command, folder) as process:
            try:
                code: int | None = process.wait(LONGEST_S)
            except subprocess.TimeoutExpired:
                code = None
        lines = [
            line
            for line in (folder / "output.txt").read_text(errors="replace").splitlines()
            if line.startswith("{")
        ]
        if not lines:  # with a figure, it was measured: gloo aborts now and then when such a process ends
            ended = f"ended with code {code}" if code is not None else f"did not end within {LONGEST_S:.0f} s"
            raise RuntimeError(f"the layer by hand on {hosts} ranks {ended}:\n{tail(folder)}")
    return json.loads(lines[-1])["tokens_per_s"]


def ours(hosts: int, steps: int) -> float:
    """Tokens per second of ``orchestrator train`` with the same layer: one host is one process on one core, as under torchrun;
    two are Ray actors."""
    with tempfile.TemporaryDirectory(prefix="expert-parallel-") as name:
        folder = Path(name)
        flags = {
            "task": "benchmarks.one_layer:OneLayer",
            "run-dir": folder / "run",
            "max-steps": WARM_UP + steps,
            "epochs": 1000,
        }
        flags |= {
            "workers": hosts,
            "batch-size": TOKENS,
            "clip-norm": 0,
            "evaluate-every": 100_000,
            "checkpoint-every": 100_000,
        }
        command = [
            sys.executable,
            "-m",
            "orchestrator",
            "train",
            *(part for key, value in flags.items() for part in (f"--{key}", str(value))),
        ]
        command += ["--trackers", "--no-monitor-gpu", "--log-every", "10", "--gpu-mode", "cpu"]
        command = (
            ["taskset", "--cpu-list", "0", *command]
            if hosts == 1
            else [*command, "--parallel-strategy", "expert_parallel"]
        )
        command = [*ONE_THREAD, *command]
        with started(command, folder) as process:
            try:
                code: int | None = process.wait(LONGEST_S)
            except subprocess.TimeoutExpired:
                code = None
        events = folder / "run" / "events.jsonl"
        if code != 0 or not events.is_file():
            ended = f"ended with code {code}" if code is not None else f"did not end within {LONGEST_S:.0f} s"
            raise RuntimeError(f"our run on {hosts} hosts {ended}:\n{tail(folder)}")
        steps_done = of_kind(read_events(events), "step")[WARM_UP:]
    return hosts * TOKENS / statistics.median(step["seconds"] for step in steps_done)


CONTESTANTS: dict[str, tuple[str, Callable[[int, int], float]]] = {
    "hand": ("by hand, torchrun", by_hand),
    "ours": ("orchestrator", ours),
}


def compare_layers(names: Sequence[str], rounds: int, steps: int) -> str:
    found: dict[str, dict[int, list[float]]] = {name: {hosts: [] for hosts in HOSTS} for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else list(reversed(names)):  # none is always first
            for hosts in HOSTS:
                found[name][hosts].append(CONTESTANTS[name][1](hosts, steps))
                print(
                    f"{CONTESTANTS[name][0]}, {hosts} hosts: {found[name][hosts][-1]:,.0f} tokens/s",
                    flush=True,
                )
    one, two = HOSTS
    efficiency = {
        name: [
            after / (two * before) for before, after in zip(found[name][one], found[name][two], strict=True)
        ]
        for name in names
    }
    rows = [
        [f"tokens/s, {hosts} host{'s'[: hosts - 1]}", *cells([found[name][hosts] for name in names], ",.0f")]
        for hosts in HOSTS
    ]
    rows.append(["weak-scaling efficiency", *cells([efficiency[name] for name in names], ".2f")])
    return markdown_table(
        ["median (range)", *(CONTESTANTS[name][0] for name in names), "last to first"], rows
    )


def cells(measured: Sequence[Sequence[float]], form: str) -> list[str]:
    """Median and range of each, and how many times the first the last is."""
    medians = [statistics.median(values) for values in measured]
    shown = [
        f"{m:{form}} ({min(values):{form}}–{max(values):{form}})"
        for m, values in zip(medians, measured, strict=True)
    ]
    return [*shown, f"{medians[-1] / medians[0]:.2f}" if len(medians) > 1 else "–"]


class Host:
    """An actor that sends its peer rows, and returns those that it got. Seconds of each exchange, out and back."""

    def __init__(self, rank: int, store: str) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.letters: queue.Queue[list[Any]] = queue.Queue()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def by_group(self, rows: int, repeats: int) -> list[float]:
        mine, splits = self._rows(rows), [0, rows] if self.rank == 0 else [rows, 0]
        away, home = torch.empty_like(mine), torch.empty_like(mine)
        seconds = []
        for _ in range(WARM_UP + repeats):
            dist.barrier()
            begun = time.perf_counter()
            dist.all_to_all_single(away, mine, splits, splits)
            dist.all_to_all_single(home, away, splits, splits)
            seconds.append(time.perf_counter() - begun)
        self._check(away, home, mine)
        return seconds[WARM_UP:]

    def by_store(self, peer: Any, rows: int, repeats: int) -> list[float]:
        """The driver takes no part. As arrays, which Ray maps from shared memory without a copy."""
        mine, seconds = self._rows(rows), []
        away = home = mine
        for _ in range(WARM_UP + repeats):
            dist.barrier()
            begun = time.perf_counter()
            away = self._swap(peer, mine)
            home = self._swap(peer, away)
            seconds.append(time.perf_counter() - begun)
        self._check(away, home, mine)
        return seconds[WARM_UP:]

    def leave(self, letter: list[Any]) -> None:
        """A reference to rows; in a list, so that Ray hands on the reference and not the rows."""
        self.letters.put(letter)

    def _swap(self, peer: Any, rows: torch.Tensor) -> torch.Tensor:
        peer.leave.remote([ray.put(rows.numpy())])
        return torch.from_numpy(ray.get(self.letters.get(timeout=LONGEST_S)[0]))

    def _rows(self, rows: int, rank: int | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rank if rank is None else rank)
        return torch.randn(rows, WIDTH, generator=generator)

    def _check(self, away: torch.Tensor, home: torch.Tensor, mine: torch.Tensor) -> None:
        if not torch.equal(home, mine) or not torch.equal(away, self._rows(len(mine), 1 - self.rank)):
            raise RuntimeError(f"host {self.rank} got other rows than were sent")


def compare_exchanges(sizes: Sequence[int], rounds: int, repeats: int) -> str:
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    try:
        with tempfile.TemporaryDirectory(prefix="expert-parallel-") as folder:
            remote: Any = ray.remote
            actor = remote(num_cpus=1, max_concurrency=2)(Host)  # one thread exchanges, one takes letters
            hosts = [actor.remote(rank, f"{folder}/store") for rank in range(2)]
            found = {rows: measure_exchanges(hosts, rows, rounds, repeats) for rows in sizes}
    finally:
        ray.shutdown()
    columns = ["rows each way (MB)", "all_to_all_single, ms", "object store, ms", "last to first"]
    lines = [
        [f"{rows:,} ({rows * WIDTH * 4 / 1e6:.1f})", *cells([group, store], ".2f")]
        for rows, (group, store) in found.items()
    ]
    return markdown_table(columns, lines)


def measure_exchanges(
    hosts: list[Any], rows: int, rounds: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Milliseconds for out and back, a median for each round: in a group, through the object store."""
    group: list[float] = []
    store: list[float] = []
    for _ in range(rounds):
        group.append(
            slower(ray.get([host.by_group.remote(rows, repeats) for host in hosts], timeout=LONGEST_S))
        )
        both = zip(hosts, reversed(hosts), strict=True)
        store.append(
            slower(
                ray.get([host.by_store.remote(peer, rows, repeats) for host, peer in both], timeout=LONGEST_S)
            )
        )
        print(f"{rows:,} rows: group {group[-1]:.2f} ms, object store {store[-1]:.2f} ms", flush=True)
    return group, store


def slower(seconds: list[list[float]]) -> float:
    """An exchange is over when both hosts have their rows."""
    return 1000 * statistics.median(max(pair) for pair in zip(*seconds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    text = header("Experts on two hosts: the layer and the exchange", given)
    if "layer" in given.parts:
        text += compare_layers(given.contestants, given.rounds, given.steps)
    if "exchange" in given.parts:
        text += "\nRows to the other host and as many back:\n\n" + compare_exchanges(
            given.rows, given.rounds, given.steps
        )
    print(text)
    write_result(given.out, text)


if __name__ == "__main__":
    main()
