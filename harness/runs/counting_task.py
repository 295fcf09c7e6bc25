"""A task that counts the calls of its process into Ray during a run, for a test that there are
none."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import ray
import ray.actor
import ray.remote_function
from ray._private.worker import Worker, global_worker

from harness.faults.faulty_task import FaultyDigits
from orchestrator.tasks.task import Loss

CALLS: Counter[str] = Counter()
ENTRIES: tuple[tuple[Any, str], ...] = (
    (ray, "get"),
    (ray, "put"),
    (ray, "wait"),
    (ray.actor.ActorMethod, "_remote"),
    (ray.remote_function.RemoteFunction, "_remote"),
    (Worker, "put_object"),
    (Worker, "get_objects"),
)
"""Functions that every call into Ray passes through."""


def count_calls(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        CALLS[name] += 1
        return original(*arguments, **named)

    setattr(owner, name, call)


class CountingFaultyDigits(FaultyDigits):
    """The digits with faults, and with calls into Ray counted from the first loss on and written to the run
    folder at each loss."""

    losses = 0

    def loss(self, model: Any, batch: Any) -> Loss:
        if global_worker.mode != ray.WORKER_MODE:  # the driver, which traces the model
            return super().loss(model, batch)
        if CountingFaultyDigits.losses == 0:
            for owner, name in ENTRIES:
                count_calls(owner, name)
        CountingFaultyDigits.losses += 1
        counts = {"losses": CountingFaultyDigits.losses, "calls": dict(CALLS)}
        path = Path(str(self.config.run.run_dir), f"calls-{os.getpid()}.json")
        path.write_text(json.dumps(counts))
        return super().loss(model, batch)
