"""The plan of a run: settings, hardware and model facts become values, each with its reason.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from experts.evolution.rules import EvolutionRules, Preset
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.batching import plan_batches
from orchestrator.plan.compute import (
    check_fp8_model,
    check_short_weights,
    choose_compile,
    choose_cudnn_benchmark,
    choose_fused_optimizer,
    choose_precision,
    choose_tf32,
    with_memory_settings,
    with_weight_copies,
)
from orchestrator.plan.cuda_graph import StepForm, choose_cuda_graph
from orchestrator.plan.device import choose_threads, gpu_of, share_cores
from orchestrator.plan.estimate import (
    MemoryEstimate,
    ModelFacts,
    ModelSharding,
    ShardingForm,
    estimate_memory,
    flops_per_step,
)
from orchestrator.plan.evolution import Growth, choose_rebalance, choose_replicas
from orchestrator.plan.experts import (
    choose_chunks,
    choose_gate,
    choose_kernel,
    choose_placement,
    why_unused,
)
from orchestrator.plan.inventory.cluster import Cluster, chosen_gpus
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.reproducible import check_reproducible_model
from orchestrator.plan.schedule import (
    choose_data_on_device,
    choose_learning_rate,
    choose_loader_workers,
    choose_log_every,
    choose_prefetch,
    choose_total_steps,
    choose_warmup,
)
from orchestrator.plan.snapshots import (
    NodeMemory,
    checkpoint_memory,
    choose_snapshots,
    snapshot_memory,
    why_no_snapshots,
)
from orchestrator.plan.worker_setup import WorkerSetup, single_process, worker_group
from orchestrator.plan.workers import choose_strategy
from orchestrator.strategies import STRATEGIES, StrategyFacts, StrategyName
from orchestrator.types import Choice, PrecisionName


@dataclass(frozen=True)
class Plan:
    """The values that a run uses, with their reasons. Its fields are the keys of ``plan.json``."""

    device: Choice[str]
    strategy: Choice[StrategyName]
    workers: Choice[int]
    backend: Choice[str]
    sharding: Choice[ShardingForm]
    precision: Choice[PrecisionName]
    tf32: Choice[bool]
    gate: Choice[str]
    placement: Choice[str]
    exchange_chunks: Choice[int]
    expert_kernel: Choice[str]
    evolution: Choice[Preset]
    rebalance: Choice[bool]
    expert_replicas: Choice[int]
    snapshots: Choice[str]
    starting_batch: Choice[str]
    batch_size: Choice[int]
    accumulation_steps: Choice[int]
    global_batch_size: Choice[int]
    eval_batch_size: Choice[int]
    activation_checkpointing: Choice[bool]
    compile: Choice[bool]
    cuda_graph: Choice[bool]
    fused_optimizer: Choice[bool]
    cudnn_benchmark: Choice[bool]
    loader_workers: Choice[int]
    prefetch: Choice[int]
    data_on_device: Choice[bool]
    threads: Choice[int]
    learning_rate: Choice[float]
    warmup_steps: Choice[int]
    total_steps: Choice[int | None]
    """None if the data does not tell its number of samples, and no limit is set."""
    log_every: Choice[int]
    memory: MemoryEstimate
    flops_per_step: float
    model_sharding: ModelSharding
    """How the workers' devices divide the model, for further estimates of memory."""
    evolution_rules: EvolutionRules | None = None
    """When experts are born, merged and pruned; None if they stay as they are."""

    @property
    def data_ranks(self) -> int:
        """Workers that hold a share of the batch: all of them, or the first alone under a primary
        gate."""
        return 1 if self.gate.value == "primary" else self.workers.value

    @property
    def strategy_facts(self) -> StrategyFacts:
        return STRATEGIES[self.strategy.value]

    def choices(self) -> dict[str, Choice[Any]]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Choice)}

    def to_json(self) -> dict[str, Any]:
        return {
            "choices": {name: asdict(choice) for name, choice in self.choices().items()},
            "memory": self.memory.to_json(),
            "flops_per_step": self.flops_per_step,
            "evolution_rules": asdict(self.evolution_rules) if self.evolution_rules else None,
        }


def plan(
    config: Config,
    inventory: Inventory,
    facts: ModelFacts,
    measured: Mapping[str, int] | None = None,
    cluster: Cluster | None = None,
    in_cluster: bool = False,
) -> Plan:
    """Return the plan of a run.

    ``measured`` holds a probed ``batch_size``, which replaces the estimate, and the
    ``global_batch_size`` of a run that is resumed. ``inventory`` is this machine, or in a cluster
    a node that will have workers. Without ``cluster`` the run has this machine alone.
    ``in_cluster`` says that this process runs inside a Ray job.
    """
    _check_average(config)
    joined = cluster is not None and cluster.joined
    facts = with_memory_settings(config, facts)
    growth = Growth.of(config, facts)
    strategy = choose_strategy(config, inventory, in_cluster or joined, cluster)
    if STRATEGIES[strategy.value].in_process:
        setup = single_process(config, inventory, strategy)
    else:
        # All further choices see only the GPUs of --devices; a joined cluster assigns its own.
        if not joined:
            inventory = replace(inventory, gpus=chosen_gpus(inventory, config.parallel.devices))
        setup = worker_group(config, inventory, growth, strategy, cluster or Cluster.of(inventory))
    if config.run.reproducible:
        check_reproducible_model(facts, setup)
    growth = growth.within(config, facts, setup.limit_bytes, setup.model_sharding)
    return _complete_plan(config, inventory, measured, setup, growth)


def planned_facts(config: Config, facts: ModelFacts, chosen: Plan) -> ModelFacts:
    """Return the facts with all that a planned run keeps in memory, as its estimate has them.

    The experts are those of now: ``chosen.memory`` may be of more, where they evolve."""
    facts = with_memory_settings(config, facts)
    return with_weight_copies(
        config, facts, chosen.workers.value, chosen.device.value, chosen.precision.value
    )


def _check_average(config: Config) -> None:
    """Raise UserError for ``--evaluate-ema`` of a run without an average.

    Only now: a resumed run may have the one setting from its folder, and the other from a flag.
    """
    if config.optim.evaluate_ema and config.optim.ema_decay is None:
        raise UserError(
            "--evaluate-ema needs an average, and the run keeps none; it does with --ema-decay 0.999"
        )


def _complete_plan(
    config: Config,
    inventory: Inventory,
    measured: Mapping[str, int] | None,
    setup: WorkerSetup,
    growth: Growth,
) -> Plan:
    """Choose everything that follows from the workers and their devices."""
    device = setup.device.value
    count = setup.workers.value
    precision = choose_precision(config, inventory, device)
    if precision.value == "fp8":
        check_fp8_model(growth.largest)
    facts = with_weight_copies(config, growth.largest, count, device, precision.value)
    strategy = STRATEGIES[setup.strategy.value]
    check_short_weights(config, facts)
    model_sharding = setup.model_sharding
    gpu = gpu_of(inventory, device) if device != "cpu" else None
    gpu_memory = gpu.memory_total if gpu else None
    batching = plan_batches(config, facts, gpu_memory, setup.limit_bytes, measured, model_sharding)
    batch = batching.batch_size.value
    recompute = batching.recompute.value
    steps = choose_total_steps(config, facts, batching)
    flops = flops_per_step(facts, batching.global_batch.value, recompute)
    cores = share_cores(inventory, setup.workers_on_node)
    threads = choose_threads(config, inventory, strategy, cores)
    loaders = choose_loader_workers(config, facts, device, cores)
    unused = why_unused(strategy, facts)
    # Under a primary gate the tokens of one data rank are spread over all hosts.
    tokens_per_host = batch * model_sharding.data_ranks * facts.units_per_sample // count
    # Hosts cannot go on uncompiled one by one: they wait for each other in every pass.
    in_lockstep = strategy.replaces_workers or setup.sharding.value != "none"
    compilation = choose_compile(config, facts, in_lockstep, gpu, flops, steps.value)
    if strategy.divides_experts and compilation.value and recompute:
        raise UserError(
            "--compile and recomputed activations do not go together on expert hosts, and activations are "
            f"recomputed ({batching.recompute.reason}); leave --compile out, or give "
            "--activation-checkpointing off"
        )
    fused_optimizer = choose_fused_optimizer(config, facts, setup.sharding.value)
    kernel = choose_kernel(config, facts, precision.value, gpu.capability if gpu else None)
    step_form = StepForm(
        gpu,
        workers=count,
        flops=flops,
        fused_optimizer=fused_optimizer.value or facts.own_optimizer,
        compiled=compilation.value,
        recomputes=recompute,
        evolves=growth.rules is not None,
        experts_in_loop=bool(facts.experts) and kernel.value == "loop",
    )
    return Plan(
        device=setup.device,
        strategy=setup.strategy,
        workers=setup.workers,
        backend=setup.backend,
        sharding=setup.sharding,
        precision=precision,
        tf32=choose_tf32(config, inventory, device),
        gate=choose_gate(config, unused),
        placement=choose_placement(config, unused, count),
        exchange_chunks=choose_chunks(
            config, unused, count, setup.backend.value, gpu is not None, tokens_per_host
        ),
        expert_kernel=kernel,
        evolution=growth.evolution,
        rebalance=choose_rebalance(config, unused, count, growth.evolution.value),
        expert_replicas=choose_replicas(config, unused, count),
        snapshots=_plan_snapshots(config, inventory, facts, setup),
        starting_batch=batching.starting,
        batch_size=batching.batch_size,
        accumulation_steps=batching.accumulation,
        global_batch_size=batching.global_batch,
        eval_batch_size=batching.evaluation,
        activation_checkpointing=batching.recompute,
        compile=compilation,
        cuda_graph=choose_cuda_graph(config, step_form),
        fused_optimizer=fused_optimizer,
        cudnn_benchmark=choose_cudnn_benchmark(config, device),
        loader_workers=loaders,
        prefetch=choose_prefetch(config, inventory, loaders.value, setup.workers_on_node),
        data_on_device=choose_data_on_device(config, facts, gpu_memory),
        threads=threads,
        learning_rate=choose_learning_rate(config),
        warmup_steps=choose_warmup(config, steps.value),
        total_steps=steps,
        log_every=choose_log_every(config, steps.value, device),
        memory=estimate_memory(
            facts, batch, recompute, setup.limit_bytes, model_sharding, batching.accumulation.value == 1
        ),
        flops_per_step=flops,
        model_sharding=model_sharding,
        evolution_rules=growth.rules,
    )


def _plan_snapshots(
    config: Config, inventory: Inventory, facts: ModelFacts, setup: WorkerSetup
) -> Choice[str]:
    """Choose whether the hosts keep snapshots in the memory of their nodes."""
    strategy = STRATEGIES[setup.strategy.value]
    hosts = setup.workers.value
    hosts_on_node = setup.workers_on_node
    training_bytes = checkpoint_memory(facts, hosts, hosts_on_node)
    if setup.device.value == "cpu":
        one_sample = estimate_memory(facts, 1, False, None, setup.model_sharding)
        training_bytes += hosts_on_node * one_sample.total
    node = NodeMemory(inventory.ram_free, training_bytes, setup.object_store_bytes)
    needed = snapshot_memory(facts, hosts, hosts_on_node, setup.sharding.value != "none")
    return choose_snapshots(config, why_no_snapshots(strategy), needed, node)
