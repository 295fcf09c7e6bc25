"""Tests of the answers to names of other trainers: on the command line, in YAML and in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.reading.reader import read_file
from orchestrator.config.settings import Config, foreign_name_advice
from orchestrator.errors import UserError
from tests.config.helpers import read_argv

# The name and value given, our flag, our line of YAML and its section.
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
                read_argv(*argv)
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
        read_argv(f"--{name}", "29500")


@pytest.mark.parametrize("name", ["nnodes", "num_nodes", "num_machines"])
def test_the_number_of_nodes_is_left_to_ray(name: str):
    assert "leave it out; --workers is the number of devices on all of them" in (
        foreign_name_advice(name, "2", "flag") or ""
    )


@pytest.mark.parametrize(
    "name", ["tensor_model_parallel_size", "tensor_parallel", "pp", "context_parallel_degree"]
)
def test_forms_of_parallelism_that_do_not_exist_are_answered_with_those_that_do(name: str):
    advice = foreign_name_advice(name, "2", "flag") or ""
    assert advice.startswith("tensor, pipeline and context parallelism do not exist here: leave it out")
    assert "--sharding zero3" in advice


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("log_every_n_steps", "50", "write --log-every 50"),
        ("train_iters", "1000", "write --max-steps 1000"),
        ("grad_clip", "1.0", "write --clip-norm 1.0"),
        (
            "deepspeed",
            "ds.json",
            "write --sharding auto|none|zero2|zero3 (by the stage in its file; auto leaves it to the plan)",
        ),
        ("fsdp_config", "fsdp.json", "write --sharding zero3 (the rest of such a file has no counterpart)"),
        ("report_to", "wandb", "write --trackers wandb"),
        (
            "report_to",
            "all",
            "write --trackers tensorboard|wandb|mlflow (several, as in --trackers tensorboard wandb)",
        ),
        ("metric_for_best_model", "eval_loss", "write --early-stopping-metric loss"),
        ("metric_for_best_model", "f1", "write --early-stopping-metric f1"),
        ("load_best_model_at_end", "true", "leave it out: that is the default of keep_last"),
        ("load_best_model_at_end", "false", "write --keep-last"),
    ],
)
def test_lengths_and_intervals_of_other_trainers_are_answered(name: str, value: str, answer: str):
    assert foreign_name_advice(name, value, "flag") == answer


@pytest.mark.parametrize(
    ("name", "value"),
    [("training_mode", "data_parallel"), ("strategy", "dp"), ("enable_data_parallel", "true")],
)
def test_nn_data_parallel_is_answered_with_one_process_per_gpu(name: str, value: str):
    one_process = "one process per GPU; torch's nn.DataParallel, one process for all, is left out on purpose"
    assert (
        foreign_name_advice(name, value, "flag") == f"write --parallel-strategy data_parallel ({one_process})"
    )


def test_an_unknown_name_has_no_answer():
    assert foreign_name_advice("epochs", "3", "flag") is None
    assert foreign_name_advice("flux_capacitor", None, "yaml") is None


def test_following_an_answer_gives_the_intended_config(tmp_path: Path):
    (tmp_path / "cfg.yaml").write_text("device:\n  precision: fp32\nbatch:\n  accumulation_steps: 4\n")
    assert read_file(tmp_path / "cfg.yaml").config == Config.of(precision="fp32", accumulation_steps=4)


# Names of peers that have no setting here, with a value and the answer.
PEERS_WORDS = {
    "arch": ("gpt2", "a model is part of a task"),
    "dpo": ("true", "preference and reward training (DPO, PPO, GRPO, …) do not exist here"),
    "reward_model": ("org/m", "preference and reward training (DPO, PPO, GRPO, …) do not exist here"),
    "push_to_hub": ("true", "training writes to the run folder alone: leave it out; when the run is done, "),
    "hub_model_id": ("me/m", "training writes to the run folder alone: leave it out; when the run is done, "),
    "hub_token": ("hf_x", "the token is that of the environment (HF_TOKEN)"),
    "double_quant": ("true", "the scales of --frozen-weights nf4 are in 8 bits themselves: leave it out"),
    "trust_remote_code": ("true", "code from a model's folder is never run: leave it out"),
    "tokenizer_name": ("org/m", "the tokenizer is that of --model: leave it out"),
    "merge_lora": ("true", "a run keeps its adapters by themselves: leave it out"),
    "do_train": ("true", "training and evaluation are verbs: leave it out"),
}


@pytest.mark.parametrize(("name", "value", "answer"), [(name, *case) for name, case in PEERS_WORDS.items()])
def test_a_peers_word_is_answered_in_one_line(name: str, value: str, answer: str):
    with pytest.raises(UserError) as caught:
        read_argv(f"--{name}", value)
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


def test_python_is_answered_for_all_names_at_once():
    with pytest.raises(UserError) as caught:
        Config.of(lr=0.1, epochs=3, max_epochs=2)
    assert str(caught.value).splitlines() == [
        "unknown setting 'lr'; write learning_rate=0.1",
        "unknown setting 'max_epochs'; write epochs=2",
    ]
