"""Ledgers as a sweep would leave them, without a sweep: plausible grids, with trials that end in
every possible way.

Figures are a function of the point and the seed, so that a test may compute them twice.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.record.files.ledger import Ledger, SweepRecord, TrialRow, read_sweep_record
from orchestrator.types import GIB, MIB

GRID: Mapping[str, Sequence[Any]] = {
    "precision": ("fp32", "bf16"),
    "batch_size": (16, 64, 256),
    "accumulation_steps": (1, 4),
    "workers": (1, 2, 4),
}
EVIL = "</td></script><script>alert(1)</script>|`[x](//evil.example)`$\\frac$ \x1b[31m\n=HYPERLINK(1)\"'&"


@dataclass(frozen=True)
class FakeSweep:
    """Description of a sweep."""

    space: Mapping[str, Sequence[Any]] = field(default_factory=lambda: dict(GRID))
    devices: int = 4
    """Devices of the cluster: trials with more workers are infeasible."""
    memory: int = 20 * GIB
    """Bytes of a device: trials that need more run out of memory."""
    gpu: bool = True
    objective: str = "throughput"
    search: str = "grid"
    experts: bool = False
    failing: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    left: int = 0
    """Number of trials that have not run yet."""
    task: str = "digits"
    device_name: str = "NVIDIA H200"
    reason: str = "ValueError: batch has 3 channels, 1 was needed"
    settings: Mapping[str, Any] = field(default_factory=lambda: {"epochs": 3})
    seed: int = 0


def write_sweep(
    folder: Path, sweep: FakeSweep | None = None, points: Sequence[Mapping[str, Any]] | None = None
) -> Path:
    """Write ``sweep.jsonl`` with the whole grid, or with some points."""
    sweep = sweep or FakeSweep()
    folder.mkdir(parents=True, exist_ok=True)
    chosen = list(points) if points is not None else grid(sweep.space)
    ledger = Ledger(folder)
    ledger.begin(header(sweep, len(chosen)))
    for number, point in enumerate(chosen[: len(chosen) - sweep.left], start=1):
        ledger.add(trial_row(sweep, number, point))
    ledger.close()
    return folder


def write_record(
    folder: Path, sweep: FakeSweep | None = None, points: Sequence[Mapping[str, Any]] | None = None
) -> SweepRecord:
    """Write a ledger and read it back."""
    return read_sweep_record(write_sweep(folder, sweep, points))


def grid(space: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def header(sweep: FakeSweep, trials: int) -> dict[str, Any]:
    return {
        "version": "0.1.0",
        "task": sweep.task,
        "space": {name: ",".join(map(str, values)) for name, values in sweep.space.items()},
        "search": sweep.search,
        "trials": trials,
        "seed": sweep.seed,
        "objective": sweep.objective,
        "asha": bool(sweep.stopped),
        "trial_seconds": 20.0,
        "trial_steps": None,
        "settings": dict(sweep.settings),
        "kind": "gpu" if sweep.gpu else "cpu",
        "devices": sweep.devices,
        "device_name": sweep.device_name,
        "cores_per_worker": 4,
        "samples": 60_000,
        "epochs": 3,
    }


def trial_row(sweep: FakeSweep, number: int, point: Mapping[str, Any]) -> TrialRow:
    """Return a trial, ended as the sweep describes."""
    completed = completed_row(sweep, number, point)
    point = dict(point)
    if (completed.workers or 1) > sweep.devices:
        reason = f"needs {completed.workers} devices, the cluster has {sweep.devices}"
        return TrialRow(number, point, "infeasible", reason)
    if number in sweep.failing:
        return TrialRow(number, point, "failed", sweep.reason, seconds=2.1)
    if (completed.peak_memory_bytes or 0) > sweep.memory:
        reason = f"CUDA out of memory: batch {completed.batch_size}"
        return TrialRow(number, point, "out_of_memory", reason, seconds=3.4)
    if number in sweep.stopped:
        reason = "others were faster by step 20"
        return replace(completed, status="stopped", reason=reason, seconds=4.0, steps=20)
    return completed


def completed_row(sweep: FakeSweep, number: int, point: Mapping[str, Any]) -> TrialRow:
    """Return the trial as if it had completed."""
    chance = random.Random(f"{sweep.seed} {sorted(point.items())}")
    workers = int(point.get("workers", 1))
    batch = _batch_size(point)
    accumulation = int(point.get("accumulation_steps", 1))
    precision = "bf16" if point.get("precision") in ("bf16", "auto") else str(point.get("precision", "fp32"))
    strategy = "single" if workers == 1 else str(point.get("parallel_strategy", "data_parallel"))
    sample_s = 0.00016 if precision == "bf16" else 0.0004
    compiled_gain = 1.3 if point.get("compile") == "on" else 1
    compute_s = accumulation * (0.004 + batch * sample_s / compiled_gain)
    exchange_cost = 2.2 if strategy == "expert_parallel" else 1.4
    communication_s = 0.0 if workers == 1 else 0.003 * math.log2(workers) * exchange_cost
    step_s = (compute_s + communication_s) * chance.uniform(0.99, 1.01)
    rate = workers * batch * accumulation / step_s
    shares = {"data": 0.04, "forward": 0.31, "backward": 0.52, "optimizer": 0.1}
    phases = {name: share * compute_s for name, share in shares.items()}
    if communication_s:
        phases["communication"] = communication_s
    # The order of the random draws decides the figures that tests compare with.
    return TrialRow(
        trial=number,
        point=dict(point),
        status="completed",
        seconds=round(6 + 40 * step_s, 2),
        start_seconds=2.5,
        workers=workers,
        device="cuda" if sweep.gpu else "cpu",
        strategy=strategy,
        precision=precision,
        batch_size=batch,
        accumulation_steps=accumulation,
        global_batch_size=workers * batch * accumulation,
        compile=point.get("compile") == "on",
        samples_per_second=rate,
        interval=chance.uniform(0.004, 0.028),
        units_per_second=128 * rate if sweep.experts else rate,
        unit="tokens" if sweep.experts else "samples",
        step_seconds=step_s,
        steps=40,
        peak_memory_bytes=int((800 + batch * (40 if precision == "bf16" else 80)) * MIB),
        phases=phases,
        train_loss=1.2 + chance.random() / 10,
        validation_loss=_loss(point, chance) if sweep.objective == "validation_loss" else None,
    )


def _batch_size(point: Mapping[str, Any]) -> int:
    batch = point.get("batch_size", 64)
    return batch if isinstance(batch, int) else 128


def _loss(point: Mapping[str, Any], chance: random.Random) -> float:
    rate = float(point.get("learning_rate", 1e-3))
    return 0.3 + 0.2 * abs(math.log10(rate / 2e-3)) + 0.05 * chance.random()


MIXED = FakeSweep(devices=2, memory=16 * GIB, failing=(2,), stopped=(5, 9))
"""A sweep with every status."""
EXPERTS = FakeSweep(
    space={
        "parallel_strategy": ("data_parallel", "expert_parallel"),
        "workers": (1, 2, 4, 8),
        "batch_size": (8, 32),
    },
    devices=8,
    experts=True,
    task="text",
)
ONE = FakeSweep(space={"batch_size": (16,)})
SINGLE = FakeSweep(space={"batch_size": (16, 32, 64, 128, 256)}, gpu=False, device_name="AMD EPYC 7763")
STRONG = FakeSweep(space={"batch_size": (32, 64, 128), "workers": (1, 2, 4)})
NOTHING = FakeSweep(space={"precision": ("fp32", "bf16"), "workers": (2, 16)}, failing=(1, 3))
HOSTILE = FakeSweep(
    space={"precision": ("fp32", EVIL), "batch_size": (16, 256), "workers": (1, 2)},
    devices=2,
    failing=(3, 7),
    task=EVIL,
    device_name=EVIL,
    reason=EVIL,
    settings={"data_dir": EVIL, "epochs": 3},
)
SWEEPS = {
    "mixed": MIXED,
    "experts": EXPERTS,
    "one": ONE,
    "single": SINGLE,
    "strong": STRONG,
    "nothing": NOTHING,
    "hostile": HOSTILE,
    "by loss": FakeSweep(objective="validation_loss", stopped=(3,)),
    "halfway": FakeSweep(left=20),
    "empty": FakeSweep(left=36),
}


def random_points(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return points as a random search draws them, also from ranges."""
    chance = random.Random(seed)
    return [
        {
            "learning_rate": 10 ** chance.uniform(-4, -1.5),
            "batch_size": chance.choice((8, 16, 32, 64, 128, 256, 512)),
            "precision": chance.choice(("fp32", "bf16")),
            "workers": chance.choice((1, 2, 4)),
            "weight_decay": chance.uniform(0, 0.1),
            "compile": chance.choice(("on", "off")),
        }
        for _ in range(count)
    ]
