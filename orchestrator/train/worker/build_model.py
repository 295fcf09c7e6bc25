"""Builds the model of a task: strategy, optimizer, precision and compilation as planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from experts.balance import gated_layers, moe_layers
from experts.expert_state import is_expert_parallel
from experts.model import mix, place, place_structure
from experts.moe.bank import without_memory
from experts.moe.statistics import ExpertStatistics
from experts.rebalance.replicas import replica_placement
from experts.structure import LayerStructure
from experts.surgery.surgery import restructure
from orchestrator.checkpoint.saved_experts import EvolutionState
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.planning import Plan
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Emit, ignore_event
from orchestrator.tasks.task import Task
from orchestrator.tasks.user_code import user_code
from orchestrator.tasks.validate import build_checked_model
from orchestrator.train.checkpoint.state import TrainState
from orchestrator.train.data.loading import seed_python_and_numpy
from orchestrator.train.device.clock import DevicePhaseClock, PhaseClock
from orchestrator.train.device.compiling import Compiled
from orchestrator.train.device.precision import Precision, store_frozen
from orchestrator.train.device.recompute import recompute_blocks
from orchestrator.train.device.short_weights import shorten_weights
from orchestrator.train.group.heartbeat import Heartbeat
from orchestrator.train.group.world import World
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.optim.named_optimizers import build_named_optimizer, separate_shards
from orchestrator.train.optim.optimizer import ScheduledOptimizer, warmup_schedule
from orchestrator.train.optim.stochastic_rounding import WeightRounding
from orchestrator.train.optim.weight_average import WeightAverage
from orchestrator.train.optim.weight_copies import WeightCopies
from orchestrator.train.step_graph.graphs import StepGraphs, find_obstacle
from orchestrator.train.step_graph.recorder import CudaRecorder
from orchestrator.train.stepper import Stepper
from orchestrator.train.strategies.base import Strategy
from orchestrator.train.strategies.buffers import convert_sync_batchnorm
from orchestrator.train.strategies.building import build_strategy
from orchestrator.train.worker.placed_experts import ON_ONE_HOST, PlacedExperts
from orchestrator.types import BF16_PRECISIONS


@dataclass(frozen=True)
class ModelParts:
    """A model ready to train."""

    model: nn.Module
    strategy: Strategy
    optimizer: ScheduledOptimizer
    precision: Precision
    compiled: Compiled | None
    evolution: EvolutionState | None = None
    copies: WeightCopies | None = None

    @property
    def state(self) -> TrainState:
        return TrainState(self.model, self.optimizer.inner, self.precision, self.evolution)


def build_parts(
    config: Config,
    plan: Plan,
    task: Task,
    world: World,
    emit: Emit = ignore_event,
    experts: PlacedExperts = ON_ONE_HOST,
) -> ModelParts:
    """Build a task's model and the parts that train it."""
    model = build_model(config, plan, task, world, experts)
    if plan.evolution_rules is not None:
        for _, layer in gated_layers(model):
            layer.statistics = ExpertStatistics(len(layer.load_E), layer.bank.width)
    model.train()
    if config.parallel.sync_batchnorm and world.size > 1:
        model = convert_sync_batchnorm(model)
    divided = experts.host_of is not None
    strategy = build_strategy(config, plan, task, world, model, emit, divided)
    for _, layer in moe_layers(model):
        # Where the plan does not ask for the loop kernel, each bank chooses by its sizes.
        layer.bank.kernel = config.device.expert_kernel
        # On a CPU a grouped product computes the activations of several experts at once.
        if plan.expert_kernel.value == "loop" or (config.run.reproducible and world.device.type == "cpu"):
            layer.bank.kernel = "loop"
        layer.bank.fp8 = plan.precision.value == "fp8"
        # Blocks that are recomputed include their experts.
        layer.bank.recomputes = config.device.recompute_experts and not plan.activation_checkpointing.value
    if plan.activation_checkpointing.value:
        recompute_blocks(model, None if plan.compile.value else strategy.context)
    short = config.device.short_weights
    optimizer = build_optimizer(config, plan, task, model)
    copies = None if short else _weight_copies(plan, world, strategy, optimizer)
    compiled = None
    if plan.compile.value:
        device = config.device
        by_shape = config.run.reproducible
        compiled = Compiled(model, device.compile_mode, device.compile_parts, copies, by_shape)
    return ModelParts(
        model,
        strategy,
        optimizer,
        Precision(plan.precision.value, world.device, model if short else None),
        compiled,
        EvolutionState() if _experts_change(plan, experts.layers) else None,
        copies,
    )


def build_model(
    config: Config, plan: Plan, task: Task, world: World, experts: PlacedExperts = ON_ONE_HOST
) -> nn.Module:
    """Build a task's model: whole, or with the experts of this host alone.

    A task with ``initialise`` never allocates the experts of other hosts: the model is built without
    memory for experts, those that live elsewhere are removed, the others are allocated, and
    ``initialise`` fills them."""
    seed_python_and_numpy(mix(config.run.seed, "build"))
    torch.manual_seed(mix(config.run.seed, "build"))
    initialise: Callable[[nn.Module], None] | None = getattr(task, "initialise", None)
    with user_code("building the model"), without_memory() if initialise is not None else nullcontext():
        model = build_checked_model(task)
        if experts.layers is not None:
            restructure([layer for _, layer in moe_layers(model)], experts.layers)
    # Before weights are read: memory for their longer type is never needed.
    store_frozen(model, plan.precision.value)
    if config.device.short_weights:
        shorten_weights(model)
    if experts.host_of is not None:
        _place(model, experts.host_of, experts.layers, experts.groups, world)
    if initialise is not None:
        for _, layer in moe_layers(model):
            layer.bank.materialise()
        with user_code("building the model"):
            initialise(model)
    return model


def _experts_change(plan: Plan, experts: Sequence[LayerStructure] | None) -> bool:
    """Whether experts may change, or are in a warm-up that is to end."""
    warming = any(expert.warm_step > 0 for layer in experts or () for expert in layer.experts)
    return plan.evolution_rules is not None or plan.rebalance.value or warming


def _place(
    model: nn.Module,
    host_of: Sequence[Sequence[int]],
    experts: Sequence[LayerStructure] | None,
    groups: int,
    world: World,
) -> None:
    if experts is None and groups == 1:
        place(model, host_of, world.rank)
        return
    if experts is None:
        layers = zip(moe_layers(model), host_of, strict=True)
        experts = [LayerStructure.initial(name, layer.bank.sizes, hosts) for (name, layer), hosts in layers]
    if groups > 1:
        experts = replica_placement(experts, world.size, groups)
    place_structure(model, experts, world.rank, world.size)


def build_optimizer(config: Config, plan: Plan, task: Task, model: nn.Module) -> ScheduledOptimizer:
    """Build the task's own optimizer and schedule, else those that the settings name."""
    build_own = getattr(task, "build_optimizer", None)
    with user_code("building the optimizer"):
        optimizer = _build_own_optimizer(build_own, model) if build_own else None
        schedule = getattr(task, "schedule", lambda: None)()
        if schedule is not None:
            float(schedule(0))  # a schedule that fails should fail here, as the task's error
    if optimizer is None:
        settings = replace(config.optim, learning_rate=plan.learning_rate.value)
        fused = plan.fused_optimizer.value
        optimizer = build_named_optimizer(model, settings, fused, place_free=config.run.reproducible)
    average = None
    if config.optim.ema_decay is not None:
        place_free = config.run.reproducible
        average = WeightAverage(optimizer, config.optim.ema_decay, config.optim.evaluate_ema, place_free)
    rounding = None
    if config.device.short_weights:
        rounding = WeightRounding(model, optimizer, config.run.seed)
    if schedule is not None:
        return ScheduledOptimizer(optimizer, schedule, average=average, rounding=rounding)
    return ScheduledOptimizer(
        optimizer,
        warmup_schedule(config.optim.schedule, plan.warmup_steps.value, plan.total_steps.value),
        config.optim.schedule,
        average,
        rounding,
    )


def _build_own_optimizer(
    build: Callable[[list[nn.Parameter]], torch.optim.Optimizer | None], model: nn.Module
) -> torch.optim.Optimizer | None:
    """Build the task's optimizer over the parameters of this host, of which there may be none."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained or not is_expert_parallel(model):
        optimizer = build(trained)
    else:
        # All trained parameters live on other hosts, and an optimizer refuses an empty list.
        placeholder = nn.Parameter(torch.zeros(0, device=next(model.parameters()).device))
        optimizer = build([placeholder])
        if optimizer is not None:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not placeholder]
            optimizer.state.pop(placeholder, None)
    if optimizer is not None:
        separate_shards(optimizer, model)
    return optimizer


def _weight_copies(
    plan: Plan, world: World, strategy: Strategy, optimizer: ScheduledOptimizer
) -> WeightCopies | None:
    """Return copies of the experts' weights in bf16, where an optimizer that writes them trains one process.

    In fp16 gradients would overflow; several workers sum theirs in the type of the weights, and exact sums
    are of integers. A worker that probes a batch size is alone in its ``world``, and has none either."""
    workers = max(world.size, plan.workers.value)
    if (
        (workers > 1 and not strategy.reproducible)
        or plan.precision.value not in BF16_PRECISIONS
        or not isinstance(optimizer.inner, AdamW)
    ):
        return None
    return WeightCopies(strategy.model, optimizer.inner, torch.bfloat16)


def build_stepper(
    config: Config,
    world: World,
    parts: ModelParts,
    micro_batch: int,
    emit: Emit,
    heartbeat: Heartbeat | None = None,
) -> Stepper:
    return Stepper(
        world=world,
        strategy=parts.strategy,
        optimizer=parts.optimizer,
        precision=parts.precision,
        micro_batch=micro_batch,
        seed=config.run.seed,
        clip_norm=config.optim.clip_norm,
        clock=DevicePhaseClock(world.device) if world.device.type == "cuda" else PhaseClock(),
        emit=emit,
        compiled=parts.compiled,
        copies=parts.copies,
        heartbeat=heartbeat or Heartbeat(),
    )


def build_graphs(
    config: Config, plan: Plan, world: World, parts: ModelParts, emit: Emit
) -> StepGraphs | None:
    """Return the graphs of a run's steps; None if the plan did not choose them, or the model forbids them."""
    if not plan.cuda_graph.value or world.size > 1:
        return None
    optimizer = parts.optimizer
    obstacle = find_obstacle(parts.strategy, optimizer.inner, parts.precision, world.device)
    is_required = config.device.cuda_graph == "on"
    if obstacle is None:
        recorder = CudaRecorder(world.device)
        return StepGraphs(recorder, parts.strategy, optimizer, world.device, emit, is_required)
    if is_required:
        raise UserError(f"--cuda-graph on cannot work: {obstacle}; leave it out, or change that")
    emit(kinds.CudaGraph(status="off", seconds=0.0, detail=obstacle))
    return None
