"""A task that counts what its process asks of Ray between the steps of a run, for a test that nothing is asked."""

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

from orchestrator.tasks.digits import Digits
from orchestrator.tasks.task import Loss

CALLS: Counter[str] = Counter()


def counted(owner: Any, name: str) -> None:
    """Count the calls of a function that leads into Ray."""
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        CALLS[name] += 1
        return real(*arguments, **named)

    setattr(owner, name, call)


class Counting(Digits):
    """Digits, with Ray's entries counted from the first loss on. At each loss the count so far is left beside the run."""

    losses = 0

    def loss(self, model: Any, batch: Any) -> Loss:
        if global_worker.mode != ray.WORKER_MODE:  # the driver, which traces the model
            return super().loss(model, batch)
        if Counting.losses == 0:
            for owner, name in (
                (ray, "get"),
                (ray, "put"),
                (ray, "wait"),
                (ray.actor.ActorMethod, "_remote"),
                (ray.remote_function.RemoteFunction, "_remote"),
                (Worker, "put_object"),
                (Worker, "get_objects"),
            ):
                counted(owner, name)
        Counting.losses += 1
        told = json.dumps({"losses": Counting.losses, "calls": dict(CALLS)})
        Path(str(self.config.run.run_dir), f"calls-{os.getpid()}.json").write_text(told)
        return super().loss(model, batch)
