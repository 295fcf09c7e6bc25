"""The whole training step of a decoder with 2.5 billion parameters, ours and that of transformers' Mixtral.

12 layers of width 1,024, 32 SwiGLU experts of 2,048, top-4, vocabulary 32,000, 8 × 2,048 tokens, AdamW with
fp32 weights, products in bf16. Real data and real routing, the steps of ``orchestrator train`` without its
record.

    python -m benchmarks.steps.whole_step --compile --profile --memory --peers [--losses FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.steps.loss_curves import differences_of_losses, read_losses
from benchmarks.steps.memory_peak import memory_report
from benchmarks.steps.peer_steps import free_memory, timed_steps, transformers_step
from benchmarks.steps.plain_path import plain_path
from benchmarks.support import (
    add_settings,
    benchmark_parser,
    further_settings,
    header,
    markdown_table,
    publish,
)
from orchestrator.config.settings import Config
from orchestrator.measure.timed_steps import step_seconds
from orchestrator.record.files.log import ignore_event
from orchestrator.train.data.steps import Feed, StepBatch
from orchestrator.train.device.clock import timed_seconds
from orchestrator.train.device.memory import peak_memory
from orchestrator.train.group.world import World
from orchestrator.train.stepper import Stepper
from orchestrator.train.worker.build import build_feed
from orchestrator.train.worker.build_model import build_parts, build_stepper
from orchestrator.train.worker.torch_settings import torch_settings
from orchestrator.trainer import Trainer

PROFILED_STEPS = 3
MOST_KERNELS = 40
MAX_NAME = 100
PEER_WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Sizes:
    """The decoder and its batch. Its output shares the embedding's weights."""

    width: int = 1024
    layers: int = 12
    experts: int = 32
    hidden: int = 2048
    top_k: int = 4
    vocabulary: int = 32_000
    sequence_length: int = 2048
    batch: int = 8

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence_length

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the model and its data in a run of ours."""
        return {
            "task": "synthetic",
            "width": self.width,
            "layers": self.layers,
            "experts": self.experts,
            "expert_hidden_size": [self.hidden],
            "top_k": self.top_k,
            "vocabulary": self.vocabulary,
            "sequence_length": self.sequence_length,
            "samples": self.batch * 64,
        }

    @property
    def flops_per_token(self) -> float:
        """FLOPs of products, forward and backward; attention over half of the sequence, as it is causal."""
        experts = self.top_k * 3 * self.width * self.hidden
        layer = experts + 4 * self.width**2 + self.width * self.experts
        attention = self.layers * self.width * self.sequence_length
        return 6 * (self.layers * layer + self.width * self.vocabulary + attention)


SMALL = Sizes(width=64, layers=2, experts=4, hidden=32, top_k=2, vocabulary=256, sequence_length=32, batch=4)


@dataclass(frozen=True)
class Row:
    """One variant: seconds per step, its peak of memory and its losses by step."""

    name: str
    seconds: list[float]
    peak_bytes: int
    losses: list[float]


@dataclass
class StepRun:
    """Our steps over the batches of the data, each of them once."""

    stepper: Stepper
    batches: Iterator[StepBatch]
    losses: list[Tensor] = field(default_factory=list)
    step: int = 0

    def __call__(self, _: int = 0) -> None:
        totals = self.stepper.run(next(self.batches), self.step)
        self.losses.append(totals.loss / totals.count)
        self.step += 1


def main() -> None:
    arguments = _arguments()
    sizes = SMALL if arguments.small else Sizes()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    peak_flops = _measured_peak(device, 512 if arguments.small else 8192)
    config = _config(sizes, arguments)
    details = ""
    with plain_path() if arguments.plain else nullcontext(), _our_steps(config) as run:
        seconds = step_seconds(run, arguments.steps, device=device)
        peak = peak_memory(device)["allocated"]
        if arguments.profile:
            details = _kernel_table(run, device)
        if arguments.memory:
            details += memory_report(run, run.stepper, device)
        losses = [float(loss) for loss in run.losses]
    del run
    path = "torch's own operations" if arguments.plain else "ours"
    rows = [Row(f"{path}, {'compiled' if arguments.compile else 'eager'}", seconds, peak, losses)]
    if arguments.peers is not None:
        every = arguments.peers or PEER_WEIGHTS
        rows += [_transformers(sizes, arguments, device, weights) for weights in every]
    if arguments.losses is not None:
        arguments.losses.write_text(json.dumps(losses), encoding="utf-8")
    if arguments.compare:
        details += differences_of_losses({"this run": losses} | read_losses(arguments.compare))
    text = header("The whole step of a decoder with experts", arguments)
    text += f"Peak of a bf16 product in this run: {peak_flops / 1e12:,.0f} TFLOP/s.\n\n"
    publish(text + _table(rows, sizes, peak_flops) + details, arguments.out)


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="timed steps, after a warm-up")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--profile", action="store_true", help="also a table of kernels by device time")
    parser.add_argument(
        "--memory", action="store_true", help="also the tensors at the peak of a GPU's memory"
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=list(PEER_WEIGHTS),
        help="also the Mixtral of transformers, with weights in these types; without one, in all",
    )
    parser.add_argument("--plain", action="store_true", help="torch's own operations instead of ours")
    parser.add_argument("--losses", type=Path, help="write the losses of the steps to this file")
    parser.add_argument(
        "--compare", nargs="+", type=Path, default=[], help="compare the losses with those in these files"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script on a CPU")
    add_settings(parser)
    arguments = parser.parse_args()
    if arguments.memory and not torch.cuda.is_available():
        parser.error("--memory needs a CUDA device")
    return arguments


def _config(sizes: Sizes, arguments: argparse.Namespace) -> Config:
    return Config.of(
        **sizes.settings,
        batch_size=sizes.batch,
        max_steps=arguments.steps + 100,
        warmup_steps=10,
        learning_rate=3e-4,
        precision="bf16" if torch.cuda.is_available() else "fp32",
        optimizer="adamw",
        compile="on" if arguments.compile else "off",
        **further_settings(arguments),
    )


@contextmanager
def _our_steps(config: Config) -> Iterator[StepRun]:
    """Build the run of a user's command, and yield its steps."""
    prepared = Trainer(config=config, quiet=True).prepare()
    config, plan = prepared.resolved.config, prepared.plan
    world = World.single_process(plan.device.value)
    free_memory()
    with torch_settings(config, plan, world.device):
        parts = build_parts(config, plan, prepared.task, world)
        feed = build_feed(config, plan, prepared.task, world)
        stepper = build_stepper(config, world, parts, plan.batch_size.value, ignore_event)
        try:
            yield StepRun(stepper, _endless(feed))
        finally:
            feed.close()
            if parts.compiled is not None:
                parts.compiled.undo()  # compiled code would keep the model in memory beside a peer's


def _endless(feed: Feed) -> Iterator[StepBatch]:
    for epoch in count():
        yield from feed.steps(epoch)


def _transformers(sizes: Sizes, arguments: argparse.Namespace, device: torch.device, weights: str) -> Row:
    """Time Mixtral with fp32 weights, as ours are, or with everything in bf16, which is less exact."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=max(1, sizes.width // 64),
        num_key_value_heads=max(1, sizes.width // 64),
        num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        tie_word_embeddings=True,
    )
    free_memory()
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=PEER_WEIGHTS[weights], experts_implementation="grouped_mm"
        )
    model.train()
    ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.sequence_length), device=device)
    seconds, loss = timed_steps(transformers_step(model, ids), arguments.steps)
    name = f"transformers Mixtral, grouped_mm, {weights} weights"
    return Row(name, seconds, peak_memory(device)["allocated"], [loss])


def _measured_peak(device: torch.device, size: int) -> float:
    """Return the FLOP/s of a square product: the median of ten blocks of ten."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def products() -> None:
        for _ in range(10):
            torch.mm(a, b)

    timed_seconds(products, device)
    seconds = statistics.median(timed_seconds(products, device) for _ in range(10))
    return 10 * 2 * size**3 / seconds


def _kernel_table(run: StepRun, device: torch.device) -> str:
    """Return the kernels that take most of the device's time, by step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED_STEPS):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    times = [(_self_us(event, device), event.count, event.key) for event in profile.key_averages()]
    times.sort(reverse=True)
    total_us = sum(us for us, _, _ in times)
    lines = [
        (
            f"{us / 1e3 / PROFILED_STEPS:.2f}",
            f"{us / total_us:.1%}",
            f"{calls / PROFILED_STEPS:.1f}",
            f"`{name[:MAX_NAME].replace('|', '/')}`",
        )
        for us, calls, name in times[:MOST_KERNELS]
    ]
    title = f"\nKernels: {total_us / 1e3 / PROFILED_STEPS:.1f} ms of device time per step.\n\n"
    return title + markdown_table(("ms a step", "share", "calls a step", "kernel"), lines)


def _self_us(event: Any, device: torch.device) -> float:
    return event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total


def _table(rows: Sequence[Row], sizes: Sizes, peak_flops: float) -> str:
    ours = statistics.median(rows[0].seconds)
    lines = []
    for row in rows:
        rates = sorted(sizes.tokens / seconds for seconds in row.seconds)
        rate = statistics.median(rates)
        lines.append(
            (
                row.name,
                f"{rate:,.0f}",
                f"{rates[0]:,.0f}–{rates[-1]:,.0f}",
                f"{sizes.tokens / rate * 1e3:.1f}",
                f"{row.peak_bytes / 2**30:.1f}",
                f"{rate * sizes.flops_per_token / peak_flops:.1%}",
                f"{sizes.tokens / rate / ours:.2f}",
                f"{row.losses[-1]:.4f}",
            )
        )
    columns = (
        *("variant", "tokens/s (median)", "range", "ms a step", "peak GiB"),
        *("of the measured peak", "its time / ours", "last loss"),
    )
    return markdown_table(columns, lines)


if __name__ == "__main__":
    main()
