"""Continuations of a few prompts, greedy: each token is the one with the highest score.

Shapes: B prompts, S tokens of the longest prompt with its continuation, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experts.moe.context import StepContext
from orchestrator.tasks.generation import Generating, GenerationOptions, Prompt
from orchestrator.tasks.user_code import user_code
from orchestrator.train.device.precision import Precision
from orchestrator.train.group.world import World
from orchestrator.train.strategies.base import Strategy

Generation = dict[str, str | None]
"""``prompt``, ``text`` and, from the data, ``reference``."""


def find_prompts(task: Any, options: GenerationOptions) -> list[Prompt]:
    """Return the prompts of the options, or of the task's validation data; none if nothing is generated."""
    if not hasattr(task, "prompts") or not options.max_new_tokens:
        return []
    with user_code("reading the validation data"):
        data = task.validation_data() if hasattr(task, "validation_data") else None
    if data is None:
        return []  # the evaluation refuses it
    return task.prompts(options.prompts, data, options.max_new_tokens)


def generate(
    strategy: Strategy, world: World, precision: Precision, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[Generation]:
    """Return the continuations of the prompts.

    All workers must call it. The main worker chooses each token, so that all stop together."""
    if not prompts:
        return []
    task: Any = strategy.task
    continued = _continue(task, strategy, world, precision, prompts, max_new_tokens)
    return [
        {"prompt": task.decode(prompt.tokens), "text": task.decode(tokens), "reference": prompt.reference}
        for prompt, tokens in zip(prompts, continued, strict=True)
    ]


@torch.no_grad()
def _continue(
    task: Generating,
    strategy: Strategy,
    world: World,
    precision: Precision,
    prompts: Sequence[Prompt],
    limit: int,
) -> list[list[int]]:
    """Return the new tokens of each prompt.

    A pass computes all tokens anew, in one shape: this needs no cache, which models of all families
    would have to share with recomputation, compilation and hosts."""
    lengths = [len(prompt.tokens) for prompt in prompts]
    input_ids_BS = torch.zeros(len(prompts), max(lengths) + limit, dtype=torch.int64, device=world.device)
    for row, prompt in enumerate(prompts):
        input_ids_BS[row, : lengths[row]] = torch.tensor(prompt.tokens)
    rows_B = torch.arange(len(prompts), device=world.device)
    last_B = torch.tensor(lengths, device=world.device) - 1
    new: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    model = strategy.model
    was_training = model.training
    model.eval()
    try:
        for _ in range(limit):
            next_B = _next_tokens(task, strategy, world, precision, input_ids_BS, last_B)
            last_B = last_B + 1
            input_ids_BS[rows_B, last_B] = next_B
            for row, token in enumerate(next_B.tolist()):
                done[row] = done[row] or token in task.stop_tokens
                if not done[row]:
                    new[row].append(token)
            if all(done):
                break
    finally:
        model.train(was_training)
    return new


def _next_tokens(
    task: Generating,
    strategy: Strategy,
    world: World,
    precision: Precision,
    input_ids_BS: Tensor,
    last_B: Tensor,
) -> Tensor:
    """Return the token with the highest score after the last one of each prompt."""
    # Other hosts only compute their experts for the main one.
    step = StepContext(dummy=not world.is_main)
    with strategy.context.use_step(step), precision.autocast():
        logits_BSV = task.logits(strategy.model, input_ids_BS)
    rows_B = torch.arange(len(last_B), device=last_B.device)
    next_B = logits_BSV[rows_B, last_B].argmax(-1)
    world.broadcast([next_B])
    return next_B
