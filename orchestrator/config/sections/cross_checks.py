"""Checks between sections: settings that exclude each other are refused, and the message names both."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.config.sections.checks import listed
from orchestrator.config.sections.data import BatchSettings, DataSettings
from orchestrator.config.sections.evolution import EvolutionSettings
from orchestrator.config.sections.model import ModelSettings, MoeSettings
from orchestrator.config.sections.parallel import ParallelSettings
from orchestrator.errors import UserError
from orchestrator.strategies import STRATEGIES, StrategyFacts
from orchestrator.types import value_text

_FIXED_BY_MODEL = (
    "experts",
    "expert_hidden_size",
    "expert_kind",
    "shared_expert_size",
    "top_k",
    "gate_scores",
    "normalise_weights",
    "gate_jitter",
    "z_loss",
    "capacity_factor",
)
"""Settings of MoE layers that a model of transformers has in its own configuration, or not at all."""


_CONTRADICTIONS: tuple[tuple[str, str, str], ...] = (
    ("deterministic", "tf32 on", "it computes without tf32"),
    ("deterministic", "cudnn_benchmark on", "kernels would be chosen by their time"),
    ("deterministic", "share_by_speed on", "each run measures the speeds anew"),
    ("reproducible", "tf32 on", "it computes without tf32"),
    ("reproducible", "cudnn_benchmark on", "kernels would be chosen by their time"),
    ("reproducible", "share_by_speed on", "each run measures the speeds anew"),
    ("reproducible", "gate primary", "the first host's tokens would form other micro-batches"),
    ("reproducible", "cpu_offload", "gradients are added up as integers, which are not offloaded"),
    ("reproducible", "sync_batchnorm", "its statistics are sums over the samples that meet in a step"),
    ("reproducible", "broadcast_buffers on", "buffers of the first worker would follow its own samples"),
    ("reproducible", "batch_size auto", "a measured micro-batch differs from run to run; give a number"),
    ("reproducible", "precision fp8", "its scales follow all rows of a host"),
    (
        "reproducible",
        "compile_mode max-autotune",
        "kernels are chosen by their time, which differs between workers",
    ),
    ("reproducible", "compile_mode reduce-overhead", "its graphs keep gradients that exact sums take"),
    ("reproducible", "cuda_graph on", "the host looks at the sums of each step"),
    (
        "weight_precision bf16",
        "lora",
        "adapters are small, and frozen weights are in the type of --precision anyway",
    ),
    ("weight_precision bf16", "cuda_graph on", "a graph would repeat the random numbers of one step"),
    ("frozen_weights", "precision fp8", "products in fp8 are of weights in bf16"),
    ("frozen_weights", "compile on", "the operations that unpack weights are not compiled"),
    ("frozen_weights", "cuda_graph on", "the host counts the rows of each expert that it unpacks"),
    ("frozen_weights", "sharding zero2|zero3", "packed bytes are not divided among the workers"),
    ("frozen_weights", "cpu_offload", "packed bytes are not divided among the workers"),
    ("frozen_weights", "evolution cautious|bold", "changed experts would be packed anew"),
    ("tf32 on", "gpu_mode cpu", "tf32 is arithmetic of NVIDIA GPUs"),
    ("batch_size auto", "auto off", "without the plan nothing is measured; give a number"),
    ("gate primary", "share_by_speed on", "the first host has the whole batch"),
    ("expert_replicas", "gate primary", "the first host's group would have all tokens"),
    ("cpu_offload", "sharding none", "only the shards of zero2 or zero3 are offloaded"),
    ("evolution cautious|bold", "expert_replicas", "a newborn expert would be in one group alone"),
    ("rebalance on", "expert_replicas", "every group keeps one copy of each expert"),
    ("resume", "init_from", "resume continues a run, init_from begins one"),
)
"""Pairs of settings that exclude each other, and why; a setting without a value has any but its default."""


def check_contradictions(values: Mapping[str, object], defaults: Mapping[str, object]) -> None:
    """Raise ValueError for two settings that exclude each other. Values are by the names of the settings."""

    def given(setting: str) -> str | None:
        name, _, words = setting.partition(" ")
        value = values[name]
        is_given = value_text(value) in words.split("|") if words else value != defaults[name]
        return _setting_text(name, value) if is_given else None

    for first, second, reason in _CONTRADICTIONS:
        both = (given(first), given(second))
        if all(both):
            raise ValueError(
                f"{both[0]} and {both[1]} contradict each other: {reason}; leave one of them out"
            )


def check_bounded_rows(parallel: ParallelSettings, reproducible: bool) -> None:
    """Raise ValueError for chunks of bounded messages in a reproducible run."""
    if reproducible and parallel.exchange_rows == "bounded" and (parallel.exchange_chunks or 1) > 1:
        raise ValueError(
            f"reproducible, exchange_rows bounded and exchange_chunks {parallel.exchange_chunks} contradict "
            "each other: a chunk has the rows of some hosts, and bounded messages go to all of them; leave "
            "one of them out"
        )


def check_devices(gpu_mode: str, parallel: ParallelSettings) -> None:
    """Raise ValueError if ``gpu_mode``, ``workers``, ``devices`` and ``backend`` contradict each other."""
    workers = parallel.workers
    num_devices = len(parallel.devices)
    devices = listed(parallel.devices)
    if gpu_mode == "cpu" and num_devices:
        raise ValueError(f"devices {devices} are GPUs, but gpu_mode is cpu; leave one of them out")
    if gpu_mode == "cpu" and parallel.backend == "nccl":
        raise ValueError(
            "backend nccl works between GPUs, but gpu_mode is cpu; leave --backend out, or give gloo"
        )
    if gpu_mode == "single_gpu" and workers not in ("auto", 1):
        raise ValueError(
            f"gpu_mode single_gpu is one worker, but workers is {workers}; "
            "leave one of them out, or give --gpu-mode multi_gpu"
        )
    if gpu_mode == "single_gpu" and num_devices > 1:
        raise ValueError(
            f"gpu_mode single_gpu takes one GPU, but devices names {num_devices} ({devices}); "
            "leave one of them out"
        )
    if gpu_mode == "multi_gpu" and (workers == 1 or num_devices == 1):
        found = "workers is 1" if workers == 1 else f"devices names one ({devices})"
        raise ValueError(f"gpu_mode multi_gpu is two GPUs or more, but {found}; leave one of them out")
    if num_devices and isinstance(workers, int) and workers > num_devices:
        raise ValueError(
            f"workers is {workers}, one GPU each, but devices names {num_devices} ({devices}); "
            "lower --workers or name more"
        )


def check_settings_of_task(task: str, model: ModelSettings, data: DataSettings) -> None:
    """Raise UserError if another built-in task has settings of the task lm.

    Not a check of each Config: flags of a resumed run are read before its task is known."""
    if task not in ("digits", "text", "synthetic"):
        return
    given = {
        "model": model.model,
        "lora": model.lora,
        "data": data.data,
        "data_weights": data.data_weights,
        "validation_data": data.validation_data,
    }
    names = [name for name, value in given.items() if value]
    if names:
        verb = "belongs" if len(names) == 1 else "belong"
        raise UserError(
            f"{', '.join(names)} {verb} to the task lm, but task is {task}; give --task lm as well"
        )


def check_language_model(task: str, model: ModelSettings, moe: MoeSettings) -> None:
    """Raise ValueError if the task lm has sizes, which the configuration of its model has."""
    if task != "lm":
        return
    sections = ((model, ("width", "layers", "vocabulary")), (moe, _FIXED_BY_MODEL))
    names = [
        name
        for section, settings in sections
        for name in settings
        if getattr(section, name) != getattr(type(section)(), name)
    ]
    if names:
        verb = "is" if len(names) == 1 else "are"
        raise ValueError(
            f"{', '.join(names)} {verb} given, but for task lm the configuration of --model decides; "
            f"leave {'it' if len(names) == 1 else 'them'} out"
        )


def check_has_documents(task: str, data: DataSettings) -> None:
    """Raise UserError if the task lm is to be trained without data."""
    if task == "lm" and not data.data:
        raise UserError("the task lm needs --data: JSONL, Parquet, text or token files, or a data set's id")


def check_batch_product(
    gpu_mode: str, parallel: ParallelSettings, batch: BatchSettings, reproducible: bool
) -> None:
    """Raise ValueError if batch size × accumulation × workers is not the global batch size; all
    must be given. The micro-batches of a reproducible run are those of all workers together."""
    size = batch.batch_size
    accumulation = batch.accumulation_steps
    global_size = batch.global_batch_size
    if not isinstance(size, int) or accumulation is None or global_size is None:
        return
    data_ranks = parallel.workers
    ranks_text = f"workers {parallel.workers}"
    if gpu_mode == "single_gpu":
        data_ranks = 1
        ranks_text = "workers 1"
    if reproducible:
        data_ranks = 1
        ranks_text = "1, as reproducible counts the micro-batches of all workers,"
    if parallel.asked_strategy.divides_experts and parallel.gate == "primary":
        data_ranks = 1
        ranks_text = "1, as gate primary keeps the batch on one host,"
    product = f"batch_size {size} × accumulation_steps {accumulation} × {ranks_text}"
    if data_ranks == "auto":
        raise ValueError(
            f"{product} may or may not be global_batch_size {global_size}; "
            "give two of the three sizes, or --workers N"
        )
    total = size * accumulation * data_ranks
    if total != global_size:
        raise ValueError(
            f"{product} is {total}, not global_batch_size {global_size}; give two of the three sizes"
        )


def check_strategy(parallel: ParallelSettings, moe: MoeSettings, evolution: EvolutionSettings) -> None:
    """Raise ValueError for settings that the requested strategy cannot serve.

    With ``parallel_strategy auto`` the plan takes a strategy that can, unless live recovery was asked for.
    """
    asked = parallel.asked_strategy
    is_free = parallel.parallel_strategy == "auto"
    if is_free and not asked.replaces_workers:
        return
    request = " is ".join(asked.asked_with)
    refused = refused_setting(asked, parallel)
    if refused is not None:
        setting, reason = refused
        raise ValueError(
            f"{setting} works with {asked.instead}, but {request}: {reason}; leave one of them out"
        )
    if is_free:
        return
    if asked.divides_experts and moe.experts == 0:
        raise ValueError(
            f"experts is 0, a dense model, but parallel_strategy is {asked.name}, which shares out experts; "
            "raise --experts, or give --parallel-strategy data_parallel, with --recovery live where lost "
            "workers are to be replaced"
        )
    for owner in STRATEGIES.values():
        own = settings_of_strategy(owner, parallel, evolution)
        if own and owner is not asked:
            raise ValueError(
                f"{_setting_text(*own[0])} works with {owner.name}, but parallel_strategy is "
                f"{parallel.parallel_strategy}: "
                f"{asked.whole_experts} and its own gate; leave it out, or give --parallel-strategy "
                f"{owner.name}"
            )


def refused_setting(strategy: StrategyFacts, parallel: ParallelSettings) -> tuple[str, str] | None:
    """Return a requested setting that a strategy cannot serve, and why; None without one."""
    is_asked = parallel.asked_strategy is strategy
    for refusal in strategy.refusals:
        value = getattr(parallel, refusal.setting)
        if value in refusal.values and not (is_asked and refusal.unless_asked):
            return _setting_text(refusal.setting, value), refusal.reason
    return None


def settings_of_strategy(
    strategy: StrategyFacts, parallel: ParallelSettings, evolution: EvolutionSettings
) -> list[tuple[str, object]]:
    """Return the requested settings, with their values, that have an effect with a strategy alone."""
    given: list[tuple[str, object]] = []
    for setting, idle in strategy.own_settings.items():
        section = parallel if hasattr(parallel, setting) else evolution
        value = getattr(section, setting)
        if value not in idle:
            given.append((setting, value))
    return given


def _setting_text(setting: str, value: object) -> str:
    """Return a setting as messages name it: ('gate', 'primary') -> 'gate primary'."""
    if isinstance(value, bool):
        return setting if value else f"no {setting}"
    return f"{setting} {value}"


def check_evolution(evolution: EvolutionSettings, moe: MoeSettings, parallel: ParallelSettings) -> None:
    """Raise ValueError for settings of evolution that the experts or the workers cannot serve."""
    _check_replicas(evolution.expert_replicas, parallel)
    if moe.experts:
        check_expert_limits(evolution, moe.experts)
    if evolution.evolution in ("auto", "off"):
        return
    if moe.experts == 0:
        raise ValueError(
            f"evolution is {evolution.evolution}, but experts is 0, a dense model; "
            "raise --experts, or leave --evolution out"
        )
    divided = divides_experts(parallel)
    if divided is not None:
        raise ValueError(
            f"evolution {evolution.evolution} changes whole experts, but {divided} divides their weights "
            "among the workers; leave one of them out"
        )


def check_expert_limits(evolution: EvolutionSettings, experts: int) -> None:
    """Raise ValueError unless a layer of so many experts lies within the limits of evolution."""
    least = evolution.min_experts
    most = evolution.max_experts
    if least is not None and least > experts:
        raise ValueError(
            f"min_experts is {least}, but a layer begins with {experts} experts; "
            f"give at most --min-experts {experts}, or raise --experts"
        )
    if most is not None and most < experts:
        raise ValueError(
            f"max_experts is {most}, but a layer begins with {experts} experts; "
            f"give at least --max-experts {experts}, or lower --experts"
        )


def divides_experts(parallel: ParallelSettings) -> str | None:
    """Return a requested setting that divides the weights of an expert; None without one.

    Hosts with experts of their own shard the dense part alone."""
    if parallel.sharding in ("zero2", "zero3") and not parallel.asked_strategy.divides_experts:
        return f"sharding {parallel.sharding}"
    return "cpu_offload" if parallel.cpu_offload else None


def _check_replicas(replicas: int, parallel: ParallelSettings) -> None:
    workers = parallel.workers
    if isinstance(workers, int) and workers % replicas:
        raise ValueError(
            f"expert_replicas is {replicas}, but workers is {workers}; "
            "groups of equal size are needed: give numbers that divide evenly"
        )
