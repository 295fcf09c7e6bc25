"""Names that other trainers and older documents use for our settings: one table, answered with our name and the value
to give. Nothing here is accepted silently; a reader who knows Accelerate or DeepSpeed is told the word we use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import yaml

from orchestrator.config.settings import flat_names, setting_types
from orchestrator.config.values import as_declared, choices
from orchestrator.errors import UserError

ONE_DEVICE = "this version trains on one device: leave it out"
_LEAVE_OUT = "leave it out"


@dataclass(frozen=True)
class Spelling:
    """Our name for an old one. ``values`` translates values; a value that is neither known there nor good for our setting is
    answered with the words the setting knows."""

    name: str | None
    values: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def advice(self, value: str | None, flag: bool) -> str:
        """The words to use instead, as a flag or as a line of YAML."""
        if self.name is None:
            return self.note
        ours = self.values.get((value or "").lower(), value)
        if ours == _LEAVE_OUT:
            return f"{_LEAVE_OUT}: that is the default of {self.name}"
        text = _as_flag(self.name, ours) if flag else _as_yaml(self.name, ours)
        return f"write {text}" + (f" ({self.note})" if self.note else "")


def _as_flag(name: str, value: str | None) -> str:
    flag = name.replace("_", "-")
    if setting_types()[name] is bool:
        return f"--no-{flag}" if value == "false" else f"--{flag}"
    return f"--{flag} {_good(name, value)}".removesuffix(" []")


def _as_yaml(name: str, value: str | None) -> str:
    hint = setting_types()[name]
    shown = _good(name, value or "true" if hint is bool else value)
    if {str, Path} & {hint, *get_args(hint)}:  # what YAML would take for a number or a truth value wants quotes
        shown = yaml.safe_dump(shown, allow_unicode=True).splitlines()[0]
    return f"{name}: {shown} under {flat_names()[name]}:"


def _good(name: str, value: str | None) -> str:
    """A value that our setting takes: the given one, or the words to choose from."""
    hint = setting_types()[name]
    try:
        if value is not None and value != "[]":
            as_declared(name, hint, value)
        return "…" if value is None else value
    except UserError:
        return "true" if hint is bool else "|".join(choices(hint)) or "…"


_YES: tuple[str, ...] = ("", "true", "yes", "on", "1")
_NO: tuple[str, ...] = ("false", "no", "off", "0", "none")


def _either(yes: str, no: str) -> dict[str, str]:
    return dict.fromkeys(_YES, yes) | dict.fromkeys(_NO, no)


_PRECISION = _either("auto", "fp32") | {
    "float32": "fp32", "32": "fp32", "32-true": "fp32", "torch.float32": "fp32",
    "16": "fp16", "16-mixed": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "bf16-mixed": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
}  # fmt: skip
_ON_OFF = _either("on", "off")
_TRUE_FALSE = _either("true", "false")
_DEVICE = {"cuda": "single_gpu", "cuda:0": "single_gpu", "gpu": "single_gpu"}
_MODE = _DEVICE | {"data_parallel": "auto", "distributed": "auto", "multi_gpu": "auto", "single": "auto"}

SPELLINGS: Mapping[str, Spelling] = {
    # precision
    "mixed_precision": Spelling("precision", _PRECISION),
    "enable_mixed_precision": Spelling("precision", _PRECISION),
    "use_amp": Spelling("precision", _PRECISION),
    "amp": Spelling("precision", _PRECISION),
    "precision_type": Spelling("precision", _PRECISION),
    "amp_dtype": Spelling("precision", _PRECISION),
    "dtype": Spelling("precision", _PRECISION),
    "fp16": Spelling("precision", _either("fp16", "fp32")),
    "bf16": Spelling("precision", _either("bf16", "fp32")),
    # batch
    "auto_batch_size": Spelling("batch_size", _either("auto", _LEAVE_OUT)),
    "train_batch_size": Spelling(
        "batch_size", note="per worker and micro-batch; over all of them, as in DeepSpeed, it is global_batch_size"
    ),
    "batch_size_per_gpu": Spelling("batch_size"),
    "per_device_train_batch_size": Spelling("batch_size"),
    "train_micro_batch_size_per_gpu": Spelling("batch_size"),
    "micro_batch_size": Spelling("batch_size"),
    "test_batch_size": Spelling("eval_batch_size"),
    "val_batch_size": Spelling("eval_batch_size"),
    "per_device_eval_batch_size": Spelling("eval_batch_size"),
    "gradient_accumulation_steps": Spelling("accumulation_steps"),
    "accumulate_grad_batches": Spelling("accumulation_steps"),
    "gradient_accumulation": Spelling("accumulation_steps"),
    "target_memory_usage": Spelling("gpu_memory_fraction"),
    # device
    "device": Spelling("gpu_mode", _DEVICE),
    "training_mode": Spelling("gpu_mode", _MODE),
    "accelerator": Spelling("gpu_mode", _DEVICE),
    "no_cuda": Spelling("gpu_mode", _either("cpu", "auto")),
    "use_cpu": Spelling("gpu_mode", _either("cpu", "auto")),
    "gradient_checkpointing": Spelling("activation_checkpointing", _ON_OFF),
    "enable_gradient_checkpointing": Spelling("activation_checkpointing", _ON_OFF),
    "torch_compile": Spelling("compile", _TRUE_FALSE),
    "dynamo_backend": Spelling("compile", _TRUE_FALSE),
    "allow_tf32": Spelling("tf32", _ON_OFF),
    "num_gpus": Spelling(None, note=ONE_DEVICE),
    "num_machines": Spelling(None, note=ONE_DEVICE),
    "multi_gpu": Spelling(None, note=ONE_DEVICE),
    "distributed_type": Spelling(None, note=ONE_DEVICE),
    "world_size": Spelling(None, note=ONE_DEVICE),
    "num_processes": Spelling(None, note=ONE_DEVICE),
    "nproc_per_node": Spelling(None, note=ONE_DEVICE),
    "nnodes": Spelling(None, note=ONE_DEVICE),
    "gpu_ids": Spelling(None, note=f"{ONE_DEVICE}; CUDA_VISIBLE_DEVICES chooses the GPU"),
    "device_ids": Spelling(None, note=f"{ONE_DEVICE}; CUDA_VISIBLE_DEVICES chooses the GPU"),
    "use_ddp": Spelling(None, note=ONE_DEVICE),
    "use_deepspeed": Spelling(None, note=ONE_DEVICE),
    "deepspeed": Spelling(None, note=ONE_DEVICE),
    "deepspeed_config": Spelling(None, note=ONE_DEVICE),
    "zero_stage": Spelling(None, note=ONE_DEVICE),
    "use_fsdp": Spelling(None, note=ONE_DEVICE),
    "enable_data_parallel": Spelling(None, note=ONE_DEVICE),
    "enable_distributed": Spelling(None, note=ONE_DEVICE),
    "gpus": Spelling(None, note=ONE_DEVICE),
    "devices": Spelling(None, note=f"{ONE_DEVICE}; CUDA_VISIBLE_DEVICES chooses the GPU"),
    "strategy": Spelling(None, note=ONE_DEVICE),
    # data
    "num_workers": Spelling("loader_workers"),
    "dataloader_num_workers": Spelling("loader_workers"),
    "pin_memory": Spelling(None, note="the plan pins memory whenever a GPU is used: leave it out"),
    "data_path": Spelling("data_dir"),
    # optimizer
    "lr": Spelling("learning_rate"),
    "warmup": Spelling("warmup_steps"),
    "num_warmup_steps": Spelling("warmup_steps"),
    "lr_scheduler": Spelling("schedule"),
    "lr_scheduler_type": Spelling("schedule"),
    "max_grad_norm": Spelling("clip_norm"),
    "gradient_clip_val": Spelling("clip_norm"),
    "gradient_clipping": Spelling("clip_norm"),
    # length
    "max_epochs": Spelling("epochs"),
    "num_epochs": Spelling("epochs"),
    "num_train_epochs": Spelling("epochs"),
    "patience": Spelling("early_stopping_patience"),
    "auto_optimize": Spelling("auto", _TRUE_FALSE),
    "no_auto_optimize": Spelling("auto", _either("false", "true")),
    # model
    "num_experts": Spelling("experts"),
    "n_experts": Spelling("experts"),
    "hidden_size": Spelling("width"),
    "d_model": Spelling("width"),
    "tf_n_embd": Spelling("width"),
    "num_layers": Spelling("layers"),
    "tf_n_layer": Spelling("layers"),
    "seq_len": Spelling("context_length"),
    "n_transit": Spelling("context_length"),
    "block_size": Spelling("context_length"),
    # record
    "output_dir": Spelling("run_dir"),
    "save_dir": Spelling("run_dir"),
    "experiment_name": Spelling("name"),
    "save_steps": Spelling("checkpoint_every"),
    "save_total_limit": Spelling("keep"),
    "resume_from_checkpoint": Spelling("resume", _either("auto", _LEAVE_OUT)),
    "logging_steps": Spelling("log_every"),
    "eval_steps": Spelling("evaluate_every"),
    "report_to": Spelling("trackers", {"none": "[]"}),
    "use_wandb": Spelling("trackers", _either("wandb", _LEAVE_OUT)),
    "enable_gpu_monitoring": Spelling("monitor_gpu", _TRUE_FALSE),
}


def answer(name: str, value: str | None, flag: bool) -> str | None:
    """What to say to an old spelling, or None when it is not one."""
    key = name.replace("-", "_").lower()
    spelling = SPELLINGS.get(key)
    return spelling.advice(value, flag) if spelling else None
