"""Run folders as a training would leave them, without a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from harness.fakes.fake_events import START_TIME, FakeRun, run_events
from orchestrator.record.events.kinds import JsonEvent as Event
from orchestrator.record.files.event_log import encode_event
from orchestrator.report.run.figures.read import RunRecord, read_run_record
from orchestrator.types import GIB


def write_run(folder: Path, run: FakeRun | None = None) -> Path:
    """Write config.yaml, plan.json, events.jsonl and (unless killed) summary.json."""
    run = run or FakeRun()
    events = run_events(run)
    write_events(folder, events)
    (folder / "config.yaml").write_text(yaml.safe_dump(_config(run)))
    (folder / "plan.json").write_text(json.dumps(_plan(run)))
    if run.ends != "killed":
        (folder / "summary.json").write_text(encode_event(_summary(run, events)))
    return folder


def write_events(folder: Path, events: list[Event]) -> Path:
    """Write a folder that holds events and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(encode_event(event) + "\n" for event in events))
    return folder


def run_record(folder: Path, run: FakeRun | None = None) -> RunRecord:
    """Write a run folder and read it back."""
    return read_run_record(write_run(folder, run))


def events_record(folder: Path, events: list[Event]) -> RunRecord:
    """Write a folder with these events only and read it back."""
    return read_run_record(write_events(folder, events))


def _config(run: FakeRun) -> dict[str, Any]:
    return {
        "task": run.task,
        "run": {"name": run.name, "epochs": run.epochs, "early_stopping_metric": "accuracy"},
        "moe": {"experts": run.experts},
        "device": {"precision": "auto", "compile": bool(run.compiled)},
    }


def _plan(run: FakeRun) -> dict[str, Any]:
    return {
        "choices": _choices(run),
        "memory": _memory(run),
        "flops_per_step": 4.1e13 if run.gpu else 7.8e8,
        "settings": [
            {"name": "task", "value": run.task, "origin": "flag --task"},
            {"name": "run.epochs", "value": run.epochs, "origin": "file cfg.yaml:3"},
            {"name": "run.seed", "value": 0, "origin": "default"},
            {"name": "moe.experts", "value": run.experts, "origin": "flag --experts"},
            {"name": "optim.learning_rate", "value": 0.003, "origin": "default"},
            {"name": "optim.schedule", "value": "cosine", "origin": "default"},
            {"name": "data.data_dir", "value": None, "origin": "default"},
            {"name": "device.compile", "value": bool(run.compiled), "origin": "default"},
            {"name": "watch.trackers", "value": ["tensorboard"], "origin": "default"},
        ],
        "model": {"settings": list(run.taken)},
        "hardware": {"device": run.device_name, "cores": 2, "ram": 8 * GIB, "torch": "2.13.0"},
    }


def _choices(run: FakeRun) -> dict[str, Any]:
    no_bf16 = "this CPU has no bf16 units; bf16 would be emulated"
    return {
        "precision": {
            "value": run.precision,
            "reason": "compute capability 9.0 has bf16 units" if run.gpu else no_bf16,
            "rejected": [{"option": "fp16", "why": "needs loss scaling and is no faster here"}],
        },
        "batch_size": {
            "value": run.batch,
            "reason": "the largest power of two whose estimate stays below the limit",
            "rejected": [],
        },
        "loader_workers": {
            "value": 0,
            "reason": "the whole set is in memory, and a process per batch costs more than it saves",
            "rejected": [{"option": "2", "why": "one core would be left for the training itself"}],
        },
        "activation_checkpointing": {
            "value": False,
            "reason": "the estimate fits without it",
            "rejected": [],
        },
    }


def _memory(run: FakeRun) -> dict[str, Any]:
    shares = {
        "parameters": 0.08,
        "gradients": 0.08,
        "optimizer": 0.16,
        "activations": 0.66,
        "gate": 0.02 if run.experts else 0.0,
    }
    estimate = run.peak * 0.9
    parts = {name: int(share * estimate) for name, share in shares.items()}
    limit = int(0.9 * 139 * GIB) if run.gpu else 7 * GIB
    return parts | {"total": sum(parts.values()), "limit": limit}


def _summary(run: FakeRun, events: list[Event]) -> dict[str, Any]:
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "evaluate"]
    seconds = sum(event["seconds"] for event in steps)
    validation = {}
    if evaluations:
        validation = {"loss": evaluations[-1]["loss"]} | evaluations[-1]["metrics"]
    return {
        "status": run.ends,
        "steps": run.steps,
        "epochs": run.epochs if steps else 0,
        "strategy": run.strategy,
        "workers": run.workers_after,
        "global_batch_size": run.batch,
        "device": run.device,
        "precision": run.precision,
        "samples_per_second": run.batch * len(steps) / seconds if seconds else None,
        "train_loss": steps[-1]["loss"] if steps else None,
        "validation": validation,
        "peak_memory_bytes": run.peak,
        "failures": int(bool(run.recover_at)),
        "recoveries": int(bool(run.recover_at)),
        "lost_steps": len(steps) - len({event["step"] for event in steps}),
        "goodput": 1.0,
        "seconds": events[-1]["time"] - START_TIME,
    }
