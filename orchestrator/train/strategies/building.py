"""Builds the strategy of a plan around a model: one process, DDP, FSDP or expert parallel."""

from __future__ import annotations

import torch
from torch import nn

from experts.tokens.bounds import ExchangeBounds
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.planning import Plan
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Emit
from orchestrator.tasks.task import Task
from orchestrator.train.group.world import World
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.buffers import (
    BufferChoice,
    no_buffers,
    persistent_buffers,
    running_statistics,
)
from orchestrator.train.strategies.ddp import DDPStrategy
from orchestrator.train.strategies.expert_parallel import ExpertParallelStrategy, ShardedDenseStrategy
from orchestrator.train.strategies.fsdp import FSDPStrategy, shard_model
from orchestrator.train.strategies.reproducible import ReproducibleStrategy
from orchestrator.train.strategies.reproducible_shards import ShardedReproducibleStrategy


def build_strategy(
    config: Config, plan: Plan, task: Task, world: World, model: nn.Module, emit: Emit, divided: bool
) -> Strategy:
    """Return what the world does with a model, which it moves to the device or shards.

    ``divided`` says that the model has the experts of this host alone."""
    if config.run.reproducible:
        strategy = _build_reproducible(plan, task, world, model, divided)
    elif world.size == 1:
        _move_to_device(model, world.device)
        strategy = Strategy(model, task)
    elif divided or plan.strategy_facts.replaces_workers:
        strategy = _build_on_hosts(config, plan, task, world, model)
    elif plan.sharding.value != "none":
        strategy = _build_fsdp(config, plan, task, world, model)
    else:
        strategy = _build_ddp(config, task, world, model, emit)
    if divided and config.parallel.exchange_rows == "bounded":
        # A bounded number of rows is sent between hosts in training, so that no host waits for counts.
        strategy.context.bounds = ExchangeBounds(world.device)
    return strategy


def _build_reproducible(plan: Plan, task: Task, world: World, model: nn.Module, divided: bool) -> Strategy:
    shards = plan.sharding.value != "none" and world.size > 1
    chunks = plan.exchange_chunks.value
    if divided or not shards:
        _move_to_device(model, world.device)
    if shards:
        keep_parameters = plan.sharding.value == "zero2"
        return ShardedReproducibleStrategy(model, task, world, divided, chunks, keep_parameters)
    return ReproducibleStrategy(model, task, world, divided, chunks)


def _build_on_hosts(config: Config, plan: Plan, task: Task, world: World, model: nn.Module) -> Strategy:
    _move_to_device(model, world.device)
    chunks = plan.exchange_chunks.value
    buffers = _broadcast_buffers(config)
    if plan.sharding.value != "none":
        keep_parameters = plan.sharding.value == "zero2"
        return ShardedDenseStrategy(model, task, world, chunks, keep_parameters, buffers)
    return ExpertParallelStrategy(model, task, world, chunks, config.parallel.bucket_cap_mb, buffers)


def _build_fsdp(config: Config, plan: Plan, task: Task, world: World, model: nn.Module) -> Strategy:
    # Each worker keeps a shard of its own copy, so the copies must be equal before they are cut.
    tensors = [*model.parameters(), *persistent_buffers(model)]
    world.broadcast([tensor.detach() for tensor in tensors])
    keep_parameters = plan.sharding.value == "zero2"
    shard_model(model, world, keep_parameters=keep_parameters, offload=config.parallel.cpu_offload)
    return FSDPStrategy(model, task, world)


def _build_ddp(config: Config, task: Task, world: World, model: nn.Module, emit: Emit) -> Strategy:
    _move_to_device(model, world.device)

    def warn(message: str) -> None:
        emit(kinds.Warned(kind="gradients", message=message))

    return DDPStrategy(model, task, world, config.parallel, warn, _broadcast_buffers(config))


def _move_to_device(model: nn.Module, device: torch.device) -> None:
    """Move a model to its device.

    A tensor that stays behind is no parameter or buffer: the task's mistake."""
    model.to(device)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != device.type:
            raise UserError(
                f"{name} of the model is on {tensor.device} after moving it to {device}; "
                "register it as a parameter or buffer"
            )


def _broadcast_buffers(config: Config) -> BufferChoice:
    """Return the choice of the buffers that the main worker broadcasts at the start of each step."""
    if config.parallel.broadcast_buffers == "off":
        return no_buffers
    if config.parallel.broadcast_buffers == "on":
        return persistent_buffers
    # Only running statistics differ between workers after a forward pass, unless the norms are
    # synchronised.
    return no_buffers if config.parallel.sync_batchnorm else running_statistics
