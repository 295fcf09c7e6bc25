"""Run folders as a training would leave them, without a training: dense or with experts, on a CPU or a GPU, ended in
any way a run can end. Figures are a function of the seed, so a test may look at them twice."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestrator.record.events import Event, encode_event
from orchestrator.types import GIB, MIB

T0 = 1_780_000_000.0
PHASES_PARALLEL = {"data": 0.03, "forward": 0.30, "backward": 0.44, "communication": 0.12, "optimizer": 0.08}
PHASES_CPU = {"data": 0.04, "forward": 0.34, "backward": 0.50, "optimizer": 0.09}


@dataclass(frozen=True)
class FakeRun:
    """What the folder shall tell. ``broken`` maps steps to losses that are no number."""

    steps: int = 120
    epochs: int = 4
    step_s: float = 0.08
    gpu: bool = False
    experts: int = 0
    layers: int = 4
    skew: float = 0.4
    """How unevenly the experts are used; 0 is evenly."""
    phases: dict[str, float] = field(default_factory=lambda: dict(PHASES_CPU))
    """Shares of a step; what is missing to 1 is neither."""
    utilization: float = 88.0
    evaluate_s: float = 0.1
    checkpoint_s: float = 0.05
    peak_bytes: int = 0
    ooms: int = 0
    broken: dict[int, str] = field(default_factory=dict)
    resume_at: int = 0
    """The first process dies here; the second takes up from the last checkpoint and replays."""
    workers: int = 1
    recover_at: int = 0
    """A worker is lost here; the run goes on from the last checkpoint with new processes, one fewer where there are three or more."""
    recovery_s: float = 12.3
    hosted: bool = False
    """Expert-parallel: the workers are hosts of experts, and rows travel between them."""
    sizes: tuple[int, ...] = (32, 64, 64, 128, 256)
    """Hidden sizes of the experts, over and over until each has one."""
    speeds: tuple[float, ...] = (1.0,)
    """Speeds of the hosts, as multiples of one, over and over until each has one."""
    method: str = "lpt"
    exchange: float = 0.12
    """Share of a step that is waited for the exchange."""
    ends: str = "completed"
    """completed, stopped, failed, or killed: no end event and no summary."""
    name: str = "fake"
    warnings: tuple[str, ...] = ()
    compiled: str = ""
    seed: int = 0

    @property
    def batch(self) -> int:
        return 256 if self.gpu else 64

    @property
    def units(self) -> int:
        return self.batch * 128 if self.experts else self.batch

    @property
    def per_epoch(self) -> int:
        return max(1, self.steps // self.epochs)

    @property
    def strategy(self) -> str:
        return "expert_parallel" if self.hosted else "data_parallel" if self.workers > 1 else "single"

    @property
    def workers_after(self) -> int:
        return self.workers - 1 if self.recover_at and self.workers > 2 else self.workers

    @property
    def peak(self) -> int:
        return self.peak_bytes or (int(31.2 * GIB) if self.gpu else 180 * MIB)

    @property
    def limit(self) -> int | None:
        return int(0.9 * 139 * GIB) if self.gpu else 7 * GIB


def write_run(folder: Path, run: FakeRun | None = None) -> Path:
    """Writes config.yaml, plan.json, events.jsonl and (unless killed) summary.json."""
    run = run or FakeRun()
    folder.mkdir(parents=True, exist_ok=True)
    events = run_events(run)
    (folder / "config.yaml").write_text(yaml.safe_dump(_config(run)))
    (folder / "plan.json").write_text(json.dumps(_plan(run)))
    write_events(folder, events)
    if run.ends != "killed":
        (folder / "summary.json").write_text(encode_event(_summary(run, events)))
    return folder


def write_events(folder: Path, events: list[Event]) -> Path:
    """A folder that holds events and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(encode_event(event) + "\n" for event in events))
    return folder


class _Teller:
    """Writes the events of a run one after the other, with a clock of its own."""

    def __init__(self, run: FakeRun) -> None:
        self.run, self.events, self.clock = run, [], T0
        self.workers = run.workers
        self.draw = random.Random(run.seed)

    def say(self, event: str, took: float = 0.0, **fields: Any) -> None:
        self.clock += took
        self.events.append({"event": event, "time": round(self.clock, 3), **fields})

    def start(self, step: int) -> None:
        run = self.run
        joined = (
            {"backend": "nccl" if run.gpu else "gloo", "sharding": "none", "nodes": 1}
            if run.workers > 1
            else {}
        )
        joined |= {"gate": "replicated"} if run.hosted else {}
        self.say(
            "start", version="0.1.0", task="text" if run.experts else "digits", strategy=run.strategy, workers=self.workers, **joined,
            device="cuda:0" if run.gpu else "cpu", precision="bf16" if run.gpu else "fp32", global_batch_size=run.batch,
            parameters=8_421_376 if run.experts else 203_530, total_steps=run.steps, step=step,
        )  # fmt: skip
        if run.compiled:
            self.say("compile", took=21.4, status=run.compiled, seconds=21.4, detail="default, all parts")
        for message in run.warnings:
            self.say("warning", took=0.2, kind="memory", message=message)
        if run.hosted:
            self.say("placement", **placement(run, self.workers, step))

    def step(self, step: int) -> None:
        run, done = self.run, step / max(1, self.run.steps)
        loss = 2.3 * math.exp(-3.2 * done) + 0.12 + 0.12 * self.draw.gauss(0, 1) * math.exp(-1.5 * done)
        rate = 3e-3 * min(1.0, step / max(1.0, 0.05 * run.steps)) * (0.55 + 0.45 * math.cos(math.pi * done))
        accuracy = min(0.995, 1 - 0.9 * math.exp(-4 * done) + 0.02 * self.draw.gauss(0, 1))
        seconds = run.step_s * (1 + 0.08 * abs(self.draw.gauss(0, 1))) * (4 if step == 1 else 1)
        self.say(
            "step", took=seconds, step=step, epoch=(step - 1) // run.per_epoch, loss=run.broken.get(step, max(0.01, loss)),
            grad_norm=abs(1.4 * math.exp(-2 * done) + 0.25 * self.draw.gauss(0, 1)) + 0.1, lr=rate, samples=run.batch, units=run.units,
            seconds=seconds, metrics={"accuracy": accuracy},
        )  # fmt: skip
        if step % 10 == 0 or step == run.steps:
            self.measured(step, done)

    def measured(self, step: int, done: float) -> None:
        run, width = self.run, 10
        parts = {name: share * run.step_s for name, share in run.phases.items()}
        self.say("phases", step=step, steps=width, **parts, total=run.step_s)
        if run.hosted:
            rows = round(run.units * 2 * run.layers * (1 - 1 / self.workers))
            self.say(
                "exchange",
                step=step,
                steps=width,
                bytes=rows * 2 * 256 * 2,
                seconds=run.exchange * run.step_s,
                rows=rows,
            )
        if run.experts:
            self.say(
                "load", step=step, steps=width, loads=[self.loads(layer, done) for layer in range(run.layers)]
            )
        self.say("monitor", step=step, host=self.host(), devices=[self.device()] if run.gpu else [])

    def loads(self, layer: int, done: float) -> list[int]:
        """Experts start unevenly and settle, each layer with favourites of its own."""
        taste = random.Random(f"{self.run.seed}-{layer}")
        pulls = [
            math.exp(self.run.skew * (1.6 - done) * taste.gauss(0, 1) + 0.05 * self.draw.gauss(0, 1))
            for _ in range(self.run.experts)
        ]
        return [round(pull / sum(pulls) * self.run.units * 2 * 10) for pull in pulls]

    def host(self) -> dict[str, Any]:
        busy = (35 if self.run.gpu else 92) + self.draw.uniform(-6, 6)
        return {
            "cpu_percent": busy,
            "memory_used": 3 * GIB,
            "memory_total": 8 * GIB,
            "process_memory": 700 * MIB,
        }

    def device(self) -> dict[str, Any]:
        return {
            "index": 0, "name": "NVIDIA H200", "memory_used": self.run.peak, "memory_total": 139 * GIB, "process_memory": None,
            "utilization": min(100.0, self.run.utilization + self.draw.uniform(-5, 5)), "memory_utilization": 40.0,
            "temperature": 55 + self.draw.uniform(-2, 9), "power": 520 + self.draw.uniform(-60, 60),
        }  # fmt: skip

    def epoch(self, step: int) -> None:
        run, number = self.run, (step - 1) // self.run.per_epoch
        memory = (
            {"allocated": run.peak, "reserved": int(run.peak * 1.18)}
            if run.gpu
            else {"allocated": run.peak, "reserved": None}
        )
        took = run.per_epoch * run.step_s * (1 + 0.05 * self.draw.random())
        samples = run.per_epoch * run.batch
        done = step / run.steps
        self.say("epoch", epoch=number, step=step, seconds=took, samples=samples, loss=2.3 * math.exp(-3.2 * done) + 0.12,
                 samples_per_second=samples / took, memory=memory)  # fmt: skip
        loss, accuracy = 2.2 * math.exp(-2.9 * done) + 0.16, 1 - 0.88 * math.exp(-3.6 * done)
        self.say("evaluate", took=run.evaluate_s, step=step, epoch=number, loss=loss, metrics={"accuracy": accuracy}, samples=360,
                 seconds=run.evaluate_s, best=True)  # fmt: skip
        path = f"checkpoints/step_{step:08d}"
        held = {"stall": run.checkpoint_s / 10} if run.workers > 1 else {}
        stall = held.get("stall", run.checkpoint_s)
        self.say(
            "checkpoint", took=stall, step=step, path=path, bytes=2_443_112, seconds=run.checkpoint_s, **held
        )

    def recovery(self, lost_at: int, step: int) -> None:
        run, before, self.workers = self.run, self.workers, self.run.workers_after
        self.say(
            "failure", took=0.2, kind="worker", message="worker 1 was lost", rank=1, step=lost_at, final=False
        )
        parts = {
            name: share * run.recovery_s
            for name, share in (("detect", 0.1), ("regroup", 0.8), ("restore", 0.1))
        }
        self.say(
            "recovery", took=run.recovery_s, attempt=1, workers_before=before, workers=self.workers, step=step, lost_steps=lost_at - step,
            **{f"{name}_seconds": seconds for name, seconds in parts.items()}, total_seconds=run.recovery_s, reason="a worker was lost",
            source="memory" if run.hosted else "disk",
        )  # fmt: skip

    def session(self, first: int, last: int) -> None:
        run = self.run
        self.start(first - 1)
        if first > 1:
            self.say("resume", step=first - 1, path=f"checkpoints/step_{first - 1:08d}", skipped=[])
        for step in range(first, last + 1):
            for index in range(run.ooms if step == first else 0):
                micro = run.batch >> index
                self.say("oom", step=step, micro_batch=micro, next_micro_batch=micro // 2, where="backward")
            self.step(step)
            if step % run.per_epoch == 0:
                self.epoch(step)


def placement(run: FakeRun, hosts: int, step: int = 0) -> dict[str, Any]:
    """The fields of a placement: the largest experts first, each to the host that is then done first (or in turn)."""
    speeds = [run.speeds[rank % len(run.speeds)] for rank in range(hosts)]
    sizes = [run.sizes[expert % len(run.sizes)] for expert in range(run.experts)]
    whole, told = sum(sizes), []
    for layer in range(run.layers):
        seconds, host_of = [0.0] * hosts, [0] * run.experts
        # A layer begins where the one before it ended, as the hosts of equal layers would else always be the same ones.
        order = sorted(range(run.experts), key=lambda expert: -sizes[(expert + layer) % run.experts])
        here = [sizes[(expert + layer) % run.experts] for expert in range(run.experts)]
        for expert in order:
            done = [seconds[rank] + here[expert] / speeds[rank] for rank in range(hosts)]
            host = expert % hosts if run.method == "round_robin" else done.index(min(done))
            host_of[expert], seconds[host] = host, done[host]
        bound, slowest = max(whole / sum(speeds), max(sizes) / max(speeds)), max(seconds)
        told.append({
            "name": f"blocks.{layer}.ffn", "host_of": host_of, "sizes": here, "costs": [size / whole for size in here],
            "seconds": [each * 1e-6 for each in seconds], "bound": bound * 1e-6, "imbalance": slowest * sum(speeds) / whole,
            "gap": slowest / bound - 1,
        })  # fmt: skip
    devices = [
        {"rank": rank, "node": f"10.0.0.{rank + 1}", "device": "cuda:0" if run.gpu else "cpu",
         "name": "NVIDIA H200" if run.gpu else "AMD EPYC 7R13", "speed": speed * (4.1e14 if run.gpu else 9.3e10),
         "memory": 139 * GIB if run.gpu else None}
        for rank, speed in enumerate(speeds)
    ]  # fmt: skip
    worst = max((layer["imbalance"] for layer in told), default=1.0)
    sentence = f"{run.experts} experts of {run.layers} layers on {hosts} hosts ({run.method}), slowest host {worst:.2f} times the mean"
    return {"step": step, "method": run.method, "hosts": devices, "layers": told, "sentence": sentence}


def run_events(run: FakeRun) -> list[Event]:
    teller = _Teller(run)
    first = 1
    if run.resume_at:
        teller.session(1, run.resume_at)
        teller.clock += 300
        first = run.resume_at // run.per_epoch * run.per_epoch + 1
    if run.recover_at:
        teller.session(first, run.recover_at)
        first = run.recover_at // run.per_epoch * run.per_epoch + 1
        teller.recovery(run.recover_at, first - 1)
    teller.session(first, run.steps)
    if run.ends == "failed":
        teller.say("failure", kind="TaskFailed", message="ValueError: batch has 3 channels, the model takes 1 (task.py:41)",
                   rank=None, step=run.steps, final=True)  # fmt: skip
    if run.ends != "killed":
        reason = {"completed": "all epochs done", "stopped": "early stopping", "failed": "the task raised"}[
            run.ends
        ]
        teller.say(
            "end", took=0.1, status=run.ends, reason=reason, steps=run.steps, seconds=teller.clock - T0
        )
    return teller.events


def _config(run: FakeRun) -> dict[str, Any]:
    return {
        "task": "text" if run.experts else "digits",
        "run": {"name": run.name, "epochs": run.epochs, "early_stopping_metric": "accuracy"},
        "moe": {"experts": run.experts},
        "device": {"precision": "auto", "compile": bool(run.compiled)},
    }


def _plan(run: FakeRun) -> dict[str, Any]:
    base = run.peak * 0.9
    parts = {
        "parameters": 0.08,
        "gradients": 0.08,
        "optimizer": 0.16,
        "activations": 0.66,
        "gate": 0.02 if run.experts else 0.0,
    }
    memory = {name: int(share * base) for name, share in parts.items()}
    return {
        "choices": {
            "precision": {
                "value": "bf16" if run.gpu else "fp32",
                "reason": "compute capability 9.0 has bf16 units" if run.gpu else "this CPU has no bf16 units; bf16 would be emulated",
                "rejected": [{"option": "fp16", "why": "needs loss scaling and is no faster here"}],
            },
            "batch_size": {"value": run.batch, "reason": "the largest power of two whose estimate stays below the limit", "rejected": []},
            "loader_workers": {
                "value": 0,
                "reason": "the whole set lies in memory, and a process per batch costs more than it saves",
                "rejected": [{"option": "2", "why": "one core would be left for the training itself"}],
            },
            "activation_checkpointing": {"value": False, "reason": "the estimate fits without it", "rejected": []},
        },
        "memory": memory | {"total": sum(memory.values()), "limit": run.limit},
        "flops_per_step": 4.1e13 if run.gpu else 7.8e8,
        "settings": [
            {"name": "task", "value": "text" if run.experts else "digits", "origin": "flag --task"},
            {"name": "run.epochs", "value": run.epochs, "origin": "file cfg.yaml:3"},
            {"name": "run.seed", "value": 0, "origin": "default"},
            {"name": "moe.experts", "value": run.experts, "origin": "flag --experts"},
            {"name": "optim.learning_rate", "value": 0.003, "origin": "default"},
            {"name": "optim.schedule", "value": "cosine", "origin": "default"},
            {"name": "data.data_dir", "value": None, "origin": "default"},
            {"name": "device.compile", "value": bool(run.compiled), "origin": "default"},
            {"name": "watch.trackers", "value": ["tensorboard"], "origin": "default"},
        ],
        "hardware": {"device": "NVIDIA H200" if run.gpu else "AMD EPYC 7R13", "cores": 2, "ram": 8 * GIB, "torch": "2.13.0"},
    }  # fmt: skip


def _summary(run: FakeRun, events: list[Event]) -> dict[str, Any]:
    steps = [event for event in events if event["event"] == "step"]
    tested = [event for event in events if event["event"] == "evaluate"]
    seconds = sum(event["seconds"] for event in steps)
    return {
        "status": run.ends, "steps": run.steps, "epochs": run.epochs if steps else 0, "strategy": run.strategy,
        "workers": run.workers_after, "global_batch_size": run.batch,
        "device": "cuda:0" if run.gpu else "cpu", "precision": "bf16" if run.gpu else "fp32",
        "samples_per_second": run.batch * len(steps) / seconds if seconds else None, "train_loss": steps[-1]["loss"] if steps else None,
        "validation": {"loss": tested[-1]["loss"]} | tested[-1]["metrics"] if tested else {}, "peak_memory_bytes": run.peak,
        "failures": int(bool(run.recover_at)), "recoveries": int(bool(run.recover_at)),
        "lost_steps": len(steps) - len({event["step"] for event in steps}), "goodput": 1.0,
        "seconds": events[-1]["time"] - T0,
    }  # fmt: skip
