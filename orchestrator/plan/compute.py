"""How the device computes: precision, tf32, compilation, fused optimizer, cuDNN benchmarking.
Pure."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from orchestrator.config.sections.optim import OptimSettings
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.device import gpu_of
from orchestrator.plan.estimate import ModelFacts, TrainedTensors
from orchestrator.plan.inventory.gpus import Gpu
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.reasons import NO_AUTO, set_switch
from orchestrator.types import (
    BF16_PRECISIONS,
    NOT_USED,
    Choice,
    PrecisionName,
    Rejected,
    flops_text,
    seconds_text,
)

# Compute capabilities from which on a GPU has the feature.
_TF32_CAPABILITY = (8, 0)
_BF16_CAPABILITY = (8, 0)
_COMPILE_CAPABILITY = (7, 0)
_HOPPER_CAPABILITY = (9, 0)
_FP8_MAJORS = (9, 10)  # later ones have too little shared memory for the tiles of our kernel

# FLOP/s that a good step reaches, from compute capability 9.0 on and below.
_HOPPER_FLOPS_PER_S = 3e14
_OLDER_FLOPS_PER_S = 6e13
_SHORTEST_STEP_S = 0.004  # the host launches some hundred kernels, however small the step is
# On an H200, compiling took 20 s of a transformer's run and made its steps an eighth shorter.
_COMPILE_PAYS_FROM_S = 300.0
_BYTE_MOMENT = (1 + 4 / 256) / 4  # of an fp32 number: a byte, and a part of the scale of 256 of them
_CODE_BLOCK = 256  # numbers of one scale
_EXACT_BYTES = 8.0  # of an integer in the sums of --reproducible


def choose_precision(config: Config, inventory: Inventory, device: str) -> Choice[PrecisionName]:
    """Choose bf16 from compute capability 8.0 on, fp16 with loss scaling below it, and fp32 on a
    CPU. fp8 is chosen by the user alone: it changes results by more than rounding of bf16."""
    setting = config.device.precision
    if setting == "fp8":
        _check_fp8_device(inventory, device)
        return Choice("fp8", "set by --precision fp8: products of experts' rows; all else computes in bf16")
    if setting != "auto":
        emulated = device == "cpu" and (setting == "fp16" or (setting == "bf16" and not inventory.cpu_bf16))
        slow = "; this CPU has no units for it and is many times slower than in fp32" if emulated else ""
        return Choice(setting, f"set by --precision {setting}{slow}")
    if not config.run.auto:
        return Choice("fp32", NO_AUTO)
    if device == "cpu":
        return _cpu_precision(inventory)
    capability = gpu_of(inventory, device).capability
    version = f"compute capability {capability[0]}.{capability[1]}"
    fp32 = Rejected("fp32", "slower")
    if capability >= _BF16_CAPABILITY:
        return Choice("bf16", f"{version} has bf16 units", (Rejected("fp16", "needs a loss scale"), fp32))
    return Choice("fp16", f"{version} has fp16 units, but no bf16 units", (fp32,))


def _check_fp8_device(inventory: Inventory, device: str) -> None:
    """Raise ResourceError where the device has no units, or too little memory, for products in fp8."""
    found = "the device is the CPU"
    if device != "cpu":
        # Each GPU, not the least capability of all: later ones than 10 lack the memory.
        gpus = inventory.gpus if device == "cuda" else (gpu_of(inventory, device),)
        lacking = [gpu for gpu in gpus if gpu.capability[0] not in _FP8_MAJORS]
        if not lacking:
            return
        major, minor = lacking[0].capability
        found = f"{lacking[0].name} has compute capability {major}.{minor}"
    raise ResourceError(
        f"--precision fp8 needs GPUs of compute capability 9 or 10 (H100, H200, B200), and {found}; "
        "leave it out, and the plan chooses what the device has"
    )


def check_fp8_model(facts: ModelFacts) -> None:
    """Raise UserError for a model whose experts' products cannot be computed in fp8."""
    if not facts.experts:
        raise UserError(
            "--precision fp8 computes the products of experts, and this model has none; use --precision bf16"
        )
    if facts.fp8_obstacle:
        raise UserError(
            f"--precision fp8 cannot compute these experts: {facts.fp8_obstacle}; use --precision bf16"
        )


def check_short_weights(config: Config, facts: ModelFacts) -> None:
    """Raise UserError where weights in bf16 cannot be trained."""
    if not config.device.short_weights:
        return
    if facts.own_optimizer:
        raise UserError(
            "--weight-precision bf16 lets an optimizer update a part of the weights at a time, and the "
            "task's own may look at all of them; leave the flag out, or build_optimizer of the task"
        )


def _cpu_precision(inventory: Inventory) -> Choice[PrecisionName]:
    if inventory.cpu_bf16:
        reason = "the CPU has bf16 units, but small models are seldom faster with them"
        return Choice("fp32", reason, (Rejected("bf16", "try --precision bf16"),))
    bf16 = Rejected("bf16", "emulated, many times slower")
    fp16 = Rejected("fp16", "emulated, many times slower")
    return Choice("fp32", "the CPU has no bf16 units", (bf16, fp16))


def choose_tf32(config: Config, inventory: Inventory, device: str) -> Choice[bool]:
    if device == "cpu":
        return Choice(False, f"{NOT_USED}only NVIDIA GPUs have tf32; the device is the CPU")
    switch = set_switch(config.device.tf32, "--tf32")
    if switch is not None:
        return switch
    if config.run.repeats:
        return Choice(False, "deterministic mode turns it off")
    if not config.run.auto:
        return Choice(False, NO_AUTO)
    if gpu_of(inventory, device).capability < _TF32_CAPABILITY:
        return Choice(False, "the GPU has no tf32 units")
    return Choice(True, "fp32 matrix products are several times faster with it, at 10 bits of mantissa")


def flops_per_second(gpu: Gpu) -> float:
    """Return the FLOP/s that a good step reaches on a GPU."""
    return _HOPPER_FLOPS_PER_S if gpu.capability >= _HOPPER_CAPABILITY else _OLDER_FLOPS_PER_S


def choose_compile(
    config: Config,
    facts: ModelFacts,
    in_lockstep: bool,
    gpu: Gpu | None,
    flops: float,
    steps: int | None,
) -> Choice[bool]:
    """Choose compilation for runs that are long enough.

    It takes half a minute and saves a part of each step. ``flops`` are those of a step, and
    ``steps`` those of the whole run.
    """
    switch = set_switch(config.device.compile, "--compile")
    if switch is not None:
        return switch
    if not config.run.auto:
        return Choice(False, NO_AUTO)
    if config.model.frozen_weights != "auto":
        unpacked = f"frozen weights are unpacked by code that is not compiled ({config.model.frozen_weights})"
        return Choice(False, unpacked)
    if gpu is None:
        return Choice(
            False, "it seldom pays on CPUs", (Rejected("on", "compiling takes longer than it saves"),)
        )
    if gpu.capability < _COMPILE_CAPABILITY:
        no_compiler = f"there is no compiler for compute capability {gpu.capability[0]}"
        return Choice(False, no_compiler, (Rejected("on", "would fail"),))
    if config.run.repeats:
        other_order = "compiled code sums in another order"
        return Choice(False, "deterministic mode turns it off", (Rejected("on", other_order),))
    if in_lockstep:
        return Choice(
            False, "the run would end if a part of the model did not compile on one worker; try --compile"
        )
    if steps is None:
        return Choice(False, "the number of steps is unknown; try --compile for a long run")
    rate = flops_per_second(gpu)
    step_s = max(flops / rate, _SHORTEST_STEP_S)
    pace = f"{flops_text(rate)}/s"
    if step_s == _SHORTEST_STEP_S:
        pace = f"{seconds_text(step_s)} a step, the shortest that is assumed"
    seconds = steps * step_s
    length = f"about {seconds_text(seconds)} of work at {pace}"
    if seconds < _COMPILE_PAYS_FROM_S:
        takes_long = Rejected("on", "compiling would take as long as it saves")
        return Choice(False, f"the run is short ({length})", (takes_long,))
    experts = "; experts and gates included" if facts.experts else ""
    reason = f"{length}: compiling takes half a minute and saves more{experts}"
    return Choice(True, reason, (Rejected("off", "slower"),))


def optimizer_moments(settings: OptimSettings, facts: ModelFacts) -> float:
    """Return the tensors that the optimizer keeps for each trained parameter, without an average."""
    if facts.own_optimizer or settings.optimizer == "adamw":
        return 2.0
    if settings.optimizer == "sgd":
        return float(settings.momentum_used > 0)
    if settings.optimizer == "muon":
        return 1 + facts.adamw_parameters / max(1, facts.trainable)
    tensors = (facts.dense_tensors, facts.expert_tensors)
    kept = sum(each.sum(_coded_moments) for each in tensors)
    return kept / max(1, facts.trainable) if kept else 2 * _BYTE_MOMENT


def _coded_moments(shape: tuple[int, ...]) -> float:
    """Return the size of both averages of AdamW in 8 bit, in numbers of four bytes."""
    numbers = prod(shape)
    return 2 * numbers if len(shape) < 2 else 2 * (numbers / 4 + _in_blocks(shape) / _CODE_BLOCK)


def _in_blocks(shape: tuple[int, ...]) -> float:
    """Return the numbers of a tensor whose rows are filled up to whole blocks of codes."""
    return shape[0] * -(-prod(shape[1:]) // _CODE_BLOCK) * _CODE_BLOCK


def _coding_numbers(shape: tuple[int, ...]) -> float:
    """Return the numbers that AdamW in 8 bit holds at once for a tensor whose averages are coded again."""
    numbers = prod(shape)
    return 2 * numbers if len(shape) < 2 else 1.25 * numbers + 6.27 * _in_blocks(shape)


def _muon_numbers(shape: tuple[int, ...]) -> float:
    """Return the numbers that Muon's iteration holds at once for a matrix or a stack of experts."""
    if len(shape) < 2:
        return 0
    *stack, rows, columns = shape
    matrix = rows * columns
    square = min(rows, columns) ** 2
    return prod(stack) * max(5 * matrix + square, 3 * matrix + 4 * square)


def _update_bytes(settings: OptimSettings, tensors: TrainedTensors) -> float:
    """Return the bytes with which the optimizer updates the tensor that needs most."""
    numbers = {"adamw8bit": _coding_numbers, "muon": _muon_numbers}.get(settings.optimizer)
    return 4.0 * tensors.most(numbers) if numbers else 0.0


def with_memory_settings(config: Config, facts: ModelFacts) -> ModelFacts:
    """Return the facts with the settings that take or save memory, whatever the device."""
    return replace(
        facts,
        update_bytes=_update_bytes(config.optim, facts.dense_tensors),
        expert_update_bytes=_update_bytes(config.optim, facts.expert_tensors),
        moments=optimizer_moments(config.optim, facts),
        averages=float(config.optim.ema_decay is not None),
        recomputes_experts=config.device.recompute_experts,
        widened_bytes=2.0 if config.device.short_weights else 0.0,
        gradient_bytes=_EXACT_BYTES if config.run.reproducible else facts.gradient_bytes,
    )


def with_weight_copies(
    config: Config, facts: ModelFacts, workers: int, device: str, precision: str
) -> ModelFacts:
    """Return the facts with the copies in bf16 that AdamW keeps of large experts, in one process on a GPU."""
    fused = choose_fused_optimizer(config, facts, sharding="none").value
    writes_copies = config.optim.optimizer == "adamw" and fused
    keeps_copies = (
        (workers == 1 or config.run.reproducible)
        and device != "cpu"
        and precision in BF16_PRECISIONS
        and writes_copies
        and not config.device.short_weights
    )
    return replace(facts, copied_experts=facts.large_experts if keeps_copies else 0)


def choose_fused_optimizer(config: Config, facts: ModelFacts, sharding: str) -> Choice[bool]:
    if facts.own_optimizer:
        return Choice(False, "the task has its own optimizer")
    if config.optim.optimizer == "adamw8bit":
        return Choice(False, "adamw8bit decodes and encodes one parameter at a time")
    if not config.run.auto:
        return Choice(False, NO_AUTO)
    if config.optim.optimizer == "sgd" and sharding != "none":
        fused = Rejected("fused", "would fail in the first step")
        return Choice(False, f"torch has no fused SGD for shards of weights (sharding {sharding})", (fused,))
    unfused = Rejected("for-loop", "one kernel per parameter and operation")
    return Choice(True, "the optimizer runs in one kernel per group", (unfused,))


def choose_cudnn_benchmark(config: Config, device: str) -> Choice[bool]:
    if device == "cpu":
        return Choice(False, f"{NOT_USED}there is no cuDNN on a CPU")
    switch = set_switch(config.device.cudnn_benchmark, "--cudnn-benchmark")
    if switch is not None:
        return switch
    if config.run.repeats:
        return Choice(False, "deterministic mode turns it off")
    if not config.run.auto:
        return Choice(False, NO_AUTO)
    return Choice(True, "all batches have the same shape")
