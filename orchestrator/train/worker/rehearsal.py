"""A few steps of a small model on a standby's GPU.

The first step of a process on a GPU takes some two seconds: CUDA loads each kernel when it is first
launched, cuBLAS makes its handles, Triton loads its programs. A standby does so before it is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from orchestrator.config.settings import Config
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.tasks.synthetic import Synthetic
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.device.memory import free_cached
from orchestrator.train.group.world import World
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.torch_settings import preserved_random_state, torch_settings
from orchestrator.types import Choice

_NUM_STEPS = 2
"""The optimizer makes its state in the first step; the second is like all later ones."""
_SIZES: dict[str, Any] = {
    "width": 128,
    "layers": 2,
    "sequence_length": 64,
    "vocabulary": 256,
    "experts": 4,
}
_BATCH = 8


def rehearse_steps(prepared: PreparedRun, device: torch.device) -> None:
    """Train a small model of our own for two steps, with the run's precision, kernels and optimizer.

    Not the user's model: its code may have effects beyond the step, such as a line in a log. The random
    generators are left as they were."""
    config = prepared.resolved.config
    # The settings for determinism first: cuBLAS reads them when its first handle is made.
    with preserved_random_state(), torch_settings(config, prepared.plan, device):
        _train(prepared, device)
    free_cached(device)


def _train(prepared: PreparedRun, device: torch.device) -> None:
    config = prepared.resolved.config
    sizes = Config.of(task="synthetic", samples=_NUM_STEPS * _BATCH, **_SIZES)
    small = replace(sizes, optim=config.optim, device=config.device)
    # A compiled model would be compiled anew for the run's own.
    plan = replace(prepared.plan, compile=Choice(False, "a rehearsal"))
    task = Synthetic(small)
    world = World.single_process(device)
    feed = open_feed(
        task.train_data(),
        world,
        global_batch=_BATCH,
        micro_batch=_BATCH,
        seed=0,
        loader=LoaderOptions(),
    )
    parts = build_parts(small, plan, task, world)
    stepper = build_stepper(small, world, parts, _BATCH, lambda *_, **__: None)
    for step, batch in enumerate(feed.steps(0)):
        stepper.run(batch, step)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
