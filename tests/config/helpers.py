"""Helpers of the tests of settings: read a text or flags, and return the message of a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.train import TrainOptions
from orchestrator.config.reading.flags import read_flags
from orchestrator.config.reading.reader import Resolved, read_file
from orchestrator.errors import UserError


def read_text(path: Path, text: str | bytes) -> Resolved:
    """Write a text to a file, and read it as a config."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_file(path)


def refusal(path: Path, text: str | bytes) -> str:
    """Return the message with which a text is refused; it has one line."""
    with pytest.raises(UserError) as caught:
        read_text(path, text)
    message = str(caught.value)
    assert "\n" not in message
    return message


def read_argv(*argv: str) -> Resolved:
    """Read flags of ``train``."""
    return read_flags(TrainOptions, argv, "orchestrator train")[1]


def flag_refusal(*argv: str) -> str:
    """Return the message with which flags of ``train`` are refused."""
    with pytest.raises(UserError) as caught:
        read_argv(*argv)
    return str(caught.value)


TYPOS = {
    "epoch": "epochs",
    "epohcs": "epochs",
    "max_step": "max_steps",
    "seeed": "seed",
    "determinstic": "deterministic",
    "early_stoping_patience": "early_stopping_patience",
    "expert": "experts",
    "expert_hiden_size": "expert_hidden_size",
    "topk": "top_k",
    "widht": "width",
    "layer": "layers",
    "sequencelength": "sequence_length",
    "balance_los": "balance_loss",
    "datadir": "data_dir",
    "loader_worker": "loader_workers",
    "batchsize": "batch_size",
    "acumulation_steps": "accumulation_steps",
    "globalbatch_size": "global_batch_size",
    "gpu_memory_fracton": "gpu_memory_fraction",
    "learning_rat": "learning_rate",
    "leraning_rate": "learning_rate",
    "warm_up_steps": "warmup_steps",
    "wieght_decay": "weight_decay",
    "clip_nrom": "clip_norm",
    "gpumode": "gpu_mode",
    "precison": "precision",
    "tf_32": "tf32",
    "compil": "compile",
    "activation_checkpoint": "activation_checkpointing",
    "checkpoint_evry": "checkpoint_every",
    "resum": "resume",
    "initfrom": "init_from",
    "log_evry": "log_every",
    "tracker": "trackers",
    "run_dri": "run_dir",
    "worker": "workers",
    "paralel_strategy": "parallel_strategy",
    "shardng": "sharding",
    "bakend": "backend",
    "sync_batchnrom": "sync_batchnorm",
    "max_failure": "max_failures",
    "ray_adress": "ray_address",
    "cpu_ofload": "cpu_offload",
    "placment": "placement",
    "exchange_chunk": "exchange_chunks",
    "expert_kernal": "expert_kernel",
    "capacity_facter": "capacity_factor",
    "gate_score": "gate_scores",
    "share_expert_size": "shared_expert_size",
    "balance_bais": "balance_bias",
    "max_expert": "max_experts",
    "rebalnce": "rebalance",
    "newborn_warm_up": "newborn_warmup",
}
"""Misspelled settings, and the settings that they mean."""
