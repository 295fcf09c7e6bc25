"""Choices for models with experts: expert parallelism, gate, placement, token exchange, kernel.
Pure."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.config.sections.cross_checks import refused_setting, settings_of_strategy
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelFacts, ModelSharding, estimate_memory
from orchestrator.plan.evolution import choose_replicas
from orchestrator.plan.reasons import NO_AUTO
from orchestrator.plan.workers import choose_dense_sharding, one_sample_memory
from orchestrator.strategies import DATA_PARALLEL, EXPERT_PARALLEL, STRATEGIES, StrategyFacts, StrategyName
from orchestrator.types import (
    BF16_PRECISIONS,
    NOT_USED,
    Choice,
    Rejected,
    bytes_text,
    count_text,
)

_GROUPED_CAPABILITY = (9, 0)  # from which on torch fuses grouped products
_CHUNKS_FROM_TOKENS = 4096  # of a host and micro-batch; half of fewer tokens would not fill a GPU


def settle_strategy(
    config: Config,
    facts: ModelFacts,
    strategy: Choice[StrategyName],
    workers: int,
    limit_bytes: float,
    on_gpu: bool,
    evolves: bool = False,
) -> Choice[StrategyName]:
    """Decide between data-parallel and expert-parallel workers, now that the model is known.

    Replicas are preferred if they fit, because they exchange no tokens. Otherwise the experts are divided,
    if that helps more than sharding would, which is for GPUs and a model that does not evolve (``evolves``).
    Experts with a capacity are always divided.
    """
    divides_experts = STRATEGIES[strategy.value].divides_experts
    is_live = config.parallel.recovery == "live"
    if divides_experts and not facts.experts:
        raise UserError(
            f"--parallel-strategy expert_parallel divides the experts of a model, and this model "
            f"has none: all "
            f"of its {count_text(facts.parameters)} parameters are dense. Use --parallel-strategy "
            "data_parallel, or also --recovery live, which replaces lost workers; or add experts: "
            "--experts N for the built-in tasks, MoELayer (experts/moe/layer.py) in your own model"
        )
    if is_live and not divides_experts:
        return _divide_for_recovery(config, strategy) if facts.experts else strategy
    if not divides_experts and facts.limits_capacity and workers > 1:
        return _divide_for_capacity(config, strategy)
    if divides_experts or config.parallel.parallel_strategy != "auto":
        return strategy
    may_shard = on_gpu and not evolves
    on_hosts = _on_hosts(config, facts, workers, limit_bytes, on_gpu)
    why_not = _why_not_expert_parallel(config, facts, on_hosts, limit_bytes, may_shard)
    if why_not:
        return replace(strategy, rejected=(*strategy.rejected, Rejected(EXPERT_PARALLEL.name, why_not)))
    replica = one_sample_memory(config, facts, limit_bytes, ModelSharding(workers))
    divided = one_sample_memory(config, facts, limit_bytes, on_hosts)
    reason = (
        f"{strategy.reason}; with divided experts one sample needs {bytes_text(divided.total)} "
        f"of the usable {bytes_text(limit_bytes)}"
    )
    plain = estimate_memory(facts, 1, False, limit_bytes, ModelSharding(workers))
    recomputed = " with recomputed activations" if replica.total < plain.total else ""
    needed = f"one sample would need {bytes_text(replica.total)}{recomputed}"
    data_parallel = Rejected(DATA_PARALLEL.name, f"with a copy on every worker {needed}")
    return Choice(EXPERT_PARALLEL.name, reason, (data_parallel, *strategy.rejected))


def _divide_for_recovery(config: Config, strategy: Choice[StrategyName]) -> Choice[StrategyName]:
    """Divide the experts of a run with live recovery, or refuse where the settings ask for replicas."""
    conflict = refused_setting(EXPERT_PARALLEL, config.parallel)
    if config.parallel.parallel_strategy != "auto" or not config.run.auto or conflict:
        raise UserError(
            "--recovery live replaces data-parallel workers of dense models alone, and this model has "
            "experts; their hosts recover live: use --parallel-strategy expert_parallel, or --recovery "
            "restart"
        )
    restarted = Rejected(DATA_PARALLEL.name, "all its workers would restart from a checkpoint")
    return Choice(EXPERT_PARALLEL.name, f"{strategy.reason}; hosts of experts recover live", (restarted,))


def _divide_for_capacity(config: Config, strategy: Choice[StrategyName]) -> Choice[StrategyName]:
    """Divide experts that have a capacity, or refuse where the settings ask for replicas.

    The capacity is a share of the tokens of all workers. Expert hosts exchange their counts;
    data-parallel workers do not wait for each other in a layer."""
    own_tokens = "each worker would limit the experts by its own tokens, and drop others than one process"
    conflict = refused_setting(EXPERT_PARALLEL, config.parallel)
    if config.parallel.parallel_strategy != "auto" or not config.run.auto or conflict:
        needed_by = f", which {conflict[0]} needs" if conflict else ""
        raise UserError(
            f"the experts have a capacity (--capacity-factor), and the workers are data-parallel{needed_by}: "
            f"{own_tokens}. Use --parallel-strategy expert_parallel or --workers 1, or leave the capacity out"
        )
    data_parallel = Rejected(DATA_PARALLEL.name, own_tokens)
    reason = f"{strategy.reason}; a capacity of experts counts the tokens of all workers"
    return Choice(EXPERT_PARALLEL.name, reason, (data_parallel, *strategy.rejected))


def _why_not_expert_parallel(
    config: Config, facts: ModelFacts, on_hosts: ModelSharding, limit_bytes: float, may_shard: bool
) -> str | None:
    """Return why the plan does not divide the experts by itself; None if it does.

    ``may_shard`` says that workers with all experts may shard the model."""
    workers = on_hosts.workers
    if not facts.experts:
        return "the model has no experts"
    if workers == 1:
        return "one worker would host all experts"
    if not config.run.auto:
        return "--no-auto does not choose it: set it with --parallel-strategy expert_parallel"
    conflict = refused_setting(EXPERT_PARALLEL, config.parallel)
    if conflict:
        return f"{conflict[0]} works with data_parallel only"
    usable = bytes_text(limit_bytes)
    replica = one_sample_memory(config, facts, limit_bytes, ModelSharding(workers))
    if replica.fits:
        total = bytes_text(replica.total)
        return (
            f"a copy on every worker fits, without a token exchange: one sample needs {total} "
            f"of the usable {usable}"
        )
    divided = one_sample_memory(config, facts, limit_bytes, on_hosts)
    # The plan may shard the whole model instead, unless --sharding forbids it.
    alternative = replica
    if may_shard and config.parallel.sharding == "auto":
        alternative = one_sample_memory(config, facts, limit_bytes, ModelSharding(workers, "zero3"))
    if not divided.fits and (alternative.fits or alternative.total <= divided.total):
        total = bytes_text(divided.total)
        return f"one sample would need {total} of the usable {usable}, most of it outside the experts"
    return None


def divided_experts(config: Config, workers: int) -> ModelSharding:
    """Return the division of a model on expert hosts, with a whole dense part on each."""
    primary = config.parallel.gate == "primary"
    replicas = choose_replicas(config, None, workers).value
    copies = workers > 1 and (replicas > 1 or config.evolution.rebalance == "on")
    return ModelSharding(workers, "experts", primary=primary, expert_replicas=replicas, copies=copies)


def _on_hosts(
    config: Config, facts: ModelFacts, workers: int, limit_bytes: float, on_gpu: bool
) -> ModelSharding:
    """Return the division of a model on expert hosts, with the dense part sharded if it must be."""
    on_hosts = divided_experts(config, workers)
    dense = choose_dense_sharding(config, facts, on_hosts, limit_bytes, on_gpu)
    return replace(on_hosts, dense=dense.value)


def why_unused(strategy: StrategyFacts, facts: ModelFacts) -> str | None:
    """Return why the settings of expert parallelism have no effect in this run; None if they have
    one."""
    if strategy.divides_experts:
        return None
    return NOT_USED + (strategy.whole_experts if facts.experts else "the model has no experts")


def unused_settings(config: Config, strategy: StrategyFacts, facts: ModelFacts) -> str | None:
    """Return a message about given settings of expert parallelism and live recovery that have no effect;
    None if there are none."""
    unused = why_unused(strategy, facts)
    settings = settings_of_strategy(EXPERT_PARALLEL, config.parallel, config.evolution)
    given = [f"--{setting.replace('_', '-')} {value}" for setting, value in settings]
    messages: list[str] = []
    if given and unused is not None:
        instead = "; for several hosts add --parallel-strategy expert_parallel" if facts.experts else ""
        messages.append(f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} {unused}{instead}")
    if config.parallel.spares and not strategy.replaces_workers:
        live = "--parallel-strategy expert_parallel" if facts.experts else "--recovery live"
        messages.append(
            f"--spares {config.parallel.spares} is {NOT_USED}standby hosts replace lost ones in live "
            f"recovery alone; for that add {live}"
        )
    return "; ".join(messages) or None


def choose_gate(config: Config, unused: str | None) -> Choice[str]:
    gate = config.parallel.gate
    if unused:
        return Choice("replicated", unused + (f", instead of --gate {gate}" if gate != "replicated" else ""))
    if gate == "primary":
        return Choice("primary", "set by --gate primary: the first host routes the whole batch")
    primary = Rejected("primary", "the other hosts would wait for the first")
    return Choice("replicated", "every host routes its own share of the batch", (primary,))


def choose_placement(config: Config, unused: str | None, workers: int) -> Choice[str]:
    placement = config.parallel.placement
    if unused:
        return Choice(
            "none", unused + (f", instead of --placement {placement}" if placement != "auto" else "")
        )
    if placement != "auto":
        return Choice(placement, f"set by --placement {placement}")
    if workers == 1:
        return Choice("round_robin", "one host has all experts")
    if not config.run.auto:
        return Choice("round_robin", NO_AUTO)
    round_robin = Rejected("round_robin", "ignores the cost of an expert and the speed of a device")
    return Choice(
        "auto", "experts are placed by their cost and the measured speed of the hosts", (round_robin,)
    )


def choose_chunks(
    config: Config, unused: str | None, workers: int, backend: str, on_gpu: bool, tokens: int
) -> Choice[int]:
    """Choose the chunks in which a layer exchanges its tokens. ``tokens`` are those of a host and
    micro-batch."""
    chunks = config.parallel.exchange_chunks
    if unused:
        return Choice(1, unused + (f", instead of --exchange-chunks {chunks}" if chunks else ""))
    if chunks:
        return Choice(chunks, f"set by --exchange-chunks {chunks}")
    if config.run.reproducible:
        return Choice(
            1, "with --reproducible a chunk has the rows of some of the hosts, of any number of tokens"
        )
    if workers == 1:
        return Choice(1, "one host exchanges no tokens")
    if not config.run.auto:
        return Choice(1, NO_AUTO)
    if not on_gpu:
        return Choice(
            1, "on CPUs the exchange takes the same cores as the experts, so nothing can overlap it"
        )
    if backend != "nccl":
        return Choice(1, f"{backend} moves rows through the host, which waits, so nothing can overlap it")
    size = f"{tokens} tokens per host and micro-batch"
    if tokens < _CHUNKS_FROM_TOKENS:
        return Choice(1, f"{size} are too few to cut; chunks pay from {_CHUNKS_FROM_TOKENS} on")
    one_chunk = Rejected("1", "the experts would wait for the whole exchange")
    return Choice(2, f"{size}: the experts compute on one chunk while the other is exchanged", (one_chunk,))


def choose_kernel(
    config: Config, facts: ModelFacts, precision: str, capability: tuple[int, int] | None
) -> Choice[str]:
    """Choose the kernel of the experts, under every strategy. ``capability`` is the GPU's; None on
    a CPU."""
    kernel = config.device.expert_kernel
    fused = capability is not None and capability >= _GROUPED_CAPABILITY and precision in BF16_PRECISIONS
    if not facts.experts:
        return Choice("loop", f"{NOT_USED}the model has no experts")
    if precision == "fp8":
        return _fp8_kernel(kernel)
    if kernel != "auto":
        slow = "; it is not fused here: torch runs a loop" if kernel == "grouped" and not fused else ""
        return Choice(kernel, f"set by --expert-kernel {kernel}{slow}")
    if not config.run.auto:
        return Choice("loop", NO_AUTO)
    if capability is None:
        reason = (
            "on CPUs grouped products run in fp32 if the sizes are multiples of four, "
            "and a loop otherwise, as measured"
        )
        return Choice("auto", reason)
    device = f"compute capability {capability[0]}.{capability[1]} in {precision}"
    if fused:
        loop = Rejected("loop", "one product after another, and the host waits for the row counts")
        return Choice(
            "grouped",
            f"grouped products are fused from compute capability 9.0 on in bf16; this is {device}",
            (loop,),
        )
    reason = f"grouped products are fused from compute capability 9.0 on in bf16; this is {device}"
    return Choice("loop", reason)


def _fp8_kernel(kernel: str) -> Choice[str]:
    """Return the kernel of experts in fp8, or refuse the other one."""
    if kernel == "loop":
        raise UserError(
            "--expert-kernel loop computes in bf16, and --precision fp8 needs the grouped kernel; leave one "
            "of them out"
        )
    loop = Rejected("loop", "computes in bf16")
    return Choice("grouped", "only our kernel of all experts at once computes in fp8", (loop,))
