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

BY_RAY = "Ray finds the workers and numbers them: leave it out"
NODES = "Ray knows the nodes of its cluster: leave it out; --workers is the number of devices on all of them together"
ONE_PROCESS = "one process per GPU; torch's nn.DataParallel, one process for all, is left out on purpose"
_LEAVE_OUT = "leave it out"


@dataclass(frozen=True)
class Spelling:
    """Our name for an old one. ``values`` translates values; a value that is neither known there nor good for our setting is
    answered with the words the setting knows. ``elsewhere`` holds values that are the matter of another setting here."""

    name: str | None
    values: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    elsewhere: Mapping[str, Spelling] = field(default_factory=dict)

    def advice(self, value: str | None, flag: bool) -> str:
        """The words to use instead, as a flag or as a line of YAML."""
        other = self.elsewhere.get((value or "").lower())
        if other is not None:
            return other.advice(value, flag)
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
_ACCELERATOR = {"cuda": "auto", "gpu": "auto"}
_WORKERS = {"gpu": "auto", "all": "auto", "-1": "auto"}
_STAGE = {"0": "none", "1": "zero2", "2": "zero2", "3": "zero3", "stage2": "zero2", "stage3": "zero3"}
_FSDP = _either("zero3", "none") | {
    "full_shard": "zero3", "full_shard auto_wrap": "zero3", "full_shard offload": "zero3", "hybrid_shard": "zero3",
    "shard_grad_op": "zero2", "shard_grad_op auto_wrap": "zero2", "no_shard": "none",
}  # fmt: skip
# accelerate numbers them: 1 FULL_SHARD, 2 SHARD_GRAD_OP, 3 NO_SHARD, 4 HYBRID_SHARD
_FSDP_STRATEGY = _FSDP | {"1": "zero3", "2": "zero2", "3": "none", "4": "zero3"}
_OFFLOAD = _TRUE_FALSE | {"cpu": "true", "nvme": "true"}
_DATA_PARALLEL = _either("data_parallel", _LEAVE_OUT)

_CUDA = {f"cuda:{index}": Spelling("devices", {f"cuda:{index}": str(index)}) for index in range(1, 16)}
_ALONE = Spelling("workers", {"no": "1", "false": "1", "single_device": "1"})
_SHARDED = Spelling(
    "sharding",
    {
        "fsdp": "zero3", "fsdp2": "zero3", "fsdp_native": "zero3", "deepspeed": "zero2", "deepspeed_stage_1": "zero2",
        "deepspeed_stage_2": "zero2", "deepspeed_stage_2_offload": "zero2", "deepspeed_stage_3": "zero3",
        "deepspeed_stage_3_offload": "zero3",
    },
)  # fmt: skip
_BY_STATE = dict.fromkeys(_SHARDED.values, _SHARDED)
_DISTRIBUTED = Spelling("parallel_strategy", {"distributed": "data_parallel", "ddp": "data_parallel"})
_OLD_PARALLEL = Spelling("parallel_strategy", {"dp": "data_parallel"}, note=ONE_PROCESS)

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
    "device": Spelling("gpu_mode", _DEVICE, elsewhere=_CUDA),
    "training_mode": Spelling(
        "gpu_mode", {"single": "single_gpu"}, elsewhere={"distributed": _DISTRIBUTED, "ddp": _DISTRIBUTED, "data_parallel": _OLD_PARALLEL}
    ),
    "accelerator": Spelling("gpu_mode", _ACCELERATOR),
    "no_cuda": Spelling("gpu_mode", _either("cpu", "auto")),
    "use_cpu": Spelling("gpu_mode", _either("cpu", "auto")),
    "gradient_checkpointing": Spelling("activation_checkpointing", _ON_OFF),
    "enable_gradient_checkpointing": Spelling("activation_checkpointing", _ON_OFF),
    "torch_compile": Spelling("compile", _TRUE_FALSE),
    "dynamo_backend": Spelling("compile", _TRUE_FALSE),
    "allow_tf32": Spelling("tf32", _ON_OFF),
    "use_gpu": Spelling("gpu_mode", _either("auto", "cpu")),
    # several devices: how many, and which
    "num_gpus": Spelling("workers", _WORKERS, note="one worker per GPU; --devices chooses which"),
    "n_gpus": Spelling("workers", _WORKERS, note="one worker per GPU; --devices chooses which"),
    "gpus": Spelling("workers", _WORKERS, note="one worker per GPU; --devices chooses which"),
    "num_processes": Spelling("workers", _WORKERS),
    "nproc_per_node": Spelling("workers", _WORKERS, note="of all nodes together"),
    "gpus_per_node": Spelling("workers", _WORKERS, note="of all nodes together"),
    "ntasks_per_node": Spelling("workers", _WORKERS, note="of all nodes together"),
    "world_size": Spelling("workers", _WORKERS),
    "gpu_ids": Spelling("devices", {"all": _LEAVE_OUT}),
    "device_ids": Spelling("devices", {"all": _LEAVE_OUT}),
    "multi_gpu": Spelling("gpu_mode", _either("multi_gpu", "single_gpu")),
    "num_nodes": Spelling(None, note=NODES),
    "num_machines": Spelling(None, note=NODES),
    "nnodes": Spelling(None, note=NODES),
    **dict.fromkeys(
        (
            "node_rank",
            "machine_rank",
            "local_rank",
            "rank",
            "master_addr",
            "master_port",
            "main_process_ip",
            "main_process_port",
            "rdzv_backend",
            "rdzv_endpoint",
            "rdzv_id",
            "rdzv_conf",
            "init_method",
            "dist_url",
            "standalone",
            "hostfile",
        ),
        Spelling(None, note=BY_RAY),
    ),
    # several devices: in which way
    "strategy": Spelling(
        "parallel_strategy",
        {"ddp": "data_parallel", "ddp_spawn": "data_parallel", "ddp_notebook": "data_parallel"},
        elsewhere=_BY_STATE | {"dp": _OLD_PARALLEL, "single_device": _ALONE},
    ),
    "distributed_type": Spelling(
        "gpu_mode", {"multi_cpu": "cpu", "multi_gpu": "multi_gpu"}, elsewhere=_BY_STATE | {"no": _ALONE, "false": _ALONE}
    ),
    "use_ddp": Spelling("parallel_strategy", _DATA_PARALLEL),
    "ddp": Spelling("parallel_strategy", _DATA_PARALLEL),
    "enable_distributed": Spelling("parallel_strategy", _DATA_PARALLEL),
    "enable_data_parallel": Spelling("parallel_strategy", _DATA_PARALLEL, note=ONE_PROCESS),
    "dist_backend": Spelling("backend"),
    "ddp_backend": Spelling("backend"),
    "distributed_backend": Spelling("backend"),
    "process_group_backend": Spelling("backend"),
    "use_deepspeed": Spelling("sharding", _either("zero2", "none")),
    "deepspeed": Spelling("sharding", note="by the stage in its file; auto leaves it to the plan"),
    "deepspeed_config": Spelling("sharding", note="by the stage in its file; auto leaves it to the plan"),
    "deepspeed_config_file": Spelling("sharding", note="by the stage in its file; auto leaves it to the plan"),
    "zero_stage": Spelling("sharding", _STAGE),
    "zero_optimization": Spelling("sharding", _STAGE),
    "use_fsdp": Spelling("sharding", _FSDP),
    "fsdp": Spelling("sharding", _FSDP),
    "sharding_strategy": Spelling("sharding", _FSDP),
    "fsdp_sharding_strategy": Spelling("sharding", _FSDP_STRATEGY),
    "fsdp_offload_params": Spelling("cpu_offload", _OFFLOAD),
    "enable_cpu_offload": Spelling("cpu_offload", _OFFLOAD),
    "offload_optimizer": Spelling("cpu_offload", _OFFLOAD, note="parameters and optimizer state together, with --sharding zero2 or zero3"),
    "offload_optimizer_device": Spelling("cpu_offload", _OFFLOAD),
    "offload_param": Spelling("cpu_offload", _OFFLOAD),
    "offload_param_device": Spelling("cpu_offload", _OFFLOAD),
    "sync_bn": Spelling("sync_batchnorm", _TRUE_FALSE),
    "syncbn": Spelling("sync_batchnorm", _TRUE_FALSE),
    "use_syncbn": Spelling("sync_batchnorm", _TRUE_FALSE),
    "use_sync_bn": Spelling("sync_batchnorm", _TRUE_FALSE),
    "sync_batch_norm": Spelling("sync_batchnorm", _TRUE_FALSE),
    "ddp_bucket_cap_mb": Spelling("bucket_cap_mb"),
    "ddp_find_unused_parameters": Spelling("find_unused_parameters", _TRUE_FALSE),
    "enable_find_unused_parameters": Spelling("find_unused_parameters", _TRUE_FALSE),
    "ddp_broadcast_buffers": Spelling("broadcast_buffers", _ON_OFF),
    "ddp_static_graph": Spelling("static_graph", _TRUE_FALSE),
    "enable_gradient_as_bucket_view": Spelling("gradient_as_bucket_view", _TRUE_FALSE),
    "ddp_timeout": Spelling("collective_timeout"),
    "max_restarts": Spelling("max_failures"),
    "address": Spelling("ray_address"),
    # data
    "num_workers": Spelling("loader_workers", note="processes that load data; Ray Train's num_workers is --workers"),
    "dataloader_num_workers": Spelling("loader_workers"),
    "pin_memory": Spelling(None, note="the plan pins memory whenever a GPU is used: leave it out"),
    "data_path": Spelling("data_dir"),
    # optimizer
    "lr": Spelling("learning_rate"),
    "wd": Spelling("weight_decay"),
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
    "fast_dev_run": Spelling("debug", _TRUE_FALSE),
    "dry_run": Spelling("debug", _TRUE_FALSE),
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
    "default_root_dir": Spelling("run_dir"),
    "experiment_name": Spelling("name"),
    "save_steps": Spelling("checkpoint_every"),
    "save_total_limit": Spelling("keep"),
    "resume_from_checkpoint": Spelling("resume", _either("auto", _LEAVE_OUT)),
    "ckpt_path": Spelling("resume"),
    "logging_steps": Spelling("log_every"),
    "eval_steps": Spelling("evaluate_every"),
    "val_check_interval": Spelling("evaluate_every", note="in steps"),
    "report_to": Spelling("trackers", {"none": "[]"}),
    "logger": Spelling("trackers", _either(_LEAVE_OUT, "[]")),
    "quiet": Spelling(None, note="the screen shows one line at a time, and what libraries say lies in the run folder: leave it out"),
    "use_wandb": Spelling("trackers", _either("wandb", _LEAVE_OUT)),
    "enable_gpu_monitoring": Spelling("monitor_gpu", _TRUE_FALSE),
}


def answer(name: str, value: str | None, flag: bool) -> str | None:
    """What to say to an old spelling, or None when it is not one."""
    key = name.replace("-", "_").lower()
    spelling = SPELLINGS.get(key)
    return spelling.advice(value, flag) if spelling else None
