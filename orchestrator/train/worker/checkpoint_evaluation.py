"""Evaluation of a checkpoint by one worker: its model is built and evaluated as in a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from experts.expert_state import remote_expert_names
from orchestrator.checkpoint.progress import read_progress
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.record.files.log import SilentLog
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.tasks.generation import GenerationOptions
from orchestrator.train.checkpoint.restore import restore_model
from orchestrator.train.evaluation.evaluate import Evaluation
from orchestrator.train.evaluation.generation import find_prompts, generate
from orchestrator.train.group.world import World
from orchestrator.train.worker.build import build_evaluation
from orchestrator.train.worker.build_model import ModelParts, build_parts
from orchestrator.train.worker.final_model import use_priors, weight_kinds, with_average
from orchestrator.train.worker.placed_experts import place_experts
from orchestrator.train.worker.resume import StartPoint, load_named, saved_experts_to_start_with

OnBatch = Callable[[int, int | None], None]
"""Called with the number of batches done, and of all batches."""


def evaluate_checkpoint(
    prepared: PreparedRun,
    world: World,
    on_batch: OnBatch,
    options: GenerationOptions,
    store: CheckpointStore | None = None,
) -> dict[str, Any]:
    """Evaluate the checkpoint that ``--resume`` names on the task's validation data.

    ``store`` finds it on this node, where the nodes have copies of it in folders of their own.
    Return its step, the fields of an ``evaluate`` event, and the continuations of prompts where the task
    generates text. All workers must call it."""
    config = prepared.resolved.config
    # First: a prompt that is refused must not cost an evaluation.
    prompts = find_prompts(prepared.task, options)
    store = store or CheckpointStore(Path(str(config.checkpoint.resume)).parent, repair=False)
    start = StartPoint(store, world, SilentLog())
    saved = saved_experts_to_start_with(config, start, None)
    experts = place_experts(prepared, world, {}, saved, [])
    if prepared.plan.data_ranks < world.size:
        world = world.with_data_on_main()
    world = replace(world, whole_micro_batches=config.run.reproducible)
    plan = prepared.plan
    task = prepared.task
    parts = build_parts(config, plan, task, world, experts=experts)
    evaluation = build_evaluation(config, plan, task, world, parts)
    try:
        if evaluation is None:
            raise UserError("the task has no such data: its method returned None; choose another --split")
        step = _restore(config, start, parts)
        evaluation.on_progress = _BatchCounter(evaluation, on_batch)
        fields = {"step": step, **evaluation()}
        fields["generations"] = generate(
            parts.strategy, world, parts.precision, prompts, options.max_new_tokens
        )
        return fields
    finally:
        if evaluation is not None:
            evaluation.feed.close()
        if parts.compiled is not None:
            parts.compiled.close()


def _restore(config: Config, start: StartPoint, parts: ModelParts) -> int:
    """Give the model the weights of the checkpoint, or their average. Return the checkpoint's step."""
    averaged = config.optim.evaluate_ema
    not_needed = remote_expert_names(parts.model)
    contents = load_named(str(config.checkpoint.resume), start, not_needed, weight_kinds(averaged))
    restore_model(with_average(contents) if averaged else contents, parts.model)
    step = read_progress(contents.state).step
    use_priors(parts.model, step)
    return step


class _BatchCounter:
    """Counts the batches of an evaluation, which has one micro-batch in each."""

    def __init__(self, evaluation: Evaluation, on_batch: OnBatch) -> None:
        counts = (evaluation.feed.steps_from(0), evaluation.max_batches)
        self._total = min((count for count in counts if count), default=None)
        self._done = 0
        self._on_batch = on_batch

    def __call__(self) -> None:
        self._done += 1
        self._on_batch(self._done, self._total)
