"""Tests of the values that come with a name of another trainer: they are translated with the name."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.reading.reader import read_file
from orchestrator.config.settings import flat_names, foreign_name_advice
from orchestrator.errors import UserError


@pytest.mark.parametrize(
    ("name", "value", "flag", "line"),
    [
        ("mixed_precision", None, "--precision auto", "precision: auto"),
        ("mixed_precision", "fp8", "--precision fp8", "precision: fp8"),
        (
            "mixed_precision",
            "fp4",
            "--precision auto|fp32|bf16|fp16|fp8",
            "precision: auto|fp32|bf16|fp16|fp8",
        ),
        ("fp8_format", "hybrid", "--precision fp8", "precision: fp8"),
        ("fp16", None, "--precision fp16", "precision: fp16"),
        ("fp16", "false", "--precision fp32", "precision: fp32"),
        ("torch_compile", "true", "--compile on", "compile: on"),
        ("torch_compile", "false", "--compile off", "compile: off"),
        ("dynamo_backend", "inductor", "--compile on", "compile: on"),
        ("no_auto_optimize", None, "--no-auto", "auto: false"),
        ("no_auto_optimize", "true", "--no-auto", "auto: false"),
        ("enable_gpu_monitoring", "false", "--no-monitor-gpu", "monitor_gpu: false"),
        ("gradient_checkpointing", "true", "--activation-checkpointing on", "activation_checkpointing: on"),
        ("report_to", "none", "--trackers", "trackers: []"),
        ("lr_scheduler", "linear", "--schedule linear", "schedule: linear"),
        ("dataloader_num_workers", "many", "--loader-workers …", "loader_workers: …"),
        ("world_size", "4", "--workers 4", "workers: 4"),
        ("num_processes", None, "--workers …", "workers: …"),
        ("device", "cuda:3", "--devices 3", "devices: 3"),
        ("device", "cuda", "--gpu-mode single_gpu", "gpu_mode: single_gpu"),
        ("accelerator", "gpu", "--gpu-mode auto", "gpu_mode: auto"),
        ("multi_gpu", None, "--gpu-mode multi_gpu", "gpu_mode: multi_gpu"),
        ("distributed_type", "MULTI_GPU", "--gpu-mode multi_gpu", "gpu_mode: multi_gpu"),
        ("distributed_type", "FSDP", "--sharding zero3", "sharding: zero3"),
        ("distributed_type", "NO", "--workers 1", "workers: 1"),
        ("strategy", "ddp", "--parallel-strategy data_parallel", "parallel_strategy: data_parallel"),
        ("strategy", "fsdp", "--sharding zero3", "sharding: zero3"),
        ("strategy", "deepspeed_stage_2", "--sharding zero2", "sharding: zero2"),
        ("strategy", "deepspeed_stage_3", "--sharding zero3", "sharding: zero3"),
        (
            "strategy",
            "horovod",
            "--parallel-strategy auto|data_parallel|expert_parallel",
            "parallel_strategy: auto|data_parallel|expert_parallel",
        ),
        ("strategy", "ep", "--parallel-strategy expert_parallel", "parallel_strategy: expert_parallel"),
        (
            "enable_expert_parallel",
            "true",
            "--parallel-strategy expert_parallel",
            "parallel_strategy: expert_parallel",
        ),
        ("num_local_experts", "8", "--experts 8", "experts: 8"),
        ("n_routed_experts", "64", "--experts 64", "experts: 64"),
        ("num_experts_per_tok", "2", "--top-k 2", "top_k: 2"),
        ("moe_top_k", "2", "--top-k 2", "top_k: 2"),
        ("moe_intermediate_size", "768", "--expert-hidden-size 768", "expert_hidden_size: 768"),
        ("moe_aux_loss_coeff", "0.01", "--balance-loss 0.01", "balance_loss: 0.01"),
        ("moe_z_loss_coeff", "1e-3", "--z-loss 1e-3", "z_loss: 1e-3"),
        ("moe_router_bias_update_rate", "1e-3", "--balance-bias 1e-3", "balance_bias: 1e-3"),
        ("moe_router_enable_expert_bias", None, "--balance-bias 0.001", "balance_bias: 0.001"),
        ("router_jitter_noise", "0.1", "--gate-jitter 0.1", "gate_jitter: 0.1"),
        ("moe_router_score_function", "sigmoid", "--gate-scores sigmoid", "gate_scores: sigmoid"),
        ("scoring_func", "sparsemixer", "--gate-scores softmax|sigmoid", "gate_scores: softmax|sigmoid"),
        ("norm_topk_prob", "false", "--no-normalise-weights", "normalise_weights: false"),
        ("moe_expert_capacity_factor", "1.25", "--capacity-factor 1.25", "capacity_factor: 1.25"),
        ("drop_tokens", "true", "--capacity-factor …", "capacity_factor: …"),
        ("shared_expert_intermediate_size", "512", "--shared-expert-size 512", "shared_expert_size: 512"),
        ("swiglu", "false", "--expert-kind ffn", "expert_kind: ffn"),
        ("moe_grouped_gemm", "true", "--expert-kernel grouped", "expert_kernel: grouped"),
        ("a2a_ffn_overlap_degree", "2", "--exchange-chunks 2", "exchange_chunks: 2"),
        ("enable_evolution", "true", "--evolution cautious", "evolution: cautious"),
        ("dynamic_experts", "false", "--evolution off", "evolution: off"),
        ("sleep_interval", "500", "--sleep-every 500", "sleep_every: 500"),
        ("enable_eplb", None, "--rebalance on", "rebalance: on"),
        ("expert_data_parallel_size", "2", "--expert-replicas 2", "expert_replicas: 2"),
        ("zero_stage", "0", "--sharding none", "sharding: none"),
        ("zero_stage", "2", "--sharding zero2", "sharding: zero2"),
        ("zero_stage", "3", "--sharding zero3", "sharding: zero3"),
        ("fsdp", "full_shard auto_wrap", "--sharding zero3", "sharding: zero3"),
        ("fsdp", "SHARD_GRAD_OP", "--sharding zero2", "sharding: zero2"),
        ("fsdp_sharding_strategy", "3", "--sharding none", "sharding: none"),
        ("use_fsdp", "false", "--sharding none", "sharding: none"),
        ("offload_param_device", "cpu", "--cpu-offload", "cpu_offload: true"),
        ("offload_param_device", "none", "--no-cpu-offload", "cpu_offload: false"),
        ("dist_backend", "nccl", "--backend nccl", "backend: nccl"),
        ("dist_backend", "mpi", "--backend auto|nccl|gloo", "backend: auto|nccl|gloo"),
        ("sync_bn", "true", "--sync-batchnorm", "sync_batchnorm: true"),
        ("use_syncbn", None, "--sync-batchnorm", "sync_batchnorm: true"),
        ("ddp_bucket_cap_mb", "50", "--bucket-cap-mb 50", "bucket_cap_mb: 50"),
        (
            "ddp_find_unused_parameters",
            "false",
            "--no-find-unused-parameters",
            "find_unused_parameters: false",
        ),
        ("ddp_broadcast_buffers", "true", "--broadcast-buffers on", "broadcast_buffers: on"),
        ("ddp_timeout", "1800", "--collective-timeout 1800", "collective_timeout: 1800"),
        ("max_restarts", "5", "--max-failures 5", "max_failures: 5"),
        ("ckpt_path", "last", "--resume last", "resume: last"),
        ("default_root_dir", "out", "--run-dir out", "run_dir: out"),
        ("fast_dev_run", "true", "--debug", "debug: true"),
        ("dry_run", None, "--debug", "debug: true"),
        ("wd", "0.1", "--weight-decay 0.1", "weight_decay: 0.1"),
        ("logger", "false", "--trackers", "trackers: []"),
        ("logger", "wandb", "--trackers wandb", "trackers: wandb"),
        ("experiment_name", "8", "--name 8", "name: '8'"),
        ("resume_from_checkpoint", "true", "--resume auto", "resume: auto"),
        ("resume_from_checkpoint", "out/step 3", "--resume out/step 3", "resume: out/step 3"),
        ("lr", "3e-4", "--learning-rate 3e-4", "learning_rate: 3e-4"),
    ],
)
def test_values_are_translated(name: str, value: str | None, flag: str, line: str):
    assert foreign_name_advice(name, value, "flag") == f"write {flag}"
    section = flat_names()[line.partition(":")[0]]
    assert foreign_name_advice(name, value, "yaml") == f"write {line} under {section}:"


@pytest.mark.parametrize(
    "name", ["ep_size", "expert_parallel_size", "expert_model_parallel_size", "expert_parallel_degree"]
)
def test_an_expert_parallel_size_is_a_strategy_and_a_number_of_hosts(name: str):
    assert foreign_name_advice(name, "4", "flag") == "write --parallel-strategy expert_parallel --workers 4"
    assert (
        foreign_name_advice(name, "4", "yaml")
        == "write parallel_strategy: expert_parallel and workers: 4 under parallel:"
    )
    assert foreign_name_advice(name, "1", "flag") == "leave it out: that is the default of parallel_strategy"


def test_a_number_of_shared_experts_is_no_size():
    assert (
        foreign_name_advice("n_shared_experts", "2", "flag")
        == "write --shared-expert-size … (one expert of their hidden sizes together)"
    )
    assert (
        foreign_name_advice("num_shared_experts", "0", "flag")
        == "leave it out: that is the default of shared_expert_size"
    )
    assert (
        foreign_name_advice("drop_tokens", "false", "yaml")
        == "leave it out: that is the default of capacity_factor"
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mixed_precision: no", "precision: fp32"),
        ("fp16: true", "precision: fp16"),
        ("amp: off", "precision: fp32"),
    ],
)
def test_truth_values_of_yaml_are_understood(tmp_path: Path, text: str, name: str):
    (tmp_path / "cfg.yaml").write_text(text)
    with pytest.raises(UserError, match=f"write {name} under device:$"):
        read_file(tmp_path / "cfg.yaml")


def test_a_number_of_copies_is_answered_with_the_switch():
    answer = "write --rebalance on (experts are copied by their load)"
    assert foreign_name_advice("num_redundant_experts", "16", "flag") == answer
    assert (
        foreign_name_advice("num_redundant_experts", "0", "flag")
        == "leave it out: that is the default of rebalance"
    )


@pytest.mark.parametrize("value", [None, "true", "my-project"])
def test_the_switch_of_a_tracker_is_answered_with_trackers(value: str | None):
    assert foreign_name_advice("wandb", value, "flag") == "write --trackers wandb"


def test_peers_words_for_optimizers_are_answered_with_ours():
    assert foreign_name_advice("opt", "sgd", "flag") == "write --optimizer sgd"
    assert foreign_name_advice("optim", "adamw_bnb_8bit", "flag") == "write --optimizer adamw8bit"
    assert foreign_name_advice("ema", "true", "flag") == "write --ema-decay 0.999"
    assert foreign_name_advice("adam_epsilon", "1e-6", "flag") == "write --eps 1e-6"
    assert "--betas 0.9 0.95" in (foreign_name_advice("adam_beta2", "0.95", "flag") or "")


def test_words_for_adapters_are_answered_with_their_rank_and_targets():
    rank = "(the number is the rank of the adapters, with --task lm)"
    assert foreign_name_advice("lora_r", "8", "flag") == f"write --lora 8 {rank}"
    assert foreign_name_advice("use_peft", "true", "flag") == f"write --lora 16 {rank}"
    assert foreign_name_advice("finetuning_type", "lora", "yaml") == f"write lora: 16 under model: {rank}"
    assert str(foreign_name_advice("finetuning_type", "full", "flag")).startswith("leave it out")
    assert foreign_name_advice("adapter", "qlora", "flag") == "write --frozen-weights nf4 --lora 16"
    beside = "(quantised weights are frozen, beside the adapters of --lora 16)"
    assert foreign_name_advice("load_in_4bit", "true", "flag") == f"write --frozen-weights nf4 {beside}"
    assert foreign_name_advice("load_in_8bit", "yes", "flag") == f"write --frozen-weights int8 {beside}"
    assert foreign_name_advice("quantization_bit", "8", "flag") == f"write --frozen-weights int8 {beside}"
    assert str(foreign_name_advice("load_in_4bit", "false", "flag")).startswith("leave it out")
    assert foreign_name_advice("lora_target_modules", "q_proj", "flag") == "write --lora-targets q_proj"
    assert foreign_name_advice("lora_target_linear", "true", "flag") == "write --lora-targets all-linear"
