"""Published sizes of large language models, for plans without their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from experts.transformers.registration import expert_loads, use
from orchestrator.tasks.task import Loss, Task, TensorData

_GPT_OSS: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral",
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "GPT-OSS-20B": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "GPT-OSS-120B": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "Llama-3-8B": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
PARAMETERS: Mapping[str, int] = {
    "Qwen3-30B-A3B": 30_532_122_624,
    "Mixtral-8x7B": 46_702_792_704,
    "GPT-OSS-20B": 20_914_757_184,
    "GPT-OSS-120B": 116_829_156_672,
    "Llama-3-8B": 8_030_261_248,
}
"""As their model cards have it."""


@dataclass(frozen=True)
class LargeModel(Task):
    """Next-token training of a model by its configuration."""

    config: Mapping[str, Any]
    sequence_length: int = 512
    unit = "tokens"

    @property
    def units_per_sample(self) -> int:  # pyrefly: ignore[bad-override]
        return self.sequence_length

    def build_model(self) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config))
        has_experts = "num_experts_per_tok" in self.config
        return use(model) if has_experts else model

    def train_data(self) -> TensorData:
        return TensorData(torch.zeros(1024, self.sequence_length, dtype=torch.int64))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        (ids_BS,) = batch
        logits = model(input_ids=ids_BS, use_cache=False).logits
        total = F.cross_entropy(logits.flatten(0, 1), ids_BS.flatten(), reduction="sum")
        loads = expert_loads(model) if "num_experts_per_tok" in self.config else ()
        return Loss(total, ids_BS.numel(), {}, loads)
