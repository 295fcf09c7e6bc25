"""The bits of a run on several hosts of one core each against one process, and the cost of --reproducible.

``matrix``: short runs whose work is divided in every way (hosts, placements, data parallel, shards, resumes
on other numbers of hosts), with a hash of weights and optimizer state for each. ``bits``: a run whose 11
experts are born, merged, pruned, moved and copied, on 5 hosts over gloo, interrupted in the middle and
resumed on 2, against one process: a hash of weights and optimizer state, the changes of experts, and the
first step that differs, with the flag and without. ``cost``: steps per second, CPU time, bytes that the hosts
hand to collectives, and peak memory, with the flag and without, on one, two and four hosts in turn. CPU time
changes less than the rate where other processes take the cores.

    python -m benchmarks.parallel.reproducible [--steps 700] [--parts matrix bits cost] [--out FILE]
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.hosts.group import Group
from harness.lm.language_models import save_sums, save_tiny_model
from harness.runs.bits import (
    Leg,
    Run,
    changes_of,
    checkpoints_of,
    first_difference,
    newest_state,
    own_changes_of,
    run_all,
    sha256_of,
)
from harness.runs.exact_runs import DATA, EXPERTS, SIZES, SKEWED, random_placement, tiny
from harness.runs.exact_runs import EXACT as TINY
from harness.runs.records import by_step
from orchestrator.record.files.reading import read_events
from orchestrator.tasks.task import Task
from orchestrator.train.stepper import Stepper
from orchestrator.types import bytes_text

COMMON: dict[str, Any] = {
    "task": "digits",
    "epochs": 100_000,
    "learning_rate": 3e-3,
    "schedule": "constant",
    "warmup_steps": 0,
    "log_every": 1,
    "trackers": (),
    "monitor_gpu": False,
    "gpu_mode": "cpu",
    "plots": "off",
}
ON_HOSTS = {"parallel_strategy": "expert_parallel", "rebalance": "on"}
EVOLVING: dict[str, Any] = COMMON | {
    "width": 24,
    "layers": 1,
    "experts": 11,
    "expert_hidden_size": (16, 24, 32, 16, 24, 32, 16, 24, 32, 16, 24),
    "evolution": "bold",
    "sleep_every": 50,
    "merge_similarity": 0.5,
    "change_tolerance": 0.5,
    "evaluate_every": 100,
    "checkpoint_every": 100,
    "keep": 20,
}
COSTLY: dict[str, Any] = COMMON | {
    "width": 128,
    "layers": 2,
    "experts": 8,
    "expert_hidden_size": 512,
    "evaluate_every": 100_000,
    "checkpoint_every": 100_000,
}
EXACT: dict[str, Any] = {"reproducible": True, "batch_size": 8, "global_batch_size": 64}
ROUNDED: dict[str, Any] = {"deterministic": True, "global_batch_size": 64}
WARM_UP = 5
MICRO_BATCH = 64
GLOBAL_BATCH = 512
VARIANTS: dict[str, dict[str, Any]] = {
    "off": {"deterministic": True},
    "off, micro-batches of 64": {"deterministic": True, "batch_size": MICRO_BATCH},
    "on, micro-batches of 64": {"reproducible": True, "batch_size": MICRO_BATCH},
}
"""Without the flag a host computes its share of a step at once."""


# Every division of the work


@dataclass(frozen=True)
class Kind:
    """A run, and divisions of its work that must not show in a bit."""

    name: str
    task: Task | None
    settings: Mapping[str, Any]
    divisions: Mapping[str, Sequence[Leg]]


def compare_divisions(steps: int, folder: Path) -> str:
    """Return a table of the hashes of all divisions of each kind of run."""
    rows: list[list[str]] = []
    for number, kind in enumerate(_kinds(steps, folder)):
        divisions = {"one process": [Leg(1, steps)], **kind.divisions}
        runs = [
            Run(folder / f"{number}-{place}", kind.task, kind.settings, legs)
            for place, legs in enumerate(divisions.values())
        ]
        run_all(runs, timeout=7200)
        for name, run in zip(divisions, runs, strict=True):
            digest = sha256_of(newest_state(run.folder))
            found = "–" if run is runs[0] else first_difference(run.folder, runs[0].folder) or "none"
            changes = ", ".join(
                f"{count} {change}" for change, count in Counter(changes_of(run.folder)).items()
            )
            rows.append([kind.name, name, changes, f"`{digest[:16]}…`", found])
            print(*rows[-1], flush=True)
    columns = ["run", "division of the work", "changes of experts", "sha256", "first difference"]
    return markdown_table(columns, rows)


def _kinds(steps: int, folder: Path) -> Iterator[Kind]:
    rare = {"evaluate_every": 50, "checkpoint_every": 50}
    hosts = {f"{number} hosts": [Leg(number, steps, EXPERTS)] for number in (2, 3, 4, 5)}
    yield Kind("fp32", tiny(), TINY | rare, hosts | _placements(steps, folder) | _other_divisions(steps))
    few: dict[str, Sequence[Leg]] = {
        "3 hosts": [Leg(3, steps, EXPERTS)],
        "2 data-parallel workers, zero3": [Leg(2, steps, DATA | {"sharding": "zero3"})],
    }
    yield Kind("bf16", tiny(), TINY | rare | {"precision": "bf16"}, few)
    middle = steps // 2 + 5
    interrupted: dict[str, Sequence[Leg]] = {
        f"5 hosts, from step {middle} on 2": [Leg(5, middle, ON_HOSTS), Leg(2, steps, ON_HOSTS)]
    }
    yield Kind("experts that change", None, EVOLVING | EXACT | {"sleep_every": 30}, interrupted)
    sizes = {"batch_size": 12, "global_batch_size": 90, "rebalance": "on"}
    copies: dict[str, Sequence[Leg]] = {f"{number} hosts": [Leg(number, steps, EXPERTS)] for number in (3, 4)}
    yield Kind("copies of a hot expert", SKEWED, TINY | rare | sizes, copies)
    yield Kind("LoRA on a tiny Qwen3-MoE", None, TINY | rare | _language_model(folder), few)


def _placements(steps: int, folder: Path) -> dict[str, Sequence[Leg]]:
    draw = random.Random(0)
    found: dict[str, Sequence[Leg]] = {}
    for number in (3, 4, 5):
        path = folder / f"placement-{number}.json"
        path.write_text(random_placement(draw, SIZES, number))
        found[f"{number} hosts, a random placement"] = [
            Leg(number, steps, EXPERTS | {"placement": str(path)})
        ]
    return found


def _other_divisions(steps: int) -> dict[str, Sequence[Leg]]:
    first, second = steps * 7 // 20, steps * 7 // 10
    found: dict[str, Sequence[Leg]] = {
        f"4 hosts, from step {first} on 3, from {second} on 4": [
            Leg(4, first, EXPERTS),
            Leg(3, second, EXPERTS),
            Leg(4, steps, EXPERTS),
        ],
        "2 data-parallel workers": [Leg(2, steps, DATA)],
        "3 data-parallel workers": [Leg(3, steps, DATA)],
    }
    for name, division in (("data-parallel workers", DATA), ("hosts", EXPERTS)):
        for sharding, number in (("zero2", 3), ("zero3", 2)):
            found[f"{number} {name}, {sharding}"] = [Leg(number, steps, division | {"sharding": sharding})]
    return found


def _language_model(folder: Path) -> dict[str, Any]:
    data = [str(save_sums(folder / "sums.jsonl", 24))]
    return {
        "task": "lm",
        "model": str(save_tiny_model(folder / "model")),
        "sequence_length": 48,
        "lora": 3,
        "lora_dropout": 0.2,
        "batch_size": 2,
        "global_batch_size": 6,
        "data": data,
        "validation_data": data,
    }


# The same bits


def compare_bits(steps: int, folder: Path) -> str:
    """Return a table of runs against one process, with the flag and without."""
    middle = round(steps * 0.525)
    variants = {
        "one process": [Leg(1, steps)],
        f"5 hosts, from step {middle} on 2": [Leg(5, middle), Leg(2, steps)],
    }
    rows: list[list[str]] = []
    for name, settings in (("on", EXACT), ("off", ROUNDED)):
        runs = [
            Run(folder / f"{name}-{number}", None, EVOLVING | settings | ON_HOSTS, legs)
            for number, legs in enumerate(variants.values())
        ]
        run_all(runs, timeout=3600)
        for label, run in zip(variants, runs, strict=True):
            print(f"{name}, {label}: done", flush=True)
            rows.append([name, label, *_bits_of(run.folder, runs[0].folder)])
    columns = ["--reproducible", "run", "loss at the end", "changes of experts", "sha256", "first difference"]
    return markdown_table(columns, rows)


def _bits_of(run_dir: Path, one_process: Path) -> list[str]:
    changes = Counter(event["change"] for event in own_changes_of(run_dir))
    del changes["warmed"]
    listed = ", ".join(f"{number} {change}" for change, number in sorted(changes.items()))
    last = by_step(read_events(run_dir / "events.jsonl"))[-1]
    digest = sha256_of(newest_state(run_dir))
    assert max(checkpoints_of(run_dir)) == last["step"]
    found = first_difference(run_dir, one_process) if run_dir != one_process else "–"
    return [f"{last['loss']:.9f}", f"{changes.total()}: {listed}", f"`{digest[:16]}…`", found or "none"]


# The cost


@dataclass(frozen=True)
class Cost:
    """The cost of a run: seconds of a step, CPU seconds of all hosts, their bytes, and memory of a host."""

    step_s: float
    cpu_s: float
    sent_bytes: float
    peak_bytes: int


@dataclass
class Meter:
    """Counts the bytes that a rank hands to collectives, and its CPU time, at the end of each step."""

    sent: int = 0
    steps: list[tuple[int, float]] = field(default_factory=list)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for name, argument in (("all_to_all", 1), ("all_reduce", 0), ("all_reduce_max", 0)):
            patch.setattr(Group, name, self._counted(getattr(Group, name), argument))
        run = Stepper.run

        def run_step(stepper: Stepper, *arguments: Any) -> Any:
            totals = run(stepper, *arguments)
            self.steps.append((self.sent, time.process_time()))
            return totals

        patch.setattr(Stepper, "run", run_step)

    def _counted(self, original: Any, argument: int) -> Any:
        def call(group: Group, *arguments: Any) -> Any:
            self.sent += arguments[argument].numel() * arguments[argument].element_size()
            return original(group, *arguments)

        return call

    def per_step(self) -> tuple[float, float]:
        """Return bytes and CPU seconds per step, without the first steps."""
        first, last = self.steps[WARM_UP - 1], self.steps[-1]
        number = len(self.steps) - WARM_UP
        return (last[0] - first[0]) / number, (last[1] - first[1]) / number


@contextmanager
def measured(rank: int, folder: Path) -> Iterator[None]:
    """Write the costs of a rank into a file."""
    meter = Meter()
    with pytest.MonkeyPatch.context() as patch:
        meter.patch(patch)
        yield
    sent, cpu_s = meter.per_step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / f"cost_{rank}.json").write_text(json.dumps({"sent": sent, "cpu": cpu_s, "peak": peak}))


def cost_of(hosts: int, settings: Mapping[str, Any], steps: int) -> Cost:
    with tempfile.TemporaryDirectory(prefix="reproducible-") as name:
        folder = Path(name)
        sizes = {"rebalance": "off", "global_batch_size": GLOBAL_BATCH}
        all_settings = {**COSTLY, **settings, **ON_HOSTS, **sizes}
        legs = [Leg(hosts, WARM_UP + steps)]
        run_all(
            [Run(folder / "run", None, all_settings, legs, partial(measured, folder=folder))], timeout=600
        )
        costs = [json.loads((folder / f"cost_{rank}.json").read_text()) for rank in range(hosts)]
        recorded = by_step(read_events(folder / "run" / "events.jsonl"))
    return Cost(
        statistics.median(step["seconds"] for step in recorded[WARM_UP:]),
        sum(cost["cpu"] for cost in costs),
        sum(cost["sent"] for cost in costs),
        max(cost["peak"] for cost in costs),
    )


def compare_costs(host_counts: Sequence[int], rounds: int, steps: int) -> str:
    """Measure all variants in turn, and return a table with medians."""
    variants = [(hosts, name) for hosts in host_counts for name in VARIANTS]
    costs: dict[tuple[int, str], list[Cost]] = {variant: [] for variant in variants}
    for number in range(rounds):
        # The order alternates, so that none is always first.
        for hosts, name in variants if number % 2 == 0 else reversed(variants):
            cost = cost_of(hosts, VARIANTS[name], steps)
            costs[hosts, name].append(cost)
            print(f"{hosts} hosts, {name}: {1000 * cost.step_s:.1f} ms, {cost.cpu_s:.3f} s CPU", flush=True)
    columns = [
        "hosts",
        "--reproducible",
        "steps/s (range)",
        "CPU ms per step, all hosts (range)",
        "bytes per step, all hosts",
        "peak memory of a host",
    ]
    return markdown_table(columns, [_cost_row(hosts, name, costs[hosts, name]) for hosts, name in variants])


def _cost_row(hosts: int, name: str, costs: Sequence[Cost]) -> list[object]:
    return [
        hosts,
        name,
        _median_and_range([1 / cost.step_s for cost in costs], ".1f"),
        _median_and_range([1000 * cost.cpu_s for cost in costs], ".0f"),
        bytes_text(round(costs[0].sent_bytes)),
        bytes_text(max(cost.peak_bytes for cost in costs)),
    ]


def _median_and_range(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cost-steps", type=int, default=20)
    parser.add_argument("--hosts", nargs="+", type=int, default=[1, 2, 4], help="for the cost")
    parts = ["matrix", "bits", "cost"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--matrix-steps", type=int, default=200)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # as --reproducible has it
    text = header("The same bits on any number of hosts, and their cost", arguments)
    if "matrix" in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="reproducible-") as folder:
            text += compare_divisions(arguments.matrix_steps, Path(folder)) + "\n"
    if "bits" in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="reproducible-") as folder:
            text += compare_bits(arguments.steps, Path(folder))
    if "cost" in arguments.parts:
        text += "\n" + compare_costs(arguments.hosts, arguments.rounds, arguments.cost_steps)
    publish(text, arguments.out)


if __name__ == "__main__":
    main()
