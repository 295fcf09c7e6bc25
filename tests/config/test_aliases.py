"""Tests of the aliases: every answer names a setting that exists and a value that it takes."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from orchestrator.cli.train import TrainOptions
from orchestrator.config.alias_table import ALIASES, ONE_PROCESS
from orchestrator.config.aliases import Alias, Form
from orchestrator.config.flags import check_flags, read_flags
from orchestrator.config.optim import OptimSettings
from orchestrator.config.reader import read_file
from orchestrator.config.settings import Config, flat_names, foreign_name_advice
from orchestrator.errors import UserError

VALUES = (
    None,
    *["true", "no", "2", "8", "0.5", "bfloat16", "fp8", "cpu", "wandb", "inductor", "all", "0,2"],
    *[
        "cuda:1",
        "nccl",
        "ddp",
        "dp",
        "fsdp",
        "deepspeed_stage_2",
        "full_shard",
        "data_parallel",
        "distributed",
        "NO",
        "MULTI_GPU",
    ],
)
"""Values that people give to foreign names."""


def all_aliases() -> list[tuple[str, Alias]]:
    """Return every foreign name with its alias, and with the aliases of single values."""
    by_name = [(name, alias) for name, alias in ALIASES.items()]
    return by_name + [(name, other) for name, alias in by_name for other in alias.by_value.values()]


def test_every_alias_names_a_setting_of_ours():
    assert [
        name for name, alias in all_aliases() if alias.name is not None and alias.name not in flat_names()
    ] == []


def test_values_of_other_settings_are_listed_in_lower_case():
    wrong = [
        (name, value) for name, alias in ALIASES.items() for value in alias.by_value if value != value.lower()
    ]
    assert wrong == []


def test_no_answer_says_that_there_is_one_device():
    answers = [
        foreign_name_advice(name, value, form) or ""
        for name in ALIASES
        for value in VALUES
        for form in get_args(Form)
    ]
    assert [text for text in answers if "one device" in text] == []


def test_no_alias_is_a_setting_of_ours():
    assert ALIASES.keys().isdisjoint(flat_names())


def test_aliases_are_listed_in_the_form_of_the_lookup():
    assert [name for name in ALIASES if name != name.lower().replace("-", "_")] == []


def test_an_alias_without_a_setting_says_what_to_do():
    assert [
        name for name, alias in ALIASES.items() if alias.name is None and "leave it out" not in alias.note
    ] == []


# --- documented names: the name and value given, our flag, our line of YAML and its section

DOCUMENTED = [
    ("mixed_precision", "no", "--precision fp32", "precision: fp32", "device"),
    ("mixed_precision", "fp16", "--precision fp16", "precision: fp16", "device"),
    ("mixed_precision", "bf16", "--precision bf16", "precision: bf16", "device"),
    ("precision_type", "bfloat16", "--precision bf16", "precision: bf16", "device"),
    ("amp_dtype", "float16", "--precision fp16", "precision: fp16", "device"),
    ("train_batch_size", "32", "--batch-size 32", "batch_size: 32", "batch"),
    ("gradient_accumulation_steps", "4", "--accumulation-steps 4", "accumulation_steps: 4", "batch"),
    ("batch_size_per_gpu", "16", "--batch-size 16", "batch_size: 16", "batch"),
    ("training_mode", "single_gpu", "--gpu-mode single_gpu", "gpu_mode: single_gpu", "device"),
    ("training_mode", "auto", "--gpu-mode auto", "gpu_mode: auto", "device"),
    ("training_mode", "multi_gpu", "--gpu-mode multi_gpu", "gpu_mode: multi_gpu", "device"),
    (
        "training_mode",
        "distributed",
        "--parallel-strategy data_parallel",
        "parallel_strategy: data_parallel",
        "parallel",
    ),
    (
        "training_mode",
        "data_parallel",
        "--parallel-strategy data_parallel",
        "parallel_strategy: data_parallel",
        "parallel",
    ),
    ("num_gpus", "4", "--workers 4", "workers: 4", "parallel"),
    ("use_deepspeed", "true", "--sharding zero2", "sharding: zero2", "parallel"),
    ("use_ddp", "true", "--parallel-strategy data_parallel", "parallel_strategy: data_parallel", "parallel"),
    ("nproc_per_node", "8", "--workers 8", "workers: 8", "parallel"),
    ("gpu_ids", "0,2", "--devices 0,2", "devices: 0,2", "parallel"),
]


@pytest.mark.parametrize(("name", "value", "flag", "line", "section"), DOCUMENTED)
def test_the_documented_names_are_answered(
    tmp_path: Path, name: str, value: str, flag: str, line: str, section: str
):
    for flag_name in (f"--{name}", f"--{name.replace('_', '-')}"):
        for argv in ([flag_name, value], [f"{flag_name}={value}"]):
            with pytest.raises(UserError) as caught:
                check_flags(argv, ())
            assert str(caught.value).startswith(f"unknown flag {flag_name}; write {flag}")
    path = tmp_path / "cfg.yaml"
    for text, number in ((f"{name}: {value}\n", 1), (f"run:\n  {name}: {value}\n", 2)):
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            read_file(path)
        assert str(caught.value).startswith(
            f"cfg.yaml:{number}: unknown setting {name!r}; write {line} under {section}:"
        )


@pytest.mark.parametrize(
    "name", ["master_port", "rdzv_endpoint", "rdzv_backend", "node_rank", "local_rank", "init_method"]
)
def test_settings_of_launchers_are_left_out(name: str):
    with pytest.raises(
        UserError, match=f"^unknown flag --{name}; Ray finds the workers and numbers them: leave it out$"
    ):
        check_flags([f"--{name}", "29500"], ())


@pytest.mark.parametrize("name", ["nnodes", "num_nodes", "num_machines"])
def test_the_number_of_nodes_is_left_to_ray(name: str):
    assert "leave it out; --workers is the number of devices on all of them" in (
        foreign_name_advice(name, "2", "flag") or ""
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("training_mode", "data_parallel"), ("strategy", "dp"), ("enable_data_parallel", "true")],
)
def test_nn_data_parallel_is_answered_with_one_process_per_gpu(name: str, value: str):
    assert (
        foreign_name_advice(name, value, "flag") == f"write --parallel-strategy data_parallel ({ONE_PROCESS})"
    )


# --- every answer can be followed


def advised(form: Form) -> list[str]:
    """Return every distinct answer to the values above, without its note."""
    answers = {foreign_name_advice(name, value, form) or "" for name in ALIASES for value in VALUES}
    written = {
        re.sub(r" \(.*\)$", "", text.removeprefix("write ")) for text in answers if text.startswith("write ")
    }
    return sorted(text for text in written if "…" not in text and "|" not in text)


# A made-up number may be out of range; name, section and type must be right.
OUT_OF_RANGE = re.compile("it must|use letters|give --task lm as well|give --lora 16 as well")


@pytest.mark.slow
def test_every_advised_flag_is_accepted():
    assert len(advised("flag")) > 60
    for text in advised("flag"):
        refused = ""
        try:
            read_flags(TrainOptions, shlex.split(text), "orchestrator train")
        except UserError as error:
            refused = str(error)
        assert refused == "" or OUT_OF_RANGE.search(refused), text


@pytest.mark.parametrize("text", advised("yaml"))
def test_every_advised_line_is_accepted(tmp_path: Path, text: str):
    lines, _, section = text.removesuffix(":").rpartition(" under ")
    (tmp_path / "cfg.yaml").write_text(
        f"{section}:\n" + "".join(f"  {line}\n" for line in lines.split(" and "))
    )
    refused = ""
    try:
        read_file(tmp_path / "cfg.yaml")
    except UserError as error:
        refused = str(error)
    assert refused == "" or OUT_OF_RANGE.search(refused)


@pytest.mark.parametrize(
    ("name", "value", "flag", "line"),
    [
        ("mixed_precision", None, "--precision auto", "precision: auto"),
        ("mixed_precision", "fp8", "--precision auto|fp32|bf16|fp16", "precision: auto|fp32|bf16|fp16"),
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


def test_an_unknown_name_has_no_answer():
    assert foreign_name_advice("epochs", "3", "flag") is None
    assert foreign_name_advice("flux_capacitor", None, "yaml") is None


def test_following_an_answer_gives_the_intended_config(tmp_path: Path):
    (tmp_path / "cfg.yaml").write_text("device:\n  precision: fp32\nbatch:\n  accumulation_steps: 4\n")
    assert read_file(tmp_path / "cfg.yaml").config == Config.of(precision="fp32", accumulation_steps=4)


def test_a_number_of_copies_is_answered_with_the_switch():
    answer = "write --rebalance on (experts are copied by their load)"
    assert foreign_name_advice("num_redundant_experts", "16", "flag") == answer
    assert (
        foreign_name_advice("num_redundant_experts", "0", "flag")
        == "leave it out: that is the default of rebalance"
    )


# --- names of peers that have no setting here

PEERS_WORDS = {
    "arch": ("gpt2", "a model is part of a task"),
    "lora_dropout": ("0.1", "adapters have no dropout"),
}


@pytest.mark.parametrize(("name", "value", "answer"), [(name, *case) for name, case in PEERS_WORDS.items()])
def test_a_peers_word_is_answered_in_one_line(name: str, value: str, answer: str):
    with pytest.raises(UserError) as caught:
        check_flags([f"--{name}", value], ())
    assert str(caught.value).startswith(f"unknown flag --{name}; {answer}")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError) as caught:
        Config.of(**{name: value})
    assert str(caught.value).startswith(f"unknown setting {name!r}; {answer}")


def test_the_model_and_data_of_trainers_for_language_models_are_answered_with_the_task_lm():
    assert foreign_name_advice("base_model", "org/m", "flag") == "write --model org/m (with --task lm)"
    advice = foreign_name_advice("datasets", "a.jsonl", "yaml")
    assert advice is not None
    assert advice.startswith("write data: a.jsonl under data: (with --task lm")
    assert foreign_name_advice("cutoff_len", "512", "python") == "write sequence_length=512"


@pytest.mark.parametrize("value", [None, "true", "my-project"])
def test_the_switch_of_a_tracker_is_answered_with_trackers(value: str | None):
    assert foreign_name_advice("wandb", value, "flag") == "write --trackers wandb"


def test_peers_words_for_optimizers_are_answered_with_ours():
    assert foreign_name_advice("opt", "sgd", "flag") == "write --optimizer sgd"
    assert foreign_name_advice("optim", "adamw_bnb_8bit", "flag") == "write --optimizer adamw8bit"
    assert foreign_name_advice("ema", "true", "flag") == "write --ema-decay 0.999"
    assert foreign_name_advice("adam_epsilon", "1e-6", "flag") == "write --eps 1e-6"
    assert "--betas 0.9 0.95" in (foreign_name_advice("adam_beta2", "0.95", "flag") or "")


def test_the_defaults_of_adamw_are_those_of_torch():
    defaults = inspect.signature(torch.optim.AdamW).parameters
    settings = OptimSettings()
    assert (settings.betas, settings.eps) == (defaults["betas"].default, defaults["eps"].default)


# --- Python


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        ({"lr": 0.1}, "write learning_rate=0.1"),
        ({"fp16": True}, "write precision='fp16'"),
        ({"num_train_epochs": 3}, "write epochs=3"),
        ({"output_dir": Path("out")}, "write run_dir='out'"),
        ({"gpu_ids": [0, 2]}, "write devices=(0, 2)"),
        ({"wandb": True}, "write trackers=('wandb',)"),
        ({"logger": False}, "write trackers=()"),
        ({"ep_size": 4}, "write parallel_strategy='expert_parallel', workers=4"),
    ],
)
def test_python_is_answered_like_flags_and_files(settings: dict[str, Any], answer: str):
    (name,) = settings
    with pytest.raises(UserError) as caught:
        Config.of(**settings)
    assert str(caught.value) == f"unknown setting {name!r}; {answer}"


def test_words_for_adapters_are_answered_with_their_rank_and_targets():
    rank = "(the number is the rank of the adapters, with --task lm)"
    assert foreign_name_advice("lora_r", "8", "flag") == f"write --lora 8 {rank}"
    assert foreign_name_advice("use_peft", "true", "flag") == f"write --lora 16 {rank}"
    assert foreign_name_advice("finetuning_type", "lora", "yaml") == f"write lora: 16 under model: {rank}"
    assert str(foreign_name_advice("finetuning_type", "full", "flag")).startswith("leave it out")
    assert str(foreign_name_advice("adapter", "qlora", "flag")).startswith("weights are not quantised")
    assert foreign_name_advice("lora_target_modules", "q_proj", "flag") == "write --lora-targets q_proj"
    assert foreign_name_advice("lora_target_linear", "true", "flag") == "write --lora-targets all-linear"
