"""Experts on several hosts: whether they are shared out, who runs the gate, how tokens travel, what computes them. Pure."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.config.cross_checks import needs_whole_models
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.estimate import ModelFacts, ModelSharding
from orchestrator.plan.workers import PLAIN, one_sample_memory
from orchestrator.types import Choice, Rejected, StrategyName, bytes_text, count_text

_FUSED_FROM = (9, 0)
_CHUNKS_FROM = 4096  # tokens of a host and micro-batch: below, half of them are taken to be too few for a GPU


def settle_strategy(
    config: Config, facts: ModelFacts, found: Choice[StrategyName], workers: int, limit: float, on_gpu: bool
) -> Choice[StrategyName]:
    """What several workers do, now that the model is known: whole copies where they fit, as no token has to travel then; experts
    shared out where they do not, and that helps more than sharding would."""
    if found.value == "expert_parallel" and not facts.experts:
        raise UserError(
            f"--parallel-strategy expert_parallel shares out the experts of a model, and this one has none: all of its "
            f"{count_text(facts.parameters)} parameters are dense. Use --parallel-strategy data_parallel, or give it experts: --experts N "
            "for the built-in tasks, MoELayer (experts/layer.py) in a model of your own"
        )
    if found.value != "data_parallel" or config.parallel.parallel_strategy != "auto":
        return found
    against = _against(config, facts, workers, limit, on_gpu)
    if against:
        return replace(found, rejected=(*found.rejected, Rejected("expert_parallel", against)))
    whole, shared = (
        one_sample_memory(config, facts, limit, spread)
        for spread in (ModelSharding(workers), ModelSharding(workers, "experts"))
    )
    need, may = bytes_text(shared.total), bytes_text(limit)
    return Choice(
        "expert_parallel",
        f"{found.reason}; with the experts shared out one sample needs {need}, and {may} may be used",
        (
            Rejected(
                "data_parallel", f"a whole copy on each, one sample would need {bytes_text(whole.total)}"
            ),
            *found.rejected,
        ),
    )


def _against(config: Config, facts: ModelFacts, workers: int, limit: float, on_gpu: bool) -> str | None:
    """Why experts are not shared out by themselves; None where they are."""
    if not facts.experts:
        return "the model has no experts"
    if workers == 1:
        return "one worker would host them all"
    if not config.run.auto:
        return "not by itself with --no-auto: ask for it with --parallel-strategy expert_parallel"
    unfit = needs_whole_models(config.parallel, config.batch)
    if unfit:
        return f"{unfit[0]} works with data_parallel only"
    whole = one_sample_memory(config, facts, limit, ModelSharding(workers))
    if whole.fits:
        return f"whole copies fit, and no token has to travel: one sample needs {bytes_text(whole.total)} of {bytes_text(limit)}"
    shared = one_sample_memory(config, facts, limit, ModelSharding(workers, "experts"))
    may_shard = on_gpu and config.parallel.sharding == "auto"
    instead = one_sample_memory(config, facts, limit, ModelSharding(workers, "zero3")) if may_shard else whole
    if not shared.fits and (instead.fits or instead.total <= shared.total):
        return f"one sample would need {bytes_text(shared.total)}, most of it outside the experts, and {bytes_text(limit)} may be used"
    return None


def why_unused(strategy: StrategyName, facts: ModelFacts) -> str | None:
    """Why settings of expert parallel mean nothing in this run; None where they do."""
    if strategy == "expert_parallel":
        return None
    if not facts.experts:
        return "not used: the model has no experts"
    return (
        "not used: one process has all experts"
        if strategy == "single"
        else "not used: every worker has all experts"
    )


def unused_settings(config: Config, strategy: StrategyName, facts: ModelFacts) -> str | None:
    """The settings of expert parallel that were given for a run in which they mean nothing, for the screen; None where there are none."""
    parallel, unused = config.parallel, why_unused(strategy, facts)
    given = [
        f"--{name.replace('_', '-')} {value}"
        for name, value, default in (
            ("gate", parallel.gate, "replicated"),
            ("placement", parallel.placement, "auto"),
            ("exchange_chunks", parallel.exchange_chunks, None),
            ("spares", parallel.spares, 0),
        )
        if value != default
    ]
    if not given or unused is None:
        return None
    instead = "; for several hosts add --parallel-strategy expert_parallel" if facts.experts else ""
    return f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} {unused}{instead}"


def choose_gate(config: Config, unused: str | None) -> Choice[str]:
    asked = config.parallel.gate
    if unused:
        return Choice(
            "replicated", unused + (f", in place of --gate {asked}" if asked != "replicated" else "")
        )
    if asked == "primary":
        return Choice("primary", "asked for by --gate primary: the first host routes the whole batch")
    return Choice(
        "replicated",
        "every host routes its own share of the batch",
        (Rejected("primary", "the others would wait for the first"),),
    )


def choose_placement(config: Config, unused: str | None, workers: int) -> Choice[str]:
    asked = config.parallel.placement
    if unused:
        return Choice("none", unused + (f", in place of --placement {asked}" if asked != "auto" else ""))
    if asked != "auto":
        return Choice(asked, f"asked for by --placement {asked}")
    if workers == 1:
        return Choice("round_robin", "one host has all experts")
    if not config.run.auto:
        return Choice("round_robin", PLAIN)
    turn = Rejected("round_robin", "in turn, whatever an expert costs and a device can do")
    return Choice("auto", "by the experts' cost and the measured speed of the hosts", (turn,))


def choose_chunks(
    config: Config, unused: str | None, workers: int, backend: str, on_gpu: bool, tokens: int
) -> Choice[int]:
    """Parts that a layer's tokens travel in. ``tokens`` are those of a host and micro-batch."""
    asked = config.parallel.exchange_chunks
    if unused:
        return Choice(1, unused + (f", in place of --exchange-chunks {asked}" if asked else ""))
    if asked:
        return Choice(asked, f"asked for by --exchange-chunks {asked}")
    if workers == 1:
        return Choice(1, "one host: no token travels")
    if not config.run.auto:
        return Choice(1, PLAIN)
    if not on_gpu:
        return Choice(
            1, "on CPUs the exchange takes the same cores as the experts: there is nothing to hide it behind"
        )
    if backend != "nccl":
        return Choice(
            1,
            f"{backend} moves rows through the host, which waits for them: there is nothing to hide it behind",
        )
    if tokens < _CHUNKS_FROM:
        return Choice(
            1, f"{tokens} tokens per host and micro-batch are too few to be cut: from {_CHUNKS_FROM} on"
        )
    reason = f"{tokens} tokens per host and micro-batch: experts compute on one part while the other travels"
    return Choice(2, reason, (Rejected("1", "experts would wait for the whole exchange"),))


def choose_kernel(
    config: Config, facts: ModelFacts, precision: str, capability: tuple[int, int] | None
) -> Choice[str]:
    """What computes the experts, under every strategy. ``capability`` is that of the GPU; None on a CPU."""
    asked = config.device.expert_kernel
    fused = capability is not None and capability >= _FUSED_FROM and precision == "bf16"
    if not facts.experts:
        return Choice("loop", "not used: the model has no experts")
    if asked != "auto":
        slow = "; it is not fused here, but a loop of torch's own" if asked == "grouped" and not fused else ""
        return Choice(asked, f"asked for by --expert-kernel {asked}{slow}")
    if not config.run.auto:
        return Choice("loop", PLAIN)
    if capability is None:
        return Choice(
            "auto", "on CPUs, as measured: grouped in fp32 where the sizes are multiples of four, else a loop"
        )
    here = f"compute capability {capability[0]}.{capability[1]} in {precision}"
    if fused:
        why = "one product after another, and the host waits for the row counts"
        return Choice(
            "grouped", f"fused from compute capability 9.0 in bf16; this is {here}", (Rejected("loop", why),)
        )
    return Choice("loop", f"grouped products are fused from compute capability 9.0 in bf16; this is {here}")
