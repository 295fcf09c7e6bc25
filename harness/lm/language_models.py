"""A folder with a tiny model of ``transformers`` and its tokenizer, and files of conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.lm.families import LATENT_ATTENTION, SIGMOID_ROUTER
from harness.lm.tokenizers import chat_tokenizer, save_tokenizer
from orchestrator.config.settings import Config
from orchestrator.tasks.lm.task import LanguageModel

EXPERTS = 7


def save_tiny_model(folder: Path, **settings: Any) -> Path:
    """Write a tiny Qwen3-MoE with random weights. Without experts: ``num_experts=0``, a dense Qwen3."""
    import transformers

    sizes = common_sizes()
    experts: dict[str, Any] = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    is_dense = settings.get("num_experts") == 0
    config_class: Any = transformers.Qwen3Config if is_dense else transformers.Qwen3MoeConfig
    return save_random(folder, config_class(**(sizes if is_dense else sizes | experts | settings)))


def save_tiny_glm(folder: Path) -> Path:
    """Write a tiny GLM-4 MoE with random weights, whose routers have a bias."""
    import transformers

    experts: dict[str, Any] = {**SIGMOID_ROUTER, "num_experts_per_tok": 2}
    return save_random(folder, transformers.Glm4MoeConfig(**common_sizes() | experts))


def save_tiny_deepseek(folder: Path) -> Path:
    """Write a tiny DeepSeek-V3 with random weights: a dense block, then blocks with shared experts."""
    import transformers

    experts: dict[str, Any] = {
        **SIGMOID_ROUTER,
        **LATENT_ATTENTION,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
    }
    sizes = {name: size for name, size in common_sizes().items() if name != "head_dim"}
    return save_random(folder, transformers.DeepseekV3Config(**sizes | experts))


def common_sizes() -> dict[str, Any]:
    tokenizer = chat_tokenizer()
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "eos_token_id": tokenizer.eos_token_id,
    }


def save_random(folder: Path, config: Any) -> Path:
    """Write a model of a configuration with random weights, and a tokenizer."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return save_tokenizer(folder)


def save_sums(file: Path, count: int = 60) -> Path:
    """Write conversations about sums, of several lengths."""
    lines: list[str] = []
    for number in range(count):
        question = f"what is the sum of {number} and {number * 7 % 31}?" + " please" * (number % 4)
        answer = f"it is {number + number * 7 % 31}."
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    file.write_text("\n".join(lines) + "\n")
    return file


def lm_config(folder: Path, save_model: Callable[[Path], Path] = save_tiny_model, **settings: Any) -> Config:
    """Return settings for a tiny model and conversations, which are written below a folder."""
    model = save_model(folder / "model")
    data = save_sums(folder / "sums.jsonl")
    defaults: dict[str, Any] = {"sequence_length": 96, "learning_rate": 1e-2}
    return Config.of(task="lm", model=str(model), data=[str(data)], **(defaults | settings))


class FilledLanguageModel(LanguageModel):
    """The task, with the weights read as soon as the model is built: a run reads them no second time."""

    initialise: Any = None

    def build_model(self) -> nn.Module:
        model = super().build_model()
        LanguageModel.initialise(self, model)
        return model


class DoubleLanguageModel(FilledLanguageModel):
    """The task in fp64."""

    def build_model(self) -> nn.Module:
        return super().build_model().double()
