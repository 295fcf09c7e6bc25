"""From settings, hardware and model facts to a plan: every open question answered, each answer with its reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from orchestrator.config.checks import Switch
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.batching import plan_batches
from orchestrator.plan.estimate import (
    MemoryEstimate,
    ModelFacts,
    ModelSharding,
    ShardingForm,
    estimate_memory,
    flops_per_step,
)
from orchestrator.plan.experts import (
    choose_chunks,
    choose_gate,
    choose_kernel,
    choose_placement,
    settle_strategy,
    why_unused,
)
from orchestrator.plan.inventory.cluster import Cluster, chosen_gpus
from orchestrator.plan.inventory.hardware import Gpu, Inventory
from orchestrator.plan.schedule import (
    choose_data_on_device,
    choose_loader_workers,
    choose_log_every,
    choose_prefetch,
    choose_total_steps,
    choose_warmup,
)
from orchestrator.plan.workers import (
    PLAIN,
    check_gpu_mode,
    choose_backend,
    choose_sharding,
    choose_strategy,
    choose_workers,
    on_gpus,
)
from orchestrator.types import GIB, Choice, PrecisionName, Rejected, StrategyName, bytes_text, seconds_text

_TF32_FROM, _BF16_FROM = (8, 0), (8, 0)
_COMPILE_FROM = (7, 0)
_RATES = {
    True: 3e14,
    False: 6e13,
}  # FLOP/s that a good step reaches, from compute capability 9.0 on and below
_LEAST_STEP_S = 0.004  # of a step, however small: the host launches some hundred kernels
_WORTH_S = (
    300.0  # compiling took 20 s of a transformer's run on an H200, and made its steps an eighth shorter
)
_HOST_SHARE = 0.8  # of the free RAM may be planned with


@dataclass(frozen=True)
class Plan:
    """What will run, and why."""

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
    starting_batch: Choice[str]
    batch_size: Choice[int]
    accumulation_steps: Choice[int]
    global_batch_size: Choice[int]
    eval_batch_size: Choice[int]
    activation_checkpointing: Choice[bool]
    compile: Choice[bool]
    fused_optimizer: Choice[bool]
    cudnn_benchmark: Choice[bool]
    loader_workers: Choice[int]
    prefetch: Choice[int]
    data_on_device: Choice[bool]
    threads: Choice[int]
    warmup_steps: Choice[int]
    total_steps: Choice[int]
    log_every: Choice[int]
    memory: MemoryEstimate
    flops_per_step: float

    @property
    def data_ranks(self) -> int:
        """Workers that hold a share of the batch: all, or the first alone where its gate routes for all."""
        primary = self.strategy.value == "expert_parallel" and self.gate.value == "primary"
        return 1 if primary else self.workers.value

    def choices(self) -> dict[str, Choice[Any]]:
        return {
            f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Choice)
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "choices": {name: asdict(choice) for name, choice in self.choices().items()},
            "memory": self.memory.to_json(),
            "flops_per_step": self.flops_per_step,
        }


def choose_device(config: Config, inventory: Inventory) -> Choice[str]:
    """The device of a run in one process: the first of ``--devices``, the emptiest GPU, or the CPU."""
    mode, asked = config.device.gpu_mode, config.parallel.devices
    if mode == "cpu":
        return Choice("cpu", "asked for by --gpu-mode cpu")
    gpus = chosen_gpus(inventory, asked)
    check_gpu_mode(config, len(gpus), inventory.gpu_error)
    if not gpus:
        return Choice(
            "cpu", inventory.gpu_error or "no GPU was found", (Rejected("cuda:0", "there is none"),)
        )
    best = gpus[0] if asked else max(gpus, key=lambda gpu: (gpu.memory_free // GIB, -gpu.index))
    reason = "the only GPU" if len(gpus) == 1 else "the GPU with the most free memory"
    if asked:
        reason = f"asked for by --devices {','.join(map(str, asked))}"
    others = (
        (Rejected(f"the other {len(gpus) - 1} GPUs", "one process trains on one device"),)
        if len(gpus) > 1
        else ()
    )
    return Choice(f"cuda:{best.index}", f"{reason}: {best.name}, {bytes_text(best.memory_total)}", others)


def choose_worker_device(config: Config, inventory: Inventory, declared: int = 0) -> Choice[str]:
    """The device of each worker, on a node like ``inventory``: ``cuda``, a GPU of its own, or the CPU. Where the
    cluster counts ``declared`` GPUs that CUDA does not show, the CPU trains."""
    if config.device.gpu_mode == "cpu":
        return Choice("cpu", "asked for by --gpu-mode cpu")
    gpus = inventory.gpus
    if not gpus:
        counted = f"the cluster counts {declared}, but CUDA shows none" if declared else "no GPU was found"
        return Choice("cpu", inventory.gpu_error or counted, (Rejected("cuda", "there is none"),))
    least = min(gpus, key=lambda gpu: gpu.memory_total)
    different = "" if inventory.same_model else "; planned for the smallest"
    return Choice("cuda", f"a GPU for each worker: {least.name}, {bytes_text(least.memory_total)}{different}")


def choose_precision(config: Config, inventory: Inventory, device: str) -> Choice[PrecisionName]:
    """bf16 from compute capability 8.0, fp16 with loss scaling below, fp32 on a CPU without bf16 units."""
    asked = config.device.precision
    if asked != "auto":
        slow = "; this CPU has no units for it and is many times slower than in fp32"
        emulated = device == "cpu" and (asked == "fp16" or (asked == "bf16" and not inventory.cpu_bf16))
        return Choice(asked, f"asked for by --precision {asked}" + (slow if emulated else ""))
    if not config.run.auto:
        return Choice("fp32", PLAIN)
    if device == "cpu":
        if inventory.cpu_bf16:
            return Choice(
                "fp32",
                "the CPU has bf16 units, but small models are seldom faster with them",
                (Rejected("bf16", "try --precision bf16"),),
            )
        return Choice(
            "fp32",
            "the CPU has no bf16 units",
            (Rejected("bf16", "emulated, many times slower"), Rejected("fp16", "likewise")),
        )
    gpu = _gpu(inventory, device)
    capability = ".".join(str(part) for part in gpu.capability)
    if gpu.capability >= _BF16_FROM:
        return Choice(
            "bf16",
            f"compute capability {capability} has bf16 units",
            (Rejected("fp16", "needs a loss scale"), Rejected("fp32", "slower")),
        )
    return Choice(
        "fp16", f"compute capability {capability} has fp16 units but no bf16", (Rejected("fp32", "slower"),)
    )


@dataclass(frozen=True)
class _WorkerSetup:
    """Who trains, on what, and what each of them has of the machine."""

    strategy: Choice[StrategyName]
    device: Choice[str]
    workers: Choice[int]
    backend: Choice[str]
    sharding: Choice[ShardingForm]
    spread: ModelSharding
    on_one_node: int
    limit: float


def plan(
    config: Config,
    inventory: Inventory,
    facts: ModelFacts,
    measured: Mapping[str, int] | None = None,
    cluster: Cluster | None = None,
    in_cluster: bool = False,
) -> Plan:
    """The plan of a run. ``measured`` holds a batch size found by probing, which takes the place of the estimate, and the
    ``global_batch_size`` that a resumed run began with. ``inventory`` is this machine, or in a cluster a node that will
    have workers; without ``cluster`` this machine is all there is. ``in_cluster``: we run inside a Ray job."""
    joined = cluster is not None and cluster.joined
    strategy = choose_strategy(config, inventory, in_cluster or joined)
    if strategy.value == "single":
        team = _alone(config, inventory, strategy)
    else:
        if not joined:
            inventory = replace(inventory, gpus=chosen_gpus(inventory, config.parallel.devices))
        team = _together(config, inventory, facts, strategy, cluster or Cluster.of(inventory))
    return _plan(config, inventory, facts, measured, team)


def _alone(config: Config, inventory: Inventory, strategy: Choice[StrategyName]) -> _WorkerSetup:
    if config.parallel.cpu_offload:
        raise UserError(
            f"--cpu-offload keeps the shards of data-parallel workers in host memory, and this run is one process ({strategy.reason}); "
            f"leave it out, or add --parallel-strategy data_parallel"
        )
    device, nobody = choose_device(config, inventory), "one process has nobody to share with"
    asked = config.parallel.sharding
    return _WorkerSetup(
        strategy,
        device,
        workers=Choice(1, "one process"),
        backend=Choice("none", "one process has nobody to talk to"),
        sharding=Choice(
            "none", nobody if asked in ("auto", "none") else f"{nobody}, in place of --sharding {asked}"
        ),
        spread=ModelSharding(),
        on_one_node=1,
        limit=_limit(config, inventory, device.value, 1),
    )


def _together(
    config: Config, inventory: Inventory, facts: ModelFacts, strategy: Choice[StrategyName], cluster: Cluster
) -> _WorkerSetup:
    workers = choose_workers(config, cluster, inventory)
    device = choose_worker_device(config, inventory, cluster.gpus)
    on_gpu, count = device.value != "cpu", workers.value
    on_one_node = cluster.on_one_node(count, on_gpus(config, cluster))
    limit = _limit(config, inventory, device.value, on_one_node)
    strategy = settle_strategy(config, facts, strategy, count, limit, on_gpu)
    backend = choose_backend(config, on_gpu, count)
    if strategy.value == "expert_parallel":
        sharding: Choice[ShardingForm] = Choice(
            "none", "the experts are divided among the hosts; the rest is whole on each"
        )
        spread = ModelSharding(count, "experts", primary=config.parallel.gate == "primary")
    else:
        sharding = choose_sharding(config, facts, count, limit, on_gpu)
        spread = ModelSharding(count, sharding.value, config.parallel.cpu_offload)
    return _WorkerSetup(strategy, device, workers, backend, sharding, spread, on_one_node, limit)


def _plan(
    config: Config,
    inventory: Inventory,
    facts: ModelFacts,
    measured: Mapping[str, int] | None,
    team: _WorkerSetup,
) -> Plan:
    device, count, spread = team.device.value, team.workers.value, team.spread
    gpu = _gpu(inventory, device) if device != "cpu" else None
    gpu_memory = gpu.memory_total if gpu else None
    batching = plan_batches(config, facts, gpu_memory, team.limit, measured, spread)
    batch, recompute = batching.batch_size.value, batching.recompute.value
    steps = choose_total_steps(config, facts, batching)
    flops = flops_per_step(facts, batching.global_batch.value, recompute)
    threads = _threads(inventory, team.on_one_node)
    loaders = choose_loader_workers(config, facts, device, threads)
    precision = choose_precision(config, inventory, device)
    unused = why_unused(team.strategy.value, facts)
    tokens = batch * spread.data_ranks * facts.units_per_sample // count
    return Plan(
        device=team.device,
        strategy=team.strategy,
        workers=team.workers,
        backend=team.backend,
        sharding=team.sharding,
        precision=precision,
        tf32=_tf32(config, inventory, device),
        gate=choose_gate(config, unused),
        placement=choose_placement(config, unused, count),
        exchange_chunks=choose_chunks(config, unused, count, team.backend.value, gpu is not None, tokens),
        expert_kernel=choose_kernel(config, facts, precision.value, gpu.capability if gpu else None),
        starting_batch=batching.starting,
        batch_size=batching.batch_size,
        accumulation_steps=batching.accumulation,
        global_batch_size=batching.global_batch,
        eval_batch_size=batching.evaluation,
        activation_checkpointing=batching.recompute,
        compile=choose_compile(
            config, facts, team.strategy.value, team.sharding.value, gpu, flops * steps.value, steps.value
        ),
        fused_optimizer=_fused(config, facts),
        cudnn_benchmark=_cudnn(config, device),
        loader_workers=loaders,
        prefetch=choose_prefetch(config, inventory, loaders.value, team.on_one_node),
        data_on_device=choose_data_on_device(config, facts, gpu_memory),
        threads=threads,
        warmup_steps=choose_warmup(config, steps.value),
        total_steps=steps,
        log_every=choose_log_every(config, steps.value, device),
        memory=estimate_memory(facts, batch, recompute, team.limit, spread),
        flops_per_step=flops,
    )


def _gpu(inventory: Inventory, device: str) -> Gpu:
    """The GPU of that name; for ``cuda``, any of them, one that has the least of each."""
    if device != "cuda":
        return next(gpu for gpu in inventory.gpus if f"cuda:{gpu.index}" == device)
    smallest = min(inventory.gpus, key=lambda gpu: gpu.memory_total)
    free, capability = (
        min(gpu.memory_free for gpu in inventory.gpus),
        min(gpu.capability for gpu in inventory.gpus),
    )
    return replace(smallest, memory_free=free, capability=capability)


def _limit(config: Config, inventory: Inventory, device: str, on_one_node: int) -> float:
    """Bytes a worker may plan with: the asked share of the GPU, at most what is free; or its part of most of the free RAM."""
    if device == "cpu":
        return inventory.ram_free * _HOST_SHARE / on_one_node
    gpu = _gpu(inventory, device)
    return min(gpu.memory_total * config.batch.gpu_memory_fraction, gpu.memory_free)


def _threads(inventory: Inventory, on_one_node: int) -> Choice[int]:
    if on_one_node == 1:
        return Choice(inventory.cores, f"{inventory.cores} usable cores")
    return Choice(
        max(1, inventory.cores // on_one_node),
        f"{inventory.cores} usable cores for {on_one_node} workers on a node",
    )


def _switch(value: Switch, flag: str) -> Choice[bool] | None:
    return None if value == "auto" else Choice(value == "on", f"asked for by {flag} {value}")


def _tf32(config: Config, inventory: Inventory, device: str) -> Choice[bool]:
    if device == "cpu":
        return Choice(False, "arithmetic of NVIDIA GPUs; the device is the CPU")
    asked = _switch(config.device.tf32, "--tf32")
    if asked is not None:
        return asked
    if config.run.deterministic:
        return Choice(False, "off in deterministic mode")
    if not config.run.auto:
        return Choice(False, PLAIN)
    has = _gpu(inventory, device).capability >= _TF32_FROM
    return Choice(
        has,
        "fp32 products are several times faster with it, at 10 bits of mantissa"
        if has
        else "the GPU has no tf32 units",
    )


def choose_compile(
    config: Config,
    facts: ModelFacts,
    strategy: StrategyName,
    sharding: ShardingForm,
    gpu: Gpu | None,
    flops: float,
    steps: int,
) -> Choice[bool]:
    """Compiling takes half a minute, and saves a part of each step afterwards. ``flops`` are those of the whole run."""
    asked = _switch(config.device.compile, "--compile")
    if asked is not None:
        return asked
    if not config.run.auto:
        return Choice(False, PLAIN)
    if gpu is None or gpu.capability < _COMPILE_FROM:
        return Choice(
            False,
            "on CPUs it seldom pays"
            if gpu is None
            else f"no compiler for compute capability {gpu.capability[0]}",
        )
    if config.run.deterministic:
        return Choice(False, "off in deterministic mode: compiled sums are made in another order")
    if strategy == "expert_parallel" or sharding != "none":
        return Choice(False, "a model in parts that does not compile would end the run; try --compile")
    seconds = max(flops / _RATES[gpu.capability >= (9, 0)], steps * _LEAST_STEP_S)
    if seconds < _WORTH_S:
        return Choice(
            False,
            f"the run is short (about {seconds_text(seconds)} of work): compiling would take as long as it saves",
        )
    experts = "; experts and gates included" if facts.experts else ""
    return Choice(
        True,
        f"about {seconds_text(seconds)} of work: compiling takes half a minute and saves more{experts}",
        (Rejected("off", "slower"),),
    )


def _fused(config: Config, facts: ModelFacts) -> Choice[bool]:
    if facts.own_optimizer:
        return Choice(False, "the task brings its own optimizer")
    if not config.run.auto:
        return Choice(False, PLAIN)
    return Choice(
        True,
        "AdamW in one kernel per group",
        (Rejected("for-loop AdamW", "one kernel per parameter and operation"),),
    )


def _cudnn(config: Config, device: str) -> Choice[bool]:
    if device == "cpu":
        return Choice(False, "no cuDNN on a CPU")
    asked = _switch(config.device.cudnn_benchmark, "--cudnn-benchmark")
    if asked is not None:
        return asked
    if config.run.deterministic:
        return Choice(False, "off in deterministic mode")
    if not config.run.auto:
        return Choice(False, PLAIN)
    return Choice(True, "batches have one shape")
