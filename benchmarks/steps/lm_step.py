"""The whole training step of a model with the layers of Qwen3-30B-A3B, ours and that of transformers.

    python -m benchmarks.steps.lm_step --layers 6 --samples 4

All variants train the same configuration with random weights on the same tokens, with real routing:
AdamW, recomputed activations, products in bf16. ``fp32 weights`` keep the weights and both moments in
fp32, as ours do; ``bf16 weights`` keep everything in bf16, which is less exact and moves half the bytes.

    python -m benchmarks.steps.lm_step --layers 48 --samples 1 --quick-weights --peers \\
        --set lora=8 frozen_weights=nf4

``--quick-weights`` draws the weights on the device, in seconds for 30 billion. Those of a run depend on its
seed alone and are drawn on the CPU, in minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.steps.peer_steps import LEARNING_RATE, free_memory, timed_steps, transformers_step
from benchmarks.support import (
    add_settings,
    benchmark_parser,
    further_settings,
    header,
    markdown_table,
    publish,
)
from experts.transformers.files import initial
from experts.transformers.lora.packing import packed_parameters
from harness.lm.large_models import CONFIGS
from orchestrator.config.settings import Config
from orchestrator.trainer import Trainer

MODEL = CONFIGS["Qwen3-30B-A3B"]
_STD = 0.02


@dataclass(frozen=True)
class Row:
    """One variant: seconds of a step by the median, its memory and its last loss."""

    name: str
    seconds: float
    peak_bytes: int
    loss: float


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = _write_model(Path(scratch) / "model", arguments)
        tokens = _write_tokens(Path(scratch) / "tokens.npy", arguments)
        rows = [_ours(folder, tokens, arguments)]
        for variant in arguments.peers:
            implementation, _, dtype = variant.partition(":")
            weights = torch.bfloat16 if dtype == "bf16" else torch.float32
            rows.append(_transformers(folder, tokens, arguments, implementation, weights))
    title = f"Step of {arguments.layers} layers of Qwen3-30B-A3B"
    publish(header(title, arguments) + _table(rows, arguments), arguments.out)


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=4, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--peers", nargs="*", default=["grouped_mm:fp32", "grouped_mm:bf16", "eager:fp32"])
    parser.add_argument("--quick-weights", action="store_true", help="draw our weights on the device")
    add_settings(parser)
    return parser.parse_args()


def _write_model(folder: Path, arguments: argparse.Namespace) -> Path:
    from transformers import Qwen3MoeConfig

    sizes: dict[str, Any] = {**MODEL, "max_position_embeddings": 40960, "num_hidden_layers": arguments.layers}
    if arguments.small:
        sizes |= {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512}
    folder.mkdir()
    Qwen3MoeConfig(**sizes).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one word: the data has tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<eos>": 0, "word": 1}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)


def _write_tokens(file: Path, arguments: argparse.Namespace) -> Path:
    """Write random tokens without an end of sequence: a sample is one document."""
    count = (arguments.samples * 24 + 1) * arguments.sequence_length
    vocabulary = 512 if arguments.small else MODEL["vocab_size"]
    np.save(file, np.random.default_rng(0).integers(1, vocabulary, count, dtype=np.uint32))
    return file


def _ours(folder: Path, tokens: Path, arguments: argparse.Namespace) -> Row:
    settings: dict[str, Any] = {
        "task": "lm",
        "model": str(folder),
        "from_scratch": True,
        "data": [str(tokens)],
        "validation_data": [str(tokens)],
        "sequence_length": arguments.sequence_length,
        "batch_size": arguments.samples,
        "precision": "bf16" if torch.cuda.is_available() else "fp32",
        "activation_checkpointing": "on",
        "compile": "off",
        "optimizer": "adamw",
        "learning_rate": LEARNING_RATE,
        "schedule": "constant",
        "warmup_steps": 0,
    }
    config = Config.of(**settings | further_settings(arguments))
    with _quick_weights() if arguments.quick_weights else nullcontext():
        (result,) = Trainer(config=config, quiet=True).bench(iterations=arguments.steps)
    free_memory()
    return Row("ours", result.median["total"], result.peak_memory_bytes, result.loss)


@contextmanager
def _quick_weights() -> Iterator[None]:
    original = initial.initialise_weights
    initial.initialise_weights = _draw
    try:
        yield
    finally:
        initial.initialise_weights = original


@torch.no_grad()
def _draw(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model.tie_weights()
    initial.restore_buffers(model)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.normal_(0.0, _STD) if parameter.ndim > 1 else parameter.fill_(1.0)
    for form, parameter, _ in packed_parameters(model):
        for packed in parameter.view(-1, form.num_bytes).unbind():
            packed.copy_(form.pack(torch.empty(form.shape, device=packed.device).normal_(0.0, _STD)))


def _transformers(
    folder: Path, tokens: Path, arguments: argparse.Namespace, implementation: str, weights: torch.dtype
) -> Row:
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    free_memory()
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=False),
            dtype=weights,
            experts_implementation=implementation,
        )
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.from_numpy(np.load(tokens)[: arguments.samples * arguments.sequence_length].astype(np.int64))
    ids = ids.reshape(arguments.samples, -1).to(device)
    seconds, loss = timed_steps(transformers_step(model, ids), arguments.steps)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    free_memory()
    name = f"transformers {implementation}, {'fp32' if weights == torch.float32 else 'bf16'} weights"
    return Row(name, float(np.median(seconds)), peak, loss)


def _table(rows: list[Row], arguments: argparse.Namespace) -> str:
    tokens = arguments.samples * arguments.sequence_length
    lines = [
        (
            row.name,
            f"{tokens / row.seconds:,.0f}",
            f"{row.seconds * 1e3:,.0f}",
            f"{row.peak_bytes / 2**30:.1f}",
            f"{row.seconds / rows[0].seconds:.2f}",
            f"{row.loss:.3f}",
        )
        for row in rows
    ]
    columns = ("variant", "tokens/s", "ms a step", "peak GiB", "its time / ours", "last loss")
    return markdown_table(columns, lines)


if __name__ == "__main__":
    main()
