"""Short trainings of the task lm with the parts of a real run: in one process, and on hosts over gloo or
nccl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.runs.steppers import Events, mean_loss, run_steps
from orchestrator.config.settings import Config
from orchestrator.tasks.generation import GenerationOptions
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.evaluation.generation import Generation, find_prompts, generate
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.placed_experts import PlacedExperts
from orchestrator.trainer import Trainer

GLOBAL_BATCH = 5
"""Samples of a step: they divide by no number of hosts."""
STEPS = 3
PLACEMENTS = {
    2: ((0, 1, 1, 0, 1, 0, 1), (1, 1, 0, 1, 1, 1, 1)),
    3: ((0, 1, 1, 2, 1, 0, 1), (2, 1, 1, 2, 1, 2, 1)),
}
"""Uneven hosts of seven experts in two layers; the first of three hosts has none of the second."""


@dataclass(frozen=True)
class LmRun:
    losses: list[float]
    generations: list[Generation]
    events: list[dict[str, Any]]


def train_lm(config: Config, world: World, prompts: Sequence[str] = ()) -> LmRun:
    """Train for some steps, and generate."""
    prepared = Trainer(config=config, quiet=True).prepare()
    task = prepared.task
    host_of = PLACEMENTS.get(world.size)
    parts = build_parts(config, prepared.plan, task, world, experts=PlacedExperts(host_of=host_of))
    events = Events()
    stepper = build_stepper(config, world, parts, micro_batch=2, emit=events)
    feed = open_feed(
        task.train_data(),
        world,
        global_batch=GLOBAL_BATCH,
        micro_batch=2,
        seed=0,
        loader=LoaderOptions(),
    )
    losses = [mean_loss(totals) for totals in run_steps(stepper, feed, STEPS)]
    options = GenerationOptions(tuple(prompts), max_new_tokens=12)
    found = find_prompts(task, options)
    generations = generate(parts.strategy, world, parts.precision, found, options.max_new_tokens)
    return LmRun(losses, generations, events.events)


def train_lm_on_host(
    rank: int, size: int, store: str, config: Config, backend: str = "gloo", prompts: Sequence[str] = ()
) -> LmRun:
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    with process_group_world(file_store(store, size), rank, size, device, backend, 120) as world:
        return train_lm(config.but(workers=size, parallel_strategy="expert_parallel"), world, prompts)
