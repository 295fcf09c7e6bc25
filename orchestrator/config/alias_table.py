"""The names that other trainers and older documents use for our settings, with our names and values.

A name without a setting of ours has a note: the way to do it here, or that it does not exist yet.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.config.aliases import ANY_VALUE, LEAVE_OUT, Alias

# --- values


def _yes_no(yes: str, no: str) -> dict[str, str]:
    """Translate every way to say yes and no."""
    return dict.fromkeys(_YES, yes) | dict.fromkeys(_NO, no)


_YES: tuple[str, ...] = ("", "true", "yes", "on", "1")
_NO: tuple[str, ...] = ("false", "no", "off", "0", "none")
_ON_OFF = _yes_no("on", "off")
_TRUE_FALSE = _yes_no("true", "false")

_PRECISION = _yes_no("auto", "fp32") | {
    "float32": "fp32", "32": "fp32", "32-true": "fp32", "torch.float32": "fp32",
    "16": "fp16", "16-mixed": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "bf16-mixed": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
    "transformer-engine": "fp8",
}  # fmt: skip
_DEVICE = {"cuda": "single_gpu", "cuda:0": "single_gpu", "gpu": "single_gpu"}
_ACCELERATOR = {"cuda": "auto", "gpu": "auto"}
_WORKERS = {"gpu": "auto", "all": "auto", "-1": "auto"}
_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw",
    "adamw_8bit": "adamw8bit", "adamw_bnb_8bit": "adamw8bit", "paged_adamw_8bit": "adamw8bit",
}  # fmt: skip
_ZERO_STAGE = {"0": "none", "1": "zero2", "2": "zero2", "3": "zero3", "stage2": "zero2", "stage3": "zero3"}
_FSDP = _yes_no("zero3", "none") | {
    "full_shard": "zero3", "full_shard auto_wrap": "zero3", "full_shard offload": "zero3",
    "hybrid_shard": "zero3",
    "shard_grad_op": "zero2", "shard_grad_op auto_wrap": "zero2", "no_shard": "none",
}  # fmt: skip
# Accelerate numbers them: 1 FULL_SHARD, 2 SHARD_GRAD_OP, 3 NO_SHARD, 4 HYBRID_SHARD.
_FSDP_NUMBERED = _FSDP | {"1": "zero3", "2": "zero2", "3": "none", "4": "zero3"}
_OFFLOAD = _TRUE_FALSE | {"cpu": "true", "nvme": "true"}


# --- aliases that several names share

BY_RAY = "Ray finds the workers and numbers them: leave it out"
NODES = (
    "Ray knows the nodes of its cluster: leave it out; "
    "--workers is the number of devices on all of them together"
)
ONE_PROCESS = "one process per GPU; torch's nn.DataParallel, one process for all, is left out on purpose"
IN_TASK = (
    "a model is part of a task: leave it out, and choose --task digits, text, synthetic, lm with --model, or "
    "your own, package.module:Name; in Python Trainer(model, data=…, loss=…)"
)
LM = "with --task lm; data of other tasks is part of the task, and --data-dir the folder of its files"
BOTH_BETAS = "both together, as in --betas 0.9 0.95"
LORA_RANK = "the number is the rank of the adapters, with --task lm"
NO_LORA_DROPOUT = "adapters have no dropout, as PEFT's on experts have none: leave it out"
CHAT_TEMPLATE = (
    "the chat template is that of the model's tokenizer: leave it out, or put another chat_template.jinja "
    "into the model's folder"
)
HELD_OUT = "a twentieth of --data is held out: leave it out, or give --validation-data"
NO_PREFERENCES = "preference and reward training do not exist here; --task lm fine-tunes"
IN_WARMUP_STEPS = "a number of steps, not a share of the run; without it a twentieth of the run, at most 1000"
EOS = "documents end with the eos_token of the model's tokenizer: leave it out"
NO_NEFTUNE = "there is no noise on embeddings: leave it out"
ATTENTION = "attention is torch's, which has fused kernels: leave it out"
NO_LIGER = "experts and losses have kernels of our own: leave it out"
NO_MODEL_PARALLEL = (
    "tensor, pipeline and context parallelism do not exist here: leave it out; --sharding zero3 divides the "
    "weights of a model, and --parallel-strategy expert_parallel its experts"
)
NO_QLORA = "weights are not quantised: leave it out; --lora 16 keeps those of the model in bf16"
_ONE_WORKER_PER_GPU = "one worker per GPU; --devices chooses which"

_DDP = Alias("parallel_strategy", _yes_no("data_parallel", LEAVE_OUT))
_DISTRIBUTED = Alias("parallel_strategy", {"distributed": "data_parallel", "ddp": "data_parallel"})
_NN_DATA_PARALLEL = Alias("parallel_strategy", {"dp": "data_parallel"}, note=ONE_PROCESS)
_EXPERT_PARALLEL = Alias("parallel_strategy", _yes_no("expert_parallel", LEAVE_OUT))
_EXPERT_PARALLEL_SIZE = Alias(
    "workers",
    _WORKERS,
    with_settings={"parallel_strategy": "expert_parallel"},
    by_value={"1": Alias("parallel_strategy", {"1": LEAVE_OUT})},
)
_ONE_WORKER = Alias("workers", {"no": "1", "false": "1", "single_device": "1"})
_CUDA_INDEX = {f"cuda:{index}": Alias("devices", {f"cuda:{index}": str(index)}) for index in range(1, 16)}
_SHARDED = Alias(
    "sharding",
    {
        "fsdp": "zero3", "fsdp2": "zero3", "fsdp_native": "zero3", "deepspeed": "zero2",
        "deepspeed_stage_1": "zero2", "deepspeed_stage_2": "zero2", "deepspeed_stage_2_offload": "zero2",
        "deepspeed_stage_3": "zero3", "deepspeed_stage_3_offload": "zero3",
    },
)  # fmt: skip
_SHARDED_BY_VALUE = dict.fromkeys(_SHARDED.values, _SHARDED)
_DEEPSPEED_FILE = Alias("sharding", note="by the stage in its file; auto leaves it to the plan")
_WANDB_NAMES = Alias(
    None,
    note='runs are in the project "expert-orchestrator" under their --name: leave it out, and write '
    "--trackers wandb",
)
_CAPACITY = Alias("capacity_factor", dict.fromkeys((*_NO, "-1", "0.0", "-1.0"), LEAVE_OUT))
# A number of shared experts is not a size.
_SHARED_COUNT = Alias(
    "shared_expert_size",
    {"0": LEAVE_OUT} | {str(count): ANY_VALUE for count in range(1, 65)},
    note="one expert of their hidden sizes together",
)
# As many copies are made as the load asks for.
_REDUNDANT_EXPERTS = Alias(
    "rebalance",
    {"0": LEAVE_OUT} | {str(count): "on" for count in range(1, 257)},
    note="experts are copied by their load",
)

_MODEL = Alias("model", note="with --task lm")
_LORA = Alias(
    "lora",
    _yes_no("16", LEAVE_OUT) | {"lora": "16", "full": LEAVE_OUT},
    note=LORA_RANK,
    by_value={"qlora": Alias(None, note=NO_QLORA)},
)
_DOCUMENTS = Alias("data", note=LM)
_STAGE = Alias(
    None,
    note="fine-tuning and training on texts are --task lm: leave it out",
    by_value=dict.fromkeys(("dpo", "rm", "ppo", "kto", "orpo", "grpo"), Alias(None, note=NO_PREFERENCES)),
)
_STRATEGY_STEPS = {"epoch": "0", "steps": ANY_VALUE}


def _tracker(name: str) -> Alias:
    """Return the alias of a switch that turns one tracker on."""
    return Alias("trackers", _yes_no(name, LEAVE_OUT), other=name)


def _each(names: str, alias: Alias) -> dict[str, Alias]:
    """Give several names, separated by blanks, the same alias."""
    return dict.fromkeys(names.split(), alias)


ALIASES: Mapping[str, Alias] = {
    # precision
    **_each(
        "mixed_precision enable_mixed_precision use_amp amp precision_type amp_dtype dtype",
        Alias("precision", _PRECISION),
    ),
    "fp16": Alias("precision", _yes_no("fp16", "fp32")),
    "bf16": Alias("precision", _yes_no("bf16", "fp32")),
    **_each("fp8 fp8_format", Alias("precision", _yes_no("fp8", "bf16") | {"e4m3": "fp8", "hybrid": "fp8"})),
    # batch
    "auto_batch_size": Alias("batch_size", _yes_no("auto", LEAVE_OUT)),
    "train_batch_size": Alias(
        "batch_size",
        note="per worker and micro-batch; over all of them, as in DeepSpeed, it is global_batch_size",
    ),
    **_each(
        "batch_size_per_gpu per_device_train_batch_size train_micro_batch_size_per_gpu micro_batch_size",
        Alias("batch_size"),
    ),
    **_each("test_batch_size val_batch_size per_device_eval_batch_size", Alias("eval_batch_size")),
    **_each(
        "gradient_accumulation_steps accumulate_grad_batches gradient_accumulation",
        Alias("accumulation_steps"),
    ),
    "target_memory_usage": Alias("gpu_memory_fraction"),
    # device
    "device": Alias("gpu_mode", _DEVICE, by_value=_CUDA_INDEX),
    "training_mode": Alias(
        "gpu_mode",
        {"single": "single_gpu"},
        by_value={"distributed": _DISTRIBUTED, "ddp": _DISTRIBUTED, "data_parallel": _NN_DATA_PARALLEL},
    ),
    "accelerator": Alias("gpu_mode", _ACCELERATOR),
    **_each("no_cuda use_cpu", Alias("gpu_mode", _yes_no("cpu", "auto"))),
    "use_gpu": Alias("gpu_mode", _yes_no("auto", "cpu")),
    **_each(
        "gradient_checkpointing enable_gradient_checkpointing", Alias("activation_checkpointing", _ON_OFF)
    ),
    "torch_compile": Alias("compile", _ON_OFF),
    "dynamo_backend": Alias("compile", _ON_OFF | {"inductor": "on"}),
    **_each("flash_attention flash_attn flash_attention_2 attn_implementation", Alias(None, note=ATTENTION)),
    **_each("use_liger_kernel use_liger enable_liger_kernel", Alias(None, note=NO_LIGER)),
    "allow_tf32": Alias("tf32", _ON_OFF),
    # several devices: how many, and which
    **_each("num_gpus n_gpus gpus", Alias("workers", _WORKERS, note=_ONE_WORKER_PER_GPU)),
    **_each(
        "nproc_per_node gpus_per_node ntasks_per_node",
        Alias("workers", _WORKERS, note="of all nodes together"),
    ),
    **_each("num_processes world_size", Alias("workers", _WORKERS)),
    **_each("gpu_ids device_ids", Alias("devices", {"all": LEAVE_OUT})),
    "multi_gpu": Alias("gpu_mode", _yes_no("multi_gpu", "single_gpu")),
    **_each("num_nodes num_machines nnodes", Alias(None, note=NODES)),
    **_each(
        "node_rank machine_rank local_rank rank master_addr master_port main_process_ip main_process_port "
        "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf init_method dist_url standalone hostfile",
        Alias(None, note=BY_RAY),
    ),
    # several devices: the strategy
    "strategy": Alias(
        "parallel_strategy",
        {
            "ddp": "data_parallel",
            "ddp_spawn": "data_parallel",
            "ddp_notebook": "data_parallel",
            "ep": "expert_parallel",
        },
        by_value=_SHARDED_BY_VALUE | {"dp": _NN_DATA_PARALLEL, "single_device": _ONE_WORKER},
    ),
    "distributed_type": Alias(
        "gpu_mode",
        {"multi_cpu": "cpu", "multi_gpu": "multi_gpu"},
        by_value=_SHARDED_BY_VALUE | {"no": _ONE_WORKER, "false": _ONE_WORKER},
    ),
    **_each("use_ddp ddp enable_distributed", _DDP),
    "enable_data_parallel": Alias("parallel_strategy", _yes_no("data_parallel", LEAVE_OUT), note=ONE_PROCESS),
    **_each("enable_expert_parallel expert_parallel", _EXPERT_PARALLEL),
    **_each(
        "ep_size expert_parallel_size expert_model_parallel_size expert_parallel_degree "
        "moe_expert_parallel_size autoep_size",
        _EXPERT_PARALLEL_SIZE,
    ),
    **_each(
        "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tp_size "
        "pipeline_model_parallel_size pipeline_parallel_degree pp_size "
        "context_parallel_size context_parallel_degree cp_size sequence_parallel",
        Alias(None, note=NO_MODEL_PARALLEL),
    ),
    **_each("dist_backend ddp_backend distributed_backend process_group_backend", Alias("backend")),
    "use_deepspeed": Alias("sharding", _yes_no("zero2", "none")),
    **_each("deepspeed deepspeed_config deepspeed_config_file", _DEEPSPEED_FILE),
    **_each("zero_stage zero_optimization", Alias("sharding", _ZERO_STAGE)),
    **_each("use_fsdp fsdp sharding_strategy", Alias("sharding", _FSDP)),
    "fsdp_sharding_strategy": Alias("sharding", _FSDP_NUMBERED),
    **_each(
        "fsdp_offload_params enable_cpu_offload offload_optimizer_device offload_param offload_param_device",
        Alias("cpu_offload", _OFFLOAD),
    ),
    "offload_optimizer": Alias(
        "cpu_offload",
        _OFFLOAD,
        note="parameters and optimizer state together, with --sharding zero2 or zero3",
    ),
    **_each("sync_bn syncbn use_syncbn use_sync_bn sync_batch_norm", Alias("sync_batchnorm", _TRUE_FALSE)),
    "ddp_bucket_cap_mb": Alias("bucket_cap_mb"),
    **_each(
        "ddp_find_unused_parameters enable_find_unused_parameters",
        Alias("find_unused_parameters", _TRUE_FALSE),
    ),
    "ddp_broadcast_buffers": Alias("broadcast_buffers", _ON_OFF),
    "ddp_static_graph": Alias("static_graph", _TRUE_FALSE),
    "enable_gradient_as_bucket_view": Alias("gradient_as_bucket_view", _TRUE_FALSE),
    "ddp_timeout": Alias("collective_timeout"),
    "max_restarts": Alias("max_failures"),
    "address": Alias("ray_address"),
    # data
    "num_workers": Alias(
        "loader_workers", note="processes that load data; Ray Train's num_workers is --workers"
    ),
    "dataloader_num_workers": Alias("loader_workers"),
    "pin_memory": Alias(None, note="the plan pins memory whenever a GPU is used: leave it out"),
    "data_path": Alias("data_dir"),
    **_each("dataset dataset_name datasets train_dataset train_file train_files", _DOCUMENTS),
    **_each("eval_dataset validation_file val_file eval_files", Alias("validation_data")),
    **_each("sample_packing neat_packing packed", Alias("packing", _TRUE_FALSE)),
    **_each("assistant_only_loss train_on_responses_only", Alias("train_on", _yes_no("assistant", "all"))),
    **_each("train_on_inputs train_on_prompt", Alias("train_on", _yes_no("all", "assistant"))),
    **_each("dataset_text_field text_field", Alias("text_column")),
    "completion_only_loss": Alias("train_on", _yes_no("assistant", "all")),
    **_each("template chat_template chat_template_path", Alias(None, note=CHAT_TEMPLATE)),
    **_each("val_set_size val_size validation_split", Alias(None, note=HELD_OUT)),
    "eos_token": Alias(None, note=EOS),
    # optimizer
    "lr": Alias("learning_rate"),
    "wd": Alias("weight_decay"),
    **_each("optim opt optimizer_type optimizer_name", Alias("optimizer", _OPTIMIZERS)),
    **_each("beta1 beta2 adam_beta1 adam_beta2", Alias("betas", note=BOTH_BETAS)),
    **_each("adam_epsilon adam_eps epsilon", Alias("eps")),
    **_each("ema use_ema model_ema swa", Alias("ema_decay", dict.fromkeys(_YES, "0.999"))),
    "no_weight_decay": Alias("weight_decay", dict.fromkeys(_YES, "0")),
    **_each("warmup num_warmup_steps warmup_iters lr_warmup_iters", Alias("warmup_steps")),
    "warmup_ratio": Alias("warmup_steps", dict.fromkeys(_NO, "0"), other=ANY_VALUE, note=IN_WARMUP_STEPS),
    "neftune_noise_alpha": Alias(None, note=NO_NEFTUNE),
    **_each("lr_scheduler lr_scheduler_type", Alias("schedule")),
    **_each(
        "max_grad_norm gradient_clip_val gradient_clipping gradient_clip grad_clip clip_grad clip_grad_norm",
        Alias("clip_norm"),
    ),
    # length
    **_each("max_epochs max_epoch num_epochs n_epochs num_train_epochs", Alias("epochs")),
    **_each("max_train_steps num_train_steps max_iters train_iters", Alias("max_steps")),
    "patience": Alias("early_stopping_patience"),
    "metric_for_best_model": Alias(
        "early_stopping_metric", {"eval_loss": "loss", "eval_accuracy": "accuracy"}
    ),
    "load_best_model_at_end": Alias("keep_last", _yes_no(LEAVE_OUT, "true")),
    **_each("fast_dev_run dry_run", Alias("debug", _TRUE_FALSE)),
    "auto_optimize": Alias("auto", _TRUE_FALSE),
    "no_auto_optimize": Alias("auto", _yes_no("false", "true")),
    # experts
    **_each(
        "num_experts n_experts num_local_experts num_moe_experts moe_num_experts n_routed_experts",
        Alias("experts"),
    ),
    **_each(
        "num_experts_per_tok num_experts_per_token experts_per_token moe_top_k moe_router_topk router_top_k",
        Alias("top_k"),
    ),
    **_each("moe_intermediate_size moe_ffn_hidden_size moe_hidden_size", Alias("expert_hidden_size")),
    **_each(
        "moe_aux_loss_coeff router_aux_loss_coef aux_loss_alpha aux_loss_coef moe_loss_coeff",
        Alias("balance_loss"),
    ),
    **_each("moe_z_loss_coeff router_z_loss_coef router_z_loss", Alias("z_loss")),
    **_each("moe_router_bias_update_rate bias_update_speed load_balance_coeff", Alias("balance_bias")),
    "moe_router_enable_expert_bias": Alias("balance_bias", _yes_no("0.001", LEAVE_OUT)),
    **_each("router_jitter_noise moe_input_jitter_eps jitter_eps", Alias("gate_jitter")),
    **_each("moe_router_score_function scoring_func score_func score_function", Alias("gate_scores")),
    **_each("norm_topk_prob route_norm normalize_weights", Alias("normalise_weights", _TRUE_FALSE)),
    **_each(
        "moe_capacity_factor moe_expert_capacity_factor expert_capacity_factor train_capacity_factor "
        "drop_tokens",
        _CAPACITY,
    ),
    **_each("n_shared_experts num_shared_experts", _SHARED_COUNT),
    **_each(
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size", Alias("shared_expert_size")
    ),
    "swiglu": Alias("expert_kind", _yes_no("swiglu", "ffn")),
    **_each("moe_grouped_gemm use_grouped_mm", Alias("expert_kernel", _yes_no("grouped", "loop"))),
    "a2a_ffn_overlap_degree": Alias("exchange_chunks"),
    # experts that change
    **_each(
        "dynamic_experts enable_evolution enable_expert_evolution",
        Alias("evolution", _yes_no("cautious", "off")),
    ),
    **_each("sleep_interval sleep_cycle sleep_every_steps", Alias("sleep_every")),
    "enable_eplb": Alias("rebalance", _ON_OFF),
    **_each("num_redundant_experts ep_num_redundant_experts", _REDUNDANT_EXPERTS),
    **_each("expert_data_parallel_size expert_dp_size", Alias("expert_replicas")),
    # model
    **_each("model_name model_name_or_path base_model model_id pretrained_model_name_or_path", _MODEL),
    **_each("arch architecture", Alias(None, note=IN_TASK)),
    "stage": _STAGE,
    **_each("use_lora use_peft peft adapter finetuning_type tuner_type train_type", _LORA),
    **_each("r lora_r lora_rank lora_dim peft_rank", Alias("lora", note=LORA_RANK)),
    **_each("lora_target lora_target_modules target_modules target_parameters", Alias("lora_targets")),
    **_each("lora_target_linear", Alias("lora_targets", _yes_no("all-linear", LEAVE_OUT))),
    "lora_dropout": Alias(None, note=NO_LORA_DROPOUT),
    **_each("qlora load_in_4bit load_in_8bit", Alias(None, note=NO_QLORA)),
    **_each("hidden_size d_model tf_n_embd", Alias("width")),
    **_each("num_layers tf_n_layer", Alias("layers")),
    **_each(
        "seq_len n_transit block_size context_length sequence_len cutoff_len max_length max_seq_length",
        Alias("sequence_length"),
    ),
    # record
    **_each("output_dir save_dir default_root_dir", Alias("run_dir")),
    "experiment_name": Alias("name"),
    **_each("save_steps save_interval", Alias("checkpoint_every")),
    "save_total_limit": Alias("keep"),
    "resume_from_checkpoint": Alias("resume", _yes_no("auto", LEAVE_OUT)),
    "ckpt_path": Alias("resume"),
    **_each("logging_steps log_every_n_steps log_interval", Alias("log_every")),
    "save_strategy": Alias("checkpoint_every", _STRATEGY_STEPS, note="0 saves at the end of each epoch"),
    **_each(
        "eval_strategy evaluation_strategy",
        Alias("evaluate_every", _STRATEGY_STEPS, note="0 evaluates at the end of each epoch"),
    ),
    **_each("eval_steps eval_interval", Alias("evaluate_every")),
    "val_check_interval": Alias("evaluate_every", note="in steps"),
    "report_to": Alias("trackers", {"none": "[]"}),
    "logger": Alias("trackers", _yes_no(LEAVE_OUT, "[]")),
    **_each("use_wandb wandb log_to_wandb", _tracker("wandb")),
    **_each("use_mlflow mlflow", _tracker("mlflow")),
    **_each("use_tensorboard tensorboard tensorboard_dir", _tracker("tensorboard")),
    **_each("wandb_project wandb_name wandb_entity wandb_run_name", _WANDB_NAMES),
    "quiet": Alias(
        None,
        note="the screen shows one line at a time, and the output of libraries is in the run folder: "
        "leave it out",
    ),
    "enable_gpu_monitoring": Alias("monitor_gpu", _TRUE_FALSE),
}
