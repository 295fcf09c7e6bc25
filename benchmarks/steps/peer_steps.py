"""Training steps of models of transformers, in the form of a hand-written loop, for the whole-step
benchmarks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from orchestrator.measure.timed_steps import WARM_UP_STEPS

LEARNING_RATE = 1e-4


def transformers_step(model: Any, ids: Tensor) -> Callable[[], float]:
    """Return a function that runs one step on the same tokens, waits for the device and returns the loss.

    AdamW by torch's fused kernel and clipping; fp32 weights compute in bf16 on a GPU."""
    device = ids.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    in_bf16 = device.type == "cuda" and model.dtype == torch.float32
    autocast = torch.autocast("cuda", torch.bfloat16) if in_bf16 else nullcontext()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def timed_steps(step: Callable[[], float], steps: int) -> tuple[list[float], float]:
    """Return the seconds of each step after the warm-up that ours have too, and the loss of the last one."""
    losses: list[float] = []
    seconds: list[float] = []
    for _ in range(WARM_UP_STEPS + steps):
        began = perf_counter()
        losses.append(step())  # waits for the device
        seconds.append(perf_counter() - began)
    return seconds[WARM_UP_STEPS:], losses[-1]


def free_memory() -> None:
    """Free what the model before has left on a GPU, and count its peak from here."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
