"""Events as a training would write them, without a training: dense or with experts, on a CPU or a
GPU, ended in any way.

Figures are a function of the seed, so that a test may compute them twice.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.types import GIB, MIB

START_TIME = 1_780_000_000.0
LOG_INTERVAL = 10
"""Steps between events that are averages over steps."""
PHASES_CPU = {"data": 0.04, "forward": 0.34, "backward": 0.50, "optimizer": 0.09}
PHASES_PARALLEL = {"data": 0.03, "forward": 0.30, "backward": 0.44, "communication": 0.12, "optimizer": 0.08}


@dataclass(frozen=True)
class FakeRun:
    """Description of a run."""

    steps: int = 120
    epochs: int = 4
    step_s: float = 0.08
    gpu: bool = False
    experts: int = 0
    layers: int = 4
    skew: float = 0.4
    """Imbalance of the experts; 0 is balanced."""
    phases: dict[str, float] = field(default_factory=lambda: dict(PHASES_CPU))
    """Fractions of a step; the rest belongs to no phase."""
    utilization: float = 88.0
    evaluate_s: float = 0.1
    checkpoint_s: float = 0.05
    peak_bytes: int = 0
    ooms: int = 0
    broken: dict[int, str] = field(default_factory=dict)
    """Losses that are nan or infinite, by step."""
    resume_at: int = 0
    """The first process dies here; the second resumes from the last checkpoint and replays steps."""
    workers: int = 1
    recover_at: int = 0
    """A worker is lost here. New processes continue from the last checkpoint, one fewer if there
    were three or more."""
    recovery_s: float = 12.3
    hosted: bool = False
    """Expert parallel: the workers are hosts of experts, and rows are sent between them."""
    sizes: tuple[int, ...] = (32, 64, 64, 128, 256)
    """Hidden sizes of the experts, repeated until each has one."""
    speeds: tuple[float, ...] = (1.0,)
    """Relative speeds of the hosts, repeated until each has one."""
    method: str = "lpt"
    exchange: float = 0.12
    """Fraction of a step spent waiting for the exchange."""
    ends: str = "completed"
    """completed, stopped, failed, or killed: no end event and no summary."""
    name: str = "fake"
    warnings: tuple[str, ...] = ()
    compiled: str = ""
    seed: int = 0
    taken: tuple[str, ...] = (
        "balance_bias", "balance_loss", "experts", "learning_rate", "top_k", "weight_decay",
    )  # fmt: skip
    """Settings of the model, its experts and its optimizer that the run can take."""

    @property
    def batch(self) -> int:
        return 256 if self.gpu else 64

    @property
    def units(self) -> int:
        return self.batch * 128 if self.experts else self.batch

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.steps // self.epochs)

    @property
    def task(self) -> str:
        return "text" if self.experts else "digits"

    @property
    def device(self) -> str:
        return "cuda:0" if self.gpu else "cpu"

    @property
    def device_name(self) -> str:
        return "NVIDIA H200" if self.gpu else "AMD EPYC 7R13"

    @property
    def precision(self) -> str:
        return "bf16" if self.gpu else "fp32"

    @property
    def strategy(self) -> str:
        if self.hosted:
            return "expert_parallel"
        return "data_parallel" if self.workers > 1 else "single"

    @property
    def workers_after(self) -> int:
        return self.workers - 1 if self.recover_at and self.workers > 2 else self.workers

    @property
    def peak(self) -> int:
        return self.peak_bytes or (int(31.2 * GIB) if self.gpu else 180 * MIB)


def run_events(run: FakeRun) -> list[Event]:
    """Return the events of a run, from its first start to its end."""
    writer = _EventWriter(run)
    first = 1
    if run.resume_at:
        writer.session(1, run.resume_at)
        writer.clock += 300
        first = _after_last_checkpoint(run, run.resume_at)
    if run.recover_at:
        writer.session(first, run.recover_at)
        first = _after_last_checkpoint(run, run.recover_at)
        writer.recovery(run.recover_at, first - 1)
    writer.session(first, run.steps)
    writer.end()
    return writer.events


def _after_last_checkpoint(run: FakeRun, step: int) -> int:
    return step // run.steps_per_epoch * run.steps_per_epoch + 1


class _EventWriter:
    """Writes the events of a run in order, with a clock of its own."""

    def __init__(self, run: FakeRun) -> None:
        self.run = run
        self.events: list[Event] = []
        self.clock = START_TIME
        self.workers = run.workers
        self.draw = random.Random(run.seed)

    def write(self, event: str, took_s: float = 0.0, **fields: Any) -> None:
        self.clock += took_s
        self.events.append({"event": event, "time": round(self.clock, 3), **fields})

    def session(self, first: int, last: int) -> None:
        """Write the events of a process that runs the steps ``first`` to ``last``."""
        run = self.run
        if first > 1:
            self.write("resume", step=first - 1, path=f"checkpoints/step_{first - 1:08d}", skipped=[])
        self.start(first - 1)
        for step in range(first, last + 1):
            for index in range(run.ooms if step == first else 0):
                micro = run.batch >> index
                self.write("oom", step=step, micro_batch=micro, next_micro_batch=micro // 2, where="backward")
            self.step(step)
            if step % run.steps_per_epoch == 0:
                self.epoch(step)

    def start(self, step: int) -> None:
        run = self.run
        parallel: dict[str, Any] = {}
        if run.workers > 1:
            parallel = {"backend": "nccl" if run.gpu else "gloo", "sharding": "none", "nodes": 1}
        if run.hosted:
            parallel["gate"] = "replicated"
        self.write(
            "start",
            version="0.1.0",
            task=run.task,
            strategy=run.strategy,
            workers=self.workers,
            **parallel,
            device=run.device,
            precision=run.precision,
            global_batch_size=run.batch,
            parameters=8_421_376 if run.experts else 203_530,
            total_steps=run.steps,
            step=step,
            best_by="accuracy:max",
        )
        if run.compiled:
            detail = "default, all parts"
            self.write("compile", took_s=21.4, status=run.compiled, seconds=21.4, detail=detail)
        for message in run.warnings:
            self.write("warning", took_s=0.2, kind="memory", message=message)
        if run.hosted:
            self.write("placement", **placement(run, self.workers, step))

    def step(self, step: int) -> None:
        run = self.run
        progress = step / max(1, run.steps)
        noise = 0.12 * self.draw.gauss(0, 1) * math.exp(-1.5 * progress)
        loss = max(0.01, 2.3 * math.exp(-3.2 * progress) + 0.12 + noise)
        warm_up = min(1.0, step / max(1.0, 0.05 * run.steps))
        accuracy = min(0.995, 1 - 0.9 * math.exp(-4 * progress) + 0.02 * self.draw.gauss(0, 1))
        seconds = run.step_s * (1 + 0.08 * abs(self.draw.gauss(0, 1))) * (4 if step == 1 else 1)
        self.write(
            "step",
            took_s=seconds,
            step=step,
            epoch=(step - 1) // run.steps_per_epoch,
            loss=run.broken.get(step, loss),
            grad_norm=abs(1.4 * math.exp(-2 * progress) + 0.25 * self.draw.gauss(0, 1)) + 0.1,
            lr=3e-3 * warm_up * (0.55 + 0.45 * math.cos(math.pi * progress)),
            samples=run.batch,
            units=run.units,
            seconds=seconds,
            metrics={"accuracy": accuracy},
        )
        if step % LOG_INTERVAL == 0 or step == run.steps:
            self.averages(step, progress)

    def averages(self, step: int, progress: float) -> None:
        """Write the events that are averages over the last steps."""
        run = self.run
        common = {"step": step, "steps": LOG_INTERVAL}
        phases = {name: share * run.step_s for name, share in run.phases.items()}
        self.write("phases", **common, **phases, total=run.step_s)
        if run.hosted:
            rows = round(run.units * 2 * run.layers * (1 - 1 / self.workers))
            seconds = run.exchange * run.step_s
            self.write("exchange", **common, bytes=rows * 2 * 256 * 2, seconds=seconds, rows=rows)
        if run.experts:
            loads = [self.loads(layer, progress) for layer in range(run.layers)]
            self.write("load", **common, loads=loads)
        self.write("monitor", step=step, host=self.host(), devices=[self.gpu()] if run.gpu else [])

    def loads(self, layer: int, progress: float) -> list[int]:
        """Return the loads of a layer: unbalanced at first, settling, with favourites of its own."""
        favourites = random.Random(f"{self.run.seed}-{layer}")
        weights = []
        for _ in range(self.run.experts):
            preference = self.run.skew * (1.6 - progress) * favourites.gauss(0, 1)
            weights.append(math.exp(preference + 0.05 * self.draw.gauss(0, 1)))
        return [round(weight / sum(weights) * self.run.units * 2 * LOG_INTERVAL) for weight in weights]

    def host(self) -> dict[str, Any]:
        return {
            "cpu_percent": (35 if self.run.gpu else 92) + self.draw.uniform(-6, 6),
            "memory_used": 3 * GIB,
            "memory_total": 8 * GIB,
            "process_memory": 700 * MIB,
        }

    def gpu(self) -> dict[str, Any]:
        return {
            "index": 0,
            "name": "NVIDIA H200",
            "memory_used": self.run.peak,
            "memory_total": 139 * GIB,
            "process_memory": None,
            "utilization": min(100.0, self.run.utilization + self.draw.uniform(-5, 5)),
            "memory_utilization": 40.0,
            "temperature": 55 + self.draw.uniform(-2, 9),
            "power": 520 + self.draw.uniform(-60, 60),
        }

    def epoch(self, step: int) -> None:
        """Write the end of an epoch, its evaluation and its checkpoint."""
        run = self.run
        number = (step - 1) // run.steps_per_epoch
        progress = step / run.steps
        seconds = run.steps_per_epoch * run.step_s * (1 + 0.05 * self.draw.random())
        samples = run.steps_per_epoch * run.batch
        self.write(
            "epoch",
            epoch=number,
            step=step,
            seconds=seconds,
            samples=samples,
            loss=2.3 * math.exp(-3.2 * progress) + 0.12,
            samples_per_second=samples / seconds,
            memory={
                "allocated": run.peak,
                "reserved": int(run.peak * 1.18) if run.gpu else None,
                "parts": measured_parts(run),
                **({"worker": run.workers - 1} if run.workers > 1 else {}),
            },
        )
        self.write(
            "evaluate",
            took_s=run.evaluate_s,
            step=step,
            epoch=number,
            loss=2.2 * math.exp(-2.9 * progress) + 0.16,
            metrics={"accuracy": 1 - 0.88 * math.exp(-3.6 * progress)},
            samples=360,
            seconds=run.evaluate_s,
            best=True,
        )
        # On several workers the checkpoint is written in the background.
        stall = {"stall": run.checkpoint_s / 10} if run.workers > 1 else {}
        self.write(
            "checkpoint",
            took_s=stall.get("stall", run.checkpoint_s),
            step=step,
            path=f"checkpoints/step_{step:08d}",
            bytes=2_443_112,
            seconds=run.checkpoint_s,
            **stall,
        )

    def recovery(self, lost_at: int, step: int) -> None:
        run = self.run
        workers_before = self.workers
        self.workers = run.workers_after
        message = "worker 1 was lost"
        self.write("failure", took_s=0.2, kind="worker", message=message, rank=1, step=lost_at, final=False)
        self.write(
            "recovery",
            took_s=run.recovery_s,
            attempt=1,
            workers_before=workers_before,
            workers=self.workers,
            step=step,
            lost_steps=lost_at - step,
            detect_seconds=0.1 * run.recovery_s,
            regroup_seconds=0.8 * run.recovery_s,
            restore_seconds=0.1 * run.recovery_s,
            total_seconds=run.recovery_s,
            reason="a worker was lost",
            source="memory" if run.hosted else "disk",
        )

    def end(self) -> None:
        run = self.run
        if run.ends == "killed":
            return
        if run.ends == "failed":
            message = "ValueError: batch has 3 channels, the model takes 1 (task.py:41)"
            self.write("failure", kind="TaskFailed", message=message, rank=None, step=run.steps, final=True)
        reasons = {"completed": "all epochs done", "stopped": "early stopping", "failed": "the task raised"}
        seconds = self.clock - START_TIME
        self.write(
            "end", took_s=0.1, status=run.ends, reason=reasons[run.ends], steps=run.steps, seconds=seconds
        )


def placement(run: FakeRun, num_hosts: int, step: int = 0) -> dict[str, Any]:
    """Return the fields of a placement: the largest experts first, each to the host that finishes
    first (or in turn)."""
    speeds = [run.speeds[rank % len(run.speeds)] for rank in range(num_hosts)]
    layers = [_placed_layer(run, layer, speeds) for layer in range(run.layers)]
    hosts = [
        {
            "rank": rank,
            "node": f"10.0.0.{rank + 1}",
            "device": "cuda:0" if run.gpu else "cpu",
            "name": run.device_name,
            "speed": speed * (4.1e14 if run.gpu else 9.3e10),
            "memory": 139 * GIB if run.gpu else None,
        }
        for rank, speed in enumerate(speeds)
    ]
    worst = max((layer["imbalance"] for layer in layers), default=1.0)
    sentence = (
        f"{run.experts} experts of {run.layers} layers on {num_hosts} hosts ({run.method}), "
        f"slowest host {worst:.2f} times the mean"
    )
    return {"step": step, "method": run.method, "hosts": hosts, "layers": layers, "sentence": sentence}


def _placed_layer(run: FakeRun, layer: int, speeds: list[float]) -> dict[str, Any]:
    # A layer starts with another size than the one before it. Otherwise the hosts of all layers
    # would be the same.
    sizes = [run.sizes[(expert + layer) % run.experts % len(run.sizes)] for expert in range(run.experts)]
    total = sum(sizes)
    seconds = [0.0] * len(speeds)
    host_of = [0] * run.experts
    for expert in sorted(range(run.experts), key=lambda expert: -sizes[expert]):
        done = [seconds[rank] + sizes[expert] / speed for rank, speed in enumerate(speeds)]
        host = expert % len(speeds) if run.method == "round_robin" else done.index(min(done))
        host_of[expert] = host
        seconds[host] = done[host]
    slowest = max(seconds)
    bound = max(total / sum(speeds), max(sizes) / max(speeds))
    return {
        "name": f"blocks.{layer}.ffn",
        "host_of": host_of,
        "sizes": sizes,
        "costs": [size / total for size in sizes],
        "seconds": [each * 1e-6 for each in seconds],
        "bound": bound * 1e-6,
        "imbalance": slowest * sum(speeds) / total,
        "gap": slowest / bound - 1,
    }


def measured_parts(run: FakeRun) -> dict[str, int]:
    """Return the parts of the peak: on a GPU they add up to it, on a CPU there is no rest."""
    state = {"parameters": 0.08, "gradients": 0.06, "optimizer": 0.16, "average": 0.08, "gate": 0.02}
    parts = {name: int(share * run.peak) for name, share in state.items()}
    return parts | ({"activations": run.peak - sum(parts.values())} if run.gpu else {})
