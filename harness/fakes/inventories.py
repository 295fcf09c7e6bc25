"""Invented machines, clusters and models, and any valid config: inputs for tests of pure
decisions."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from orchestrator.config.settings import Config, flat_names
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.estimate import ModelFacts
from orchestrator.plan.inventory.cluster import Cluster, Node
from orchestrator.plan.inventory.gpus import Gpu
from orchestrator.plan.inventory.hardware import Inventory
from orchestrator.plan.pass_memory import Moment, PassMemory
from orchestrator.plan.planning import Plan, plan
from orchestrator.types import GIB, KIB, MIB


def gpu(
    index: int = 0, total: float = 80 * GIB, free: float | None = None, capability: tuple[int, int] = (9, 0)
) -> Gpu:
    return Gpu(
        index=index,
        name=f"GPU of {total / GIB:.0f} GiB",
        memory_total=int(total),
        memory_free=int(total if free is None else free),
        capability=capability,
        multiprocessors=100,
        uuid=f"GPU-{index}",
    )


def machine(
    *gpus: Gpu,
    cores: int = 8,
    ram_free: float = 16 * GIB,
    cpu_bf16: bool = False,
    gpu_error: str | None = None,
) -> Inventory:
    return Inventory(
        gpus=gpus,
        cores=cores,
        ram_total=int(2 * ram_free),
        ram_free=int(ram_free),
        cpu_name="a CPU",
        architecture="x86_64",
        cpu_bf16=cpu_bf16,
        driver=None,
        versions={},
        gpu_error=gpu_error,
        disk_free=GIB,
    )


def cluster(*gpus: int, cpus: int = 8, most_gpus: int | None = None, most_cpus: int | None = None) -> Cluster:
    """Return a running cluster with so many GPUs on each node."""
    nodes = (Node(f"10.0.0.{number}", cpus, count, cpus) for number, count in enumerate(gpus, 1))
    return Cluster(tuple(nodes), True, most_gpus, most_cpus)


def planned(
    inventory: Inventory, facts: ModelFacts | None = None, where: Cluster | None = None, **settings: Any
) -> Plan:
    """Return the plan of these settings, on one machine or ``where`` a cluster runs."""
    # Of the built-in tasks, only the digits have a preset of evolution.
    config = Config.of(**{"task": "synthetic"} | settings)
    return plan(config, inventory, facts or model(), cluster=where)


def planned_or_refused(config: Config, inventory: Inventory, facts: ModelFacts) -> Plan:
    """Return the plan; a combination that is refused with a message is not a test case."""
    try:
        return plan(config, inventory, facts)
    except (ResourceError, UserError):
        reject()


def model(**changes: Any) -> ModelFacts:
    """Return the facts of a model of a million parameters in four blocks, one MiB of activations
    per sample."""
    facts: dict[str, Any] = {
        "parameters": 1_000_000,
        "trainable": 1_000_000,
        "expert_parameters": 600_000,
        "gate_parameters": 1_000,
        "experts": 8,
        "moe_layers": 4,
        "blocks": 4,
        "flops_per_sample": 2e6,
        "samples": 10_000,
        "validation_samples": 1_000,
        "unit": "samples",
        "units_per_sample": 1,
        "gathered_bytes": 10 * MIB,
        "own_optimizer": False,
        "method": "invented",
    }
    activations = {
        name: changes.pop(name)
        for name in (
            "activation_bytes",
            "activation_base",
            "block_bytes",
            "block_input_bytes",
            "largest_bytes",
        )
        if name in changes
    }
    facts |= changes
    facts.setdefault("passes", passes(facts["blocks"], **activations))
    return ModelFacts(**facts)


def passes(
    blocks: int = 4,
    activation_bytes: float = float(MIB),
    activation_base: float = 64.0 * KIB,
    block_bytes: float = 960.0 * KIB,
    block_input_bytes: float = 32.0 * KIB,
    largest_bytes: float = 16.0 * KIB,
) -> PassMemory:
    """Return passes whose peak comes when all gradients are complete.

    It has the activations of a sample, of which those inside blocks may be recomputed, and one and a half
    times the largest of them, which is that of rows for experts."""
    saved = activation_bytes + 1.5 * largest_bytes
    kept = saved + block_input_bytes + block_bytes * (1 / max(1, blocks) - 1)
    whole = Moment(gradients=1.0, expert_gradients=1.0)
    peak = whole._replace(base=activation_base, per_sample=saved, exchanged=largest_bytes)
    recomputed = peak._replace(base=activation_base / max(1, blocks), per_sample=kept)
    return PassMemory((peak,), (recomputed,), (peak,), whole)


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    """Models of all sizes, dense and with experts, frozen and trainable."""
    parameters = draw(st.integers(1, 10**10))
    trainable = draw(st.one_of(st.just(parameters), st.integers(0, parameters)))
    activations = draw(st.floats(0, 64.0 * GIB))
    base = draw(st.floats(0, 1.0 * GIB))
    return model(
        parameters=parameters,
        trainable=trainable,
        expert_parameters=draw(st.integers(0, parameters)),
        gate_parameters=draw(st.integers(0, parameters)),
        experts=draw(st.integers(0, 64)),
        blocks=draw(st.integers(0, 100)),
        activation_bytes=activations,
        activation_base=base,
        block_bytes=draw(st.floats(0, 1)) * activations,
        block_input_bytes=draw(st.floats(0, 1)) * activations,
        largest_bytes=draw(st.floats(0, 1)) * activations,
        samples=draw(st.integers(1, 10**6)),
        validation_samples=draw(st.integers(0, 10**5)),
        gathered_bytes=draw(st.one_of(st.none(), st.integers(0, 10**12))),
        own_optimizer=draw(st.booleans()),
    )


_CAPABILITIES = [(6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)]
_GPU_ERRORS = [None, "the driver shows 1 GPU(s), but torch sees none\nupdate the driver"]


@st.composite
def machines(draw: st.DrawFn) -> Inventory:
    """Machines with and without GPUs, new and old, empty and full."""
    gpus = []
    for index in range(draw(st.integers(0, 3))):
        total = draw(st.integers(2 * GIB, 200 * GIB))
        free = draw(st.integers(0, total))
        gpus.append(gpu(index, total, free, draw(st.sampled_from(_CAPABILITIES))))
    return machine(
        *gpus,
        cores=draw(st.integers(1, 128)),
        ram_free=draw(st.integers(GIB, 512 * GIB)),
        cpu_bf16=draw(st.booleans()),
        gpu_error=None if gpus else draw(st.sampled_from(_GPU_ERRORS)),
    )


_switches = st.sampled_from(["auto", "on", "off"])
_paths = st.text(string.ascii_letters + string.digits + " .-_#:é'\"", min_size=1, max_size=12).map(Path)
_small = st.integers(1, 300)
_words = st.text(min_size=1, max_size=20)
_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,10}", fullmatch=True)


def _maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), values)


# One strategy of valid values for each setting, by its flat name.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "task": _words,
    "name": _maybe(_names),
    "run_dir": _maybe(_paths),
    "epochs": _small,
    "max_steps": _maybe(_small),
    "early_stopping_patience": _maybe(_small),
    "early_stopping_metric": _words,
    "seed": st.integers(0, 2**63 - 1),
    "deterministic": st.booleans(),
    "auto": st.booleans(),
    "debug": st.booleans(),
    "experts": _maybe(st.integers(0, 64)),
    "expert_hidden_size": st.lists(_small, max_size=4).map(tuple),
    "expert_kind": st.sampled_from(["swiglu", "ffn"]),
    "shared_expert_size": _maybe(_small),
    "top_k": _maybe(st.integers(1, 4)),
    "gate_scores": st.sampled_from(["softmax", "sigmoid"]),
    "normalise_weights": st.booleans(),
    "gate_jitter": st.floats(0, 1, exclude_max=True),
    "model": _maybe(_words),
    "from_scratch": st.booleans(),
    "lora": _maybe(_small),
    "lora_alpha": _maybe(st.floats(0.5, 64)),
    "lora_dropout": st.floats(0, 0.9),
    "frozen_weights": st.sampled_from(["auto", "nf4", "int8"]),
    "lora_targets": st.lists(_words, max_size=2).map(tuple),
    "width": _maybe(_small),
    "layers": _maybe(_small),
    "sequence_length": _maybe(st.integers(0, 300)),
    "vocabulary": _maybe(_small),
    "balance_loss": _maybe(st.floats(0, 10)),
    "balance_bias": st.floats(0, 0.1),
    "z_loss": st.floats(0, 1e-3),
    "capacity_factor": _maybe(st.floats(0.1, 8)),
    "evolution": st.sampled_from(["auto", "off", "cautious", "bold"]),
    "sleep_every": st.integers(0, 300),
    "min_experts": _maybe(st.integers(1, 64)),
    "max_experts": _maybe(st.integers(1, 64)),
    "birth_entropy": _maybe(st.floats(0, 1)),
    "birth_overload": _maybe(st.floats(1, 8)),
    "birth_patience": _maybe(_small),
    "stall_patience": _maybe(_small),
    "merge_similarity": _maybe(st.floats(0, 1)),
    "prune_below": _maybe(st.floats(0, 1)),
    "prune_patience": _maybe(_small),
    "newborn_warmup": _maybe(st.integers(0, 300)),
    "change_tolerance": _maybe(st.floats(0, 1)),
    "rebalance": _switches,
    "expert_replicas": st.integers(1, 4),
    "data_dir": _maybe(_paths),
    "data": st.lists(_words, max_size=2).map(tuple),
    "data_weights": st.just(()),  # as many as there are entries of data
    "validation_data": st.lists(_words, max_size=2).map(tuple),
    "validation_share": _maybe(st.floats(0, 0.9)),
    "chat_template": _maybe(_paths),
    "packing": st.booleans(),
    "train_on": st.sampled_from(["assistant", "all"]),
    "text_column": _words,
    "skip_bad": st.booleans(),
    "samples": _maybe(_small),
    "shuffle_buffer": st.integers(0, 1000),
    "loader_workers": st.integers(-1, 8),
    "batch_size": st.one_of(st.none(), st.just("auto"), _small),
    "accumulation_steps": _maybe(st.integers(1, 16)),
    "global_batch_size": _maybe(st.integers(1, 4096)),
    "eval_batch_size": _maybe(_small),
    "gpu_memory_fraction": st.floats(0.05, 1.0),
    "learning_rate": _maybe(st.floats(1e-300, 1e300, exclude_min=True)),
    "optimizer": st.just("sgd"),
    "schedule": st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    "warmup_steps": _maybe(st.integers(0, 300)),
    "weight_decay": st.floats(0, 1),
    "decay_biases": st.booleans(),
    "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.999)),
    "eps": st.floats(1e-12, 1e-3),
    "momentum": _maybe(st.floats(0, 0.99)),
    "ema_decay": st.floats(0, 0.9999),
    "evaluate_ema": st.just(False),
    "clip_norm": st.floats(0, 1e6),
    "gpu_mode": st.sampled_from(["auto", "cpu", "single_gpu", "multi_gpu"]),
    "precision": st.sampled_from(["auto", "fp32", "bf16", "fp16", "fp8"]),
    "weight_precision": st.sampled_from(["fp32", "bf16"]),
    "tf32": _switches,
    "compile": st.sampled_from(["auto", "on", "off"]),
    "cuda_graph": _switches,
    "compile_mode": st.sampled_from(["default", "reduce-overhead", "max-autotune"]),
    "compile_parts": st.sampled_from(["all", "experts", "gate"]),
    "activation_checkpointing": _switches,
    "recompute_experts": st.booleans(),
    "cudnn_benchmark": _switches,
    "empty_cache_every": st.integers(0, 300),
    "expert_kernel": st.sampled_from(["auto", "loop", "grouped"]),
    "parallel_strategy": st.sampled_from(["auto", "data_parallel", "expert_parallel"]),
    "workers": st.one_of(st.just("auto"), st.integers(1, 8)),
    "devices": st.lists(st.integers(0, 3), max_size=3, unique=True).map(tuple),
    "backend": st.sampled_from(["auto", "nccl", "gloo"]),
    "sharding": st.sampled_from(["auto", "none", "zero2", "zero3"]),
    "cpu_offload": st.booleans(),
    "sync_batchnorm": st.booleans(),
    "gate": st.sampled_from(["replicated", "primary"]),
    "placement": st.sampled_from(["auto", "round_robin", "experts.json", "a b/é.json"]),
    "exchange_chunks": _maybe(st.integers(1, 8)),
    "exchange_rows": st.sampled_from(["counted", "bounded"]),
    "share_by_speed": _switches,
    "bucket_cap_mb": _maybe(_small),
    "static_graph": st.booleans(),
    "find_unused_parameters": st.booleans(),
    "broadcast_buffers": _switches,
    "gradient_as_bucket_view": st.booleans(),
    "max_failures": st.integers(0, 10),
    "collective_timeout": _maybe(_small),
    "recovery": st.sampled_from(["auto", "live", "restart"]),
    "spares": st.integers(0, 3),
    "resource_timeout": _small,
    "ray_address": st.sampled_from(["auto", "local", "10.0.0.1:6379", "head.example.org:1", "[::1]:65535"]),
    "nccl_debug": st.booleans(),
    "checkpoint_every": st.integers(0, 300),
    "snapshot_every": st.just("auto") | st.integers(0, 300),
    "keep": _small,
    "keep_last": st.booleans(),
    "resume": _maybe(_words),
    "init_from": _maybe(_paths),
    "log_every": _maybe(_small),
    "evaluate_every": st.integers(0, 300),
    "monitor_gpu": st.booleans(),
    "gpu_log_interval": st.integers(0, 300),
    "trackers": st.lists(st.sampled_from(["tensorboard", "wandb", "mlflow"]), max_size=3).map(tuple),
    "callbacks": st.lists(st.sampled_from(["mine:Watch", "a.b:C"]), max_size=2).map(tuple),
    "callback_errors": st.sampled_from(["warn", "raise"]),
    "metrics_port": _maybe(st.integers(0, 65535)),
    "metrics_address": st.sampled_from(["127.0.0.1", "0.0.0.0", "::1"]),
    "plots": st.sampled_from(["end", "off"]),
    "profile": st.booleans(),
    "reproducible": st.booleans(),
    "digest_every": st.integers(0, 300),
}


@st.composite
def configs(draw: st.DrawFn, *names: str) -> Config:
    """Any valid config of a few settings, or of the named ones. A value that contradicts an
    earlier one is dropped."""
    known = st.sampled_from(sorted(set(VALUES) & set(flat_names())))
    chosen = names or draw(st.lists(known, max_size=12, unique=True))
    config = Config()
    for name in chosen:
        try:
            config = config.but(**{name: draw(VALUES[name])})
        except UserError:
            continue
    return config
