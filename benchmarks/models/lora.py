"""LoRA on attention and experts against full fine-tuning: trained parameters, memory and time of a step.

A model with the layers of Qwen3-30B-A3B (128 experts, 8 per token), and as many of them as asked for; on
a CPU one of 16 experts and small widths. Weights are random, and so is the routing. Three ways, each in
a process of its own:

- full: all weights in fp32, autocast to bf16 on a GPU, AdamW
- ours: frozen matrices in the precision of the passes, adapters in fp32 beside them
- PEFT: its target_parameters on the model of transformers, which adds A·B to the weights in each pass

Weights, gradients and optimizer state are counted from the tensors; the peak is that of the device, or
of the process where the device is a CPU.

    python -m benchmarks.models.lora --layers 4 --out benchmarks/results/lora_DEVICE_DATE.md
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from benchmarks.support import benchmark_parser, header, markdown_table, publish
from experts.transformers.lora.adapters import LoraOptions, add_lora, shorten_frozen
from experts.transformers.registration import use

LARGE: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
WAYS = ("full", "ours", "PEFT")


@dataclass(frozen=True)
class Measured:
    """A way's parameters and bytes, the peak of memory, and the time of a step."""

    parameters: int
    trained: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    step_s: float


def measure(way: str, arguments: argparse.Namespace) -> Measured:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start_bytes = _process_bytes()
    model = _model(way, arguments, device)
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    vocabulary = _sizes(device)["vocab_size"]
    ids = torch.randint(vocabulary, (arguments.samples, arguments.tokens), device=device)
    seconds: list[float] = []
    gradient_bytes = 0
    for _ in range(arguments.steps + 1):
        _wait(device)
        began_s = perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradient_bytes = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait(device)
        seconds.append(perf_counter() - began_s)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else _process_bytes() - start_bytes
    return Measured(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in trained),
        weight_bytes=sum(p.nbytes for p in parameters),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=sum(tensor.nbytes for tensor in _state_tensors(optimizer)),
        peak_bytes=peak,
        step_s=median(seconds[1:]),
    )


def _model(way: str, arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**_sizes(device), num_hidden_layers=arguments.layers)
    computed_in = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model: Any = Qwen3MoeForCausalLM(config)
    options = LoraOptions(arguments.rank, 2.0 * arguments.rank)
    if way == "PEFT":
        import peft

        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        linears = ["q_proj", "k_proj", "v_proj", "o_proj"]
        lora = peft.LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules=linears, target_parameters=targets
        )
        model = peft.get_peft_model(model.to(computed_in), lora)
    else:
        use(model)
        if way == "ours":
            add_lora(model, options)
            shorten_frozen(model, computed_in)
    if arguments.recompute:
        model.gradient_checkpointing_enable()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model.train()


def _sizes(device: torch.device) -> dict[str, Any]:
    return LARGE if device.type == "cuda" else SMALL


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _process_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def in_own_process(function: Callable[[], Measured]) -> Measured:
    """Return the result of a process that ends: the next one begins without its memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function)


def row(way: str, found: Measured) -> list[str]:
    state = (found.weight_bytes, found.gradient_bytes, found.optimizer_bytes)
    return [
        way,
        f"{found.trained / 1e6:,.1f} M of {found.parameters / 1e6:,.0f} M",
        *(f"{num_bytes / 1e9:.2f}" for num_bytes in (*state, found.peak_bytes)),
        f"{found.step_s * 1e3:,.0f}",
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--recompute", action="store_true", help="recompute blocks in the backward pass")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    rows = [row(way, in_own_process(partial(measure, way, arguments))) for way in arguments.ways]
    columns = ["way", "trained", "weights GB", "gradients GB", "optimizer GB", "peak GB", "step ms"]
    publish(
        header("LoRA on experts against full fine-tuning", arguments) + markdown_table(columns, rows),
        arguments.out,
    )


if __name__ == "__main__":
    main()
