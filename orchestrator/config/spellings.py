"""Names that other trainers and older documents use for our settings: one table, answered with our name and the value
to give. Nothing here is accepted silently; a reader who knows Accelerate or DeepSpeed is told the word we use."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.config.spelling import LEAVE_OUT, Spelling

BY_RAY = "Ray finds the workers and numbers them: leave it out"
NODES = "Ray knows the nodes of its cluster: leave it out; --workers is the number of devices on all of them together"
ONE_PROCESS = "one process per GPU; torch's nn.DataParallel, one process for all, is left out on purpose"

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
_DATA_PARALLEL = _either("data_parallel", LEAVE_OUT)

_EXPERT_PARALLEL = _either("expert_parallel", LEAVE_OUT)
_HOSTS = Spelling(
    "workers",
    _WORKERS,
    beside={"parallel_strategy": "expert_parallel"},
    elsewhere={"1": Spelling("parallel_strategy", {"1": LEAVE_OUT})},
)
_EXPERTS, _TOP_K, _HIDDEN = Spelling("experts"), Spelling("top_k"), Spelling("expert_hidden_size")
_BALANCE, _Z, _BIAS, _JITTER = (
    Spelling("balance_loss"),
    Spelling("z_loss"),
    Spelling("balance_bias"),
    Spelling("gate_jitter"),
)
_SCORES, _SHARED = Spelling("gate_scores"), Spelling("shared_expert_size")
_CAPACITY = Spelling("capacity_factor", dict.fromkeys((*_NO, "-1", "0.0", "-1.0"), LEAVE_OUT))
# a number of shared experts is no size
_SHARED_COUNT = Spelling(
    "shared_expert_size",
    {"0": LEAVE_OUT} | {str(count): "…" for count in range(1, 65)},
    note="one expert of their hidden sizes together",
)

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
    "auto_batch_size": Spelling("batch_size", _either("auto", LEAVE_OUT)),
    "train_batch_size": Spelling(
        "batch_size",
        note="per worker and micro-batch; over all of them, as in DeepSpeed, it is global_batch_size",
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
        "gpu_mode",
        {"single": "single_gpu"},
        elsewhere={"distributed": _DISTRIBUTED, "ddp": _DISTRIBUTED, "data_parallel": _OLD_PARALLEL},
    ),
    "accelerator": Spelling("gpu_mode", _ACCELERATOR),
    "no_cuda": Spelling("gpu_mode", _either("cpu", "auto")),
    "use_cpu": Spelling("gpu_mode", _either("cpu", "auto")),
    "gradient_checkpointing": Spelling("activation_checkpointing", _ON_OFF),
    "enable_gradient_checkpointing": Spelling("activation_checkpointing", _ON_OFF),
    "torch_compile": Spelling("compile", _ON_OFF),
    "dynamo_backend": Spelling("compile", _ON_OFF | {"inductor": "on"}),
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
    "gpu_ids": Spelling("devices", {"all": LEAVE_OUT}),
    "device_ids": Spelling("devices", {"all": LEAVE_OUT}),
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
        {
            "ddp": "data_parallel",
            "ddp_spawn": "data_parallel",
            "ddp_notebook": "data_parallel",
            "ep": "expert_parallel",
        },
        elsewhere=_BY_STATE | {"dp": _OLD_PARALLEL, "single_device": _ALONE},
    ),
    "distributed_type": Spelling(
        "gpu_mode",
        {"multi_cpu": "cpu", "multi_gpu": "multi_gpu"},
        elsewhere=_BY_STATE | {"no": _ALONE, "false": _ALONE},
    ),
    "use_ddp": Spelling("parallel_strategy", _DATA_PARALLEL),
    "ddp": Spelling("parallel_strategy", _DATA_PARALLEL),
    "enable_distributed": Spelling("parallel_strategy", _DATA_PARALLEL),
    "enable_data_parallel": Spelling("parallel_strategy", _DATA_PARALLEL, note=ONE_PROCESS),
    **dict.fromkeys(
        (
            "ep_size",
            "expert_parallel_size",
            "expert_model_parallel_size",
            "expert_parallel_degree",
            "moe_expert_parallel_size",
            "autoep_size",
        ),
        _HOSTS,
    ),
    "enable_expert_parallel": Spelling("parallel_strategy", _EXPERT_PARALLEL),
    "expert_parallel": Spelling("parallel_strategy", _EXPERT_PARALLEL),
    "dist_backend": Spelling("backend"),
    "ddp_backend": Spelling("backend"),
    "distributed_backend": Spelling("backend"),
    "process_group_backend": Spelling("backend"),
    "use_deepspeed": Spelling("sharding", _either("zero2", "none")),
    "deepspeed": Spelling("sharding", note="by the stage in its file; auto leaves it to the plan"),
    "deepspeed_config": Spelling("sharding", note="by the stage in its file; auto leaves it to the plan"),
    "deepspeed_config_file": Spelling(
        "sharding", note="by the stage in its file; auto leaves it to the plan"
    ),
    "zero_stage": Spelling("sharding", _STAGE),
    "zero_optimization": Spelling("sharding", _STAGE),
    "use_fsdp": Spelling("sharding", _FSDP),
    "fsdp": Spelling("sharding", _FSDP),
    "sharding_strategy": Spelling("sharding", _FSDP),
    "fsdp_sharding_strategy": Spelling("sharding", _FSDP_STRATEGY),
    "fsdp_offload_params": Spelling("cpu_offload", _OFFLOAD),
    "enable_cpu_offload": Spelling("cpu_offload", _OFFLOAD),
    "offload_optimizer": Spelling(
        "cpu_offload",
        _OFFLOAD,
        note="parameters and optimizer state together, with --sharding zero2 or zero3",
    ),
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
    "num_workers": Spelling(
        "loader_workers", note="processes that load data; Ray Train's num_workers is --workers"
    ),
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
    # experts
    **dict.fromkeys(
        (
            "num_experts",
            "n_experts",
            "num_local_experts",
            "num_moe_experts",
            "moe_num_experts",
            "n_routed_experts",
        ),
        _EXPERTS,
    ),
    **dict.fromkeys(
        (
            "num_experts_per_tok",
            "num_experts_per_token",
            "experts_per_token",
            "moe_top_k",
            "moe_router_topk",
            "router_top_k",
        ),
        _TOP_K,
    ),
    **dict.fromkeys(("moe_intermediate_size", "moe_ffn_hidden_size", "moe_hidden_size"), _HIDDEN),
    **dict.fromkeys(
        ("moe_aux_loss_coeff", "router_aux_loss_coef", "aux_loss_alpha", "aux_loss_coef", "moe_loss_coeff"),
        _BALANCE,
    ),
    **dict.fromkeys(("moe_z_loss_coeff", "router_z_loss_coef", "router_z_loss"), _Z),
    **dict.fromkeys(("moe_router_bias_update_rate", "bias_update_speed", "load_balance_coeff"), _BIAS),
    "moe_router_enable_expert_bias": Spelling("balance_bias", _either("0.001", LEAVE_OUT)),
    **dict.fromkeys(("router_jitter_noise", "moe_input_jitter_eps", "jitter_eps"), _JITTER),
    **dict.fromkeys(("moe_router_score_function", "scoring_func", "score_func", "score_function"), _SCORES),
    "norm_topk_prob": Spelling("normalise_weights", _TRUE_FALSE),
    "route_norm": Spelling("normalise_weights", _TRUE_FALSE),
    "normalize_weights": Spelling("normalise_weights", _TRUE_FALSE),
    **dict.fromkeys(
        (
            "moe_capacity_factor",
            "moe_expert_capacity_factor",
            "expert_capacity_factor",
            "train_capacity_factor",
            "drop_tokens",
        ),
        _CAPACITY,
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), _SHARED_COUNT),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), _SHARED),
    "swiglu": Spelling("expert_kind", _either("swiglu", "ffn")),
    "moe_grouped_gemm": Spelling("expert_kernel", _either("grouped", "loop")),
    "use_grouped_mm": Spelling("expert_kernel", _either("grouped", "loop")),
    "a2a_ffn_overlap_degree": Spelling("exchange_chunks"),
    # model
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
    "resume_from_checkpoint": Spelling("resume", _either("auto", LEAVE_OUT)),
    "ckpt_path": Spelling("resume"),
    "logging_steps": Spelling("log_every"),
    "eval_steps": Spelling("evaluate_every"),
    "val_check_interval": Spelling("evaluate_every", note="in steps"),
    "report_to": Spelling("trackers", {"none": "[]"}),
    "logger": Spelling("trackers", _either(LEAVE_OUT, "[]")),
    "quiet": Spelling(
        None,
        note="the screen shows one line at a time, and what libraries say lies in the run folder: leave it out",
    ),
    "use_wandb": Spelling("trackers", _either("wandb", LEAVE_OUT)),
    "enable_gpu_monitoring": Spelling("monitor_gpu", _TRUE_FALSE),
}


def answer(name: str, value: str | None, flag: bool) -> str | None:
    """What to say to an old spelling, or None when it is not one."""
    key = name.replace("-", "_").lower()
    spelling = SPELLINGS.get(key)
    return spelling.advice(value, flag) if spelling else None
