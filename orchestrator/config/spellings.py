"""Names that other trainers and older documents use for our settings: one table, answered with our name and the value
to give. Nothing here is accepted silently; a reader who knows Accelerate or DeepSpeed is told the word we use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ONE_DEVICE = "this version trains on one device: leave it out"


@dataclass(frozen=True)
class Spelling:
    """Our name for an old one. ``values`` translates values; ``fixed`` is our value whatever was given."""

    name: str | None
    values: Mapping[str, str] = field(default_factory=dict)
    fixed: str | None = None
    note: str = ""

    def advice(self, value: str | None, flag: bool) -> str:
        """The words to use instead, as a flag or as a line of YAML."""
        if self.name is None:
            return self.note
        ours = self.fixed if self.fixed is not None else self.values.get((value or "").lower(), value)
        if flag:
            text = f"--{self.name.replace('_', '-')}" + (f" {ours}" if ours is not None else "")
        else:
            text = f"{self.name}: {ours if ours is not None else '…'}"
        return f"write {text}" + (f" ({self.note})" if self.note else "")


_PRECISION = {
    "": "auto", "no": "fp32", "none": "fp32", "false": "fp32", "float32": "fp32", "32": "fp32", "true": "auto",
    "16": "fp16", "16-mixed": "fp16", "float16": "fp16", "half": "fp16", "bf16-mixed": "bf16", "bfloat16": "bf16",
}  # fmt: skip
_ON_OFF = {"": "on", "true": "on", "false": "off", "1": "on", "0": "off", "yes": "on", "no": "off"}
_MODE = {"data_parallel": "auto", "distributed": "auto"}

SPELLINGS: Mapping[str, Spelling] = {
    # precision
    "mixed_precision": Spelling("precision", _PRECISION),
    "enable_mixed_precision": Spelling("precision", _PRECISION),
    "use_amp": Spelling("precision", _PRECISION),
    "amp": Spelling("precision", _PRECISION),
    "precision_type": Spelling("precision", _PRECISION),
    "amp_dtype": Spelling("precision", _PRECISION),
    "dtype": Spelling("precision", _PRECISION),
    "fp16": Spelling("precision", fixed="fp16"),
    "bf16": Spelling("precision", fixed="bf16"),
    # batch
    "auto_batch_size": Spelling("batch_size", fixed="auto"),
    "train_batch_size": Spelling("batch_size", note="per worker and micro-batch"),
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
    "device": Spelling("gpu_mode", {"cuda": "single_gpu", "gpu": "single_gpu"}),
    "training_mode": Spelling("gpu_mode", _MODE),
    "accelerator": Spelling("gpu_mode", {"gpu": "single_gpu", "cuda": "single_gpu"}),
    "gradient_checkpointing": Spelling("activation_checkpointing", _ON_OFF),
    "enable_gradient_checkpointing": Spelling("activation_checkpointing", _ON_OFF),
    "torch_compile": Spelling("compile"),
    "dynamo_backend": Spelling("compile"),
    "allow_tf32": Spelling("tf32", _ON_OFF),
    "num_gpus": Spelling(None, note=ONE_DEVICE),
    "num_processes": Spelling(None, note=ONE_DEVICE),
    "nproc_per_node": Spelling(None, note=ONE_DEVICE),
    "nnodes": Spelling(None, note=ONE_DEVICE),
    "gpu_ids": Spelling(None, note=f"{ONE_DEVICE}; CUDA_VISIBLE_DEVICES chooses the GPU"),
    "device_ids": Spelling(None, note=f"{ONE_DEVICE}; CUDA_VISIBLE_DEVICES chooses the GPU"),
    "use_ddp": Spelling(None, note=ONE_DEVICE),
    "use_deepspeed": Spelling(None, note=ONE_DEVICE),
    "deepspeed": Spelling(None, note=ONE_DEVICE),
    "deepspeed_config": Spelling(None, note=ONE_DEVICE),
    "enable_data_parallel": Spelling(None, note=ONE_DEVICE),
    "enable_distributed": Spelling(None, note=ONE_DEVICE),
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
    "auto_optimize": Spelling("auto"),
    "no_auto_optimize": Spelling("no_auto"),
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
    "resume_from_checkpoint": Spelling("resume"),
    "logging_steps": Spelling("log_every"),
    "eval_steps": Spelling("evaluate_every"),
    "report_to": Spelling("trackers"),
    "use_wandb": Spelling("trackers", fixed="wandb"),
    "enable_gpu_monitoring": Spelling("monitor_gpu"),
}


def answer(name: str, value: str | None, flag: bool) -> str | None:
    """What to say to an old spelling, or None when it is not one."""
    key = name.replace("-", "_").lower()
    spelling = SPELLINGS.get(key)
    return spelling.advice(value, flag) if spelling else None
