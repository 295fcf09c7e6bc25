"""What sections must agree on: settings that exclude each other are refused, both sides named."""

from __future__ import annotations

from orchestrator.config.checks import listed
from orchestrator.config.data import BatchSettings
from orchestrator.config.model import MoeSettings
from orchestrator.config.parallel import ParallelSettings


def check_devices(mode: str, parallel: ParallelSettings) -> None:
    """The four ways to say how many devices train must not contradict each other."""
    workers, named = parallel.workers, len(parallel.devices)
    if mode == "cpu" and named:
        raise ValueError(
            f"devices {listed(parallel.devices)} are GPUs, but gpu_mode is cpu; leave one of them out"
        )
    if mode == "cpu" and parallel.backend == "nccl":
        raise ValueError(
            "backend nccl works between GPUs, but gpu_mode is cpu; leave --backend out, or give gloo"
        )
    if mode == "single_gpu" and workers not in ("auto", 1):
        raise ValueError(
            f"gpu_mode single_gpu is one worker, but workers is {workers}; leave one of them out, or give --gpu-mode multi_gpu"
        )
    if mode == "single_gpu" and named > 1:
        raise ValueError(
            f"gpu_mode single_gpu takes one GPU, but devices names {named} ({listed(parallel.devices)}); leave one of them out"
        )
    if mode == "multi_gpu" and (workers == 1 or named == 1):
        found = "workers is 1" if workers == 1 else f"devices names one ({listed(parallel.devices)})"
        raise ValueError(f"gpu_mode multi_gpu is two GPUs or more, but {found}; leave one of them out")
    if named and isinstance(workers, int) and workers > named:
        raise ValueError(
            f"workers is {workers}, one GPU each, but devices names {named} ({listed(parallel.devices)}); lower --workers or name more"
        )


def check_product(mode: str, parallel: ParallelSettings, batch: BatchSettings) -> None:
    """The three sizes of a step, where all are given, must agree."""
    size, parts, whole = batch.batch_size, batch.accumulation_steps, batch.global_batch_size
    if not isinstance(size, int) or parts is None or whole is None:
        return
    holders, among = parallel.workers, f"workers {parallel.workers}"
    if mode == "single_gpu":
        holders, among = 1, "workers 1"
    if parallel.parallel_strategy == "expert_parallel" and parallel.gate == "primary":
        holders, among = 1, "1, as gate primary keeps the batch on one host,"
    product = f"batch_size {size} × accumulation_steps {parts} × {among}"
    if holders == "auto":
        raise ValueError(
            f"{product} may or may not be global_batch_size {whole}; give two of the three sizes, or --workers N"
        )
    if size * parts * holders != whole:
        raise ValueError(
            f"{product} is {size * parts * holders}, not global_batch_size {whole}; give two of the three sizes"
        )


def check_strategy(parallel: ParallelSettings, batch: BatchSettings, moe: MoeSettings) -> None:
    """What a strategy cannot do, where it is asked for by name. The plan, left to choose, takes one that can."""
    if parallel.parallel_strategy == "expert_parallel":
        if found := needs_whole_models(parallel, batch):
            raise ValueError(
                f"{found[0]} works with data_parallel, but parallel_strategy is expert_parallel: {found[1]}; leave one of them out"
            )
        if moe.experts == 0:
            raise ValueError(
                "experts is 0, a dense model, but parallel_strategy is expert_parallel, which shares out experts; "
                "raise --experts, or give --parallel-strategy data_parallel"
            )
    setting = _between_experts(parallel)
    if parallel.parallel_strategy == "data_parallel" and setting:
        raise ValueError(
            f"{setting} works with expert_parallel, but parallel_strategy is data_parallel: every worker has all experts and its own gate; "
            "leave it out, or give --parallel-strategy expert_parallel"
        )


def needs_whole_models(parallel: ParallelSettings, batch: BatchSettings) -> tuple[str, str] | None:
    """A setting that works only where every worker has the whole model, so not in expert parallel; and why."""
    found = (
        (
            f"sharding {parallel.sharding}",
            parallel.sharding in ("zero2", "zero3"),
            "experts are divided there, and nothing else",
        ),
        ("cpu_offload", parallel.cpu_offload, "experts are divided there, and nothing else"),
        ("sync_batchnorm", parallel.sync_batchnorm, "its hosts keep their own statistics"),
        ("static_graph", parallel.static_graph, "gradients are summed without DDP there"),
        ("find_unused_parameters", parallel.find_unused_parameters, "gradients are summed without DDP there"),
        (
            "no gradient_as_bucket_view",
            not parallel.gradient_as_bucket_view,
            "gradients are summed without DDP there",
        ),
        ("batch_size auto", batch.batch_size == "auto", "whole models are measured, and it divides them"),
    )
    return next(((setting, why) for setting, given, why in found if given), None)


def _between_experts(parallel: ParallelSettings) -> str | None:
    """A setting that means something between expert hosts only."""
    if parallel.gate == "primary":
        return "gate primary"
    if parallel.placement != "auto":
        return f"placement {parallel.placement}"
    return None if parallel.exchange_chunks is None else f"exchange_chunks {parallel.exchange_chunks}"
