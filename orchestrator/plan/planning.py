"""From settings, hardware and model facts to a plan: every open question answered, each answer with its reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from orchestrator.config.settings import Config, Switch
from orchestrator.errors import ResourceError
from orchestrator.plan.batching import Batching, plan_batches
from orchestrator.plan.estimate import Memory, ModelFacts, flops_per_step, memory
from orchestrator.plan.hardware import Inventory
from orchestrator.types import GIB, Choice, Rejected, bytes_text

Arithmetic = Literal["fp32", "bf16", "fp16"]
PLAIN = "plain default, because of --no-auto"
_TF32_FROM, _BF16_FROM = (8, 0), (8, 0)
_HOST_SHARE = 0.8  # of the free RAM may be planned with
_PLAIN_LOG_EVERY = 10


@dataclass(frozen=True)
class Plan:
    """What will run, and why."""

    device: Choice[str]
    precision: Choice[Arithmetic]
    tf32: Choice[bool]
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
    memory: Memory
    flops_per_step: float

    def choices(self) -> dict[str, Choice[Any]]:
        return {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Choice)}

    def to_json(self) -> dict[str, Any]:
        return {
            "choices": {name: asdict(choice) for name, choice in self.choices().items()},
            "memory": self.memory.to_json(),
            "flops_per_step": self.flops_per_step,
        }


def choose_device(config: Config, inventory: Inventory) -> Choice[str]:
    """One device: the first GPU where there is one, else the CPU."""
    mode, gpus = config.device.gpu_mode, inventory.gpus
    if mode == "cpu":
        return Choice("cpu", "asked for by --gpu-mode cpu")
    if not gpus:
        if mode == "single_gpu":
            why = f": {inventory.gpu_error}" if inventory.gpu_error else ""
            raise ResourceError(
                f"--gpu-mode single_gpu needs one GPU; 0 were found{why}. Use --gpu-mode auto or cpu, or see 'orchestrator check'"
            )
        return Choice("cpu", inventory.gpu_error or "no GPU was found", (Rejected("cuda:0", "there is none"),))
    others = (Rejected(f"the other {len(gpus) - 1} GPUs", "this version trains on one device"),) if len(gpus) > 1 else ()
    best = max(gpus, key=lambda gpu: (gpu.memory_free // GIB, -gpu.index))
    reason = "the only GPU" if len(gpus) == 1 else "the GPU with the most free memory"
    return Choice(f"cuda:{best.index}", f"{reason}: {best.name}, {bytes_text(best.memory_total)}", others)


def choose_precision(config: Config, inventory: Inventory, device: str) -> Choice[Arithmetic]:
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
                "fp32", "the CPU has bf16 units, but small models are seldom faster with them", (Rejected("bf16", "try --precision bf16"),)
            )
        return Choice("fp32", "the CPU has no bf16 units", (Rejected("bf16", "emulated, many times slower"), Rejected("fp16", "likewise")))
    gpu = _gpu(inventory, device)
    capability = ".".join(str(part) for part in gpu.capability)
    if gpu.capability >= _BF16_FROM:
        return Choice(
            "bf16", f"compute capability {capability} has bf16 units", (Rejected("fp16", "needs a loss scale"), Rejected("fp32", "slower"))
        )
    return Choice("fp16", f"compute capability {capability} has fp16 units but no bf16", (Rejected("fp32", "slower"),))


def plan(config: Config, inventory: Inventory, facts: ModelFacts, measured: Mapping[str, int] | None = None) -> Plan:
    """The plan of a run. ``measured`` holds a batch size found by probing, which takes the place of the estimate."""
    device = choose_device(config, inventory)
    limit = _limit(config, inventory, device.value)
    batching = plan_batches(config, facts, _gpu(inventory, device.value).memory_total if device.value != "cpu" else None, limit, measured)
    steps = _total_steps(config, facts, batching)
    on_device = _data_on_device(config, inventory, facts, device.value)
    workers = _loader_workers(config, inventory, facts, device.value)
    return Plan(
        device=device,
        precision=choose_precision(config, inventory, device.value),
        tf32=_tf32(config, inventory, device.value),
        starting_batch=batching.starting,
        batch_size=batching.batch_size,
        accumulation_steps=batching.accumulation,
        global_batch_size=batching.global_batch,
        eval_batch_size=batching.evaluation,
        activation_checkpointing=batching.recompute,
        compile=Choice(config.device.compile, "asked for by --compile" if config.device.compile else "not asked for (--compile)"),
        fused_optimizer=_fused(config, facts),
        cudnn_benchmark=_cudnn(config, device.value),
        loader_workers=workers,
        prefetch=_prefetch(config, inventory, workers.value),
        data_on_device=on_device,
        threads=Choice(inventory.cores, f"{inventory.cores} usable cores"),
        warmup_steps=_warmup(config, steps.value),
        total_steps=steps,
        log_every=_log_every(config, steps.value, device.value),
        memory=memory(facts, batching.batch_size.value, batching.recompute.value, limit),
        flops_per_step=flops_per_step(facts, batching.global_batch.value, batching.recompute.value),
    )


def _gpu(inventory: Inventory, device: str) -> Any:
    return next(gpu for gpu in inventory.gpus if f"cuda:{gpu.index}" == device)


def _limit(config: Config, inventory: Inventory, device: str) -> float:
    """Bytes the run may plan with: the asked share of the GPU, at most what is free; or most of the free RAM."""
    if device == "cpu":
        return inventory.ram_free * _HOST_SHARE
    gpu = _gpu(inventory, device)
    return min(gpu.memory_total * config.batch.gpu_memory_fraction, gpu.memory_free)


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
    return Choice(has, "fp32 products are several times faster with it, at 10 bits of mantissa" if has else "the GPU has no tf32 units")


def _fused(config: Config, facts: ModelFacts) -> Choice[bool]:
    if facts.own_optimizer:
        return Choice(False, "the task brings its own optimizer")
    if not config.run.auto:
        return Choice(False, PLAIN)
    return Choice(True, "AdamW in one kernel per group", (Rejected("for-loop AdamW", "one kernel per parameter and operation"),))


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


def _loader_workers(config: Config, inventory: Inventory, facts: ModelFacts, device: str) -> Choice[int]:
    """One rule: a process per core beyond the one that trains, at most eight; none where batches come from memory."""
    if config.data.loader_workers >= 0:
        return Choice(config.data.loader_workers, f"asked for by --loader-workers {config.data.loader_workers}")
    if not config.run.auto:
        return Choice(0, PLAIN)
    if facts.gathered_bytes is not None:
        return Choice(0, "the data hands out whole batches from memory", (Rejected("loader processes", "nothing to load"),))
    if device == "cpu":
        return Choice(0, "the CPU trains: loader processes would take its cores", (Rejected("loader processes", "try --loader-workers 1"),))
    count = max(0, min(8, inventory.cores - 1))
    return Choice(count, f"one per core beyond the one that trains, at most 8; {inventory.cores} cores")


def _prefetch(config: Config, inventory: Inventory, workers: int) -> Choice[int]:
    if not workers:
        return Choice(2, "not used: no loader processes")
    if not config.run.auto:
        return Choice(2, PLAIN)
    deep = inventory.ram_free > 8 * GIB * workers
    return Choice(4 if deep else 2, f"batches per loader process; {bytes_text(inventory.ram_free)} RAM free")


def _data_on_device(config: Config, inventory: Inventory, facts: ModelFacts, device: str) -> Choice[bool]:
    if device == "cpu":
        return Choice(False, "the device is the CPU")
    if facts.gathered_bytes is None:
        return Choice(False, "the data is read sample by sample")
    if not config.run.auto:
        return Choice(False, PLAIN)
    share = facts.gathered_bytes / _gpu(inventory, device).memory_total
    text = f"the training data is {bytes_text(facts.gathered_bytes)}, {share:.1%} of the GPU's memory"
    small = share < 0.05
    return Choice(small, text if small else f"{text}: more than 5%", () if small else (Rejected("on the device", "too large"),))


def _total_steps(config: Config, facts: ModelFacts, batching: Batching) -> Choice[int]:
    per_epoch = -(-facts.samples // batching.global_batch.value)
    steps = per_epoch * config.run.epochs
    reason = f"{config.run.epochs} epochs × {per_epoch} steps ({facts.samples} samples in batches of {batching.global_batch.value})"
    if config.run.debug:
        return Choice(min(steps, 4, config.run.max_steps or 4), "--debug")
    if config.run.max_steps is not None and config.run.max_steps < steps:
        return Choice(config.run.max_steps, f"--max-steps; {reason} would be {steps}")
    return Choice(steps, reason)


def _warmup(config: Config, steps: int) -> Choice[int]:
    if config.optim.warmup_steps is not None:
        return Choice(config.optim.warmup_steps, "asked for by --warmup-steps")
    if not config.run.auto:
        return Choice(0, PLAIN)
    return Choice(min(1000, steps // 20), "a twentieth of the run, at most 1000 steps")


def _log_every(config: Config, steps: int, device: str) -> Choice[int]:
    if config.watch.log_every is not None:
        return Choice(config.watch.log_every, "asked for by --log-every")
    if config.run.debug:
        return Choice(1, "--debug")
    if not config.run.auto:
        return Choice(_PLAIN_LOG_EVERY, PLAIN)
    if device == "cpu":
        return Choice(max(1, min(10, steps // 20)), "often enough to watch")
    return Choice(max(10, min(50, steps // 20)), "losses are fetched this rarely, so that the device need not wait for the host")
