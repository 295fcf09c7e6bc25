"""Training of families with a routing bias: by our experts on hosts, and by a slow oracle in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from experts.transformers.layout import is_experts_module
from harness.lm.families import FamilyTask, build, next_token_loss
from harness.lm.family_runs import CPU, GLOBAL_BATCH, STEPS, eager_optimizer, global_batches, placement
from harness.runs.host_runs import step_batches
from harness.runs.steppers import make_stepper, mean_loss
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world

RATE = 0.05
"""So large that choices change within the steps of a test."""


@dataclass(frozen=True)
class BiasRun:
    """Losses of the steps, and the biases after each."""

    losses: list[float]
    biases: list[dict[str, Tensor]]


def biases_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("_correction_bias")
    }


def train_with_bias(name: str, world: World) -> BiasRun:
    """Train with our experts, by the loop of the orchestrator; two samples at a time."""
    task = FamilyTask(name, bias_rate=RATE)
    host_of = placement(name, world.size)
    stepper, feed = make_stepper(task, 2, GLOBAL_BATCH, 1e-3, clip_norm=1e9, world=world, host_of=host_of)
    losses: list[float] = []
    biases: list[dict[str, Tensor]] = []
    for step, batch in enumerate(step_batches(feed, STEPS)):
        losses.append(mean_loss(stepper.run(batch, step)))
        biases.append(biases_of(stepper.strategy.model))
    return BiasRun(losses, biases)


def train_with_bias_on_hosts(
    rank: int, size: int, store: str, names: Sequence[str]
) -> dict[tuple[str, int], BiasRun]:
    """Train on two and on all hosts."""
    results: dict[tuple[str, int], BiasRun] = {}
    for hosts in (2, size):
        for name in names if rank < hosts else ():
            path = f"{store}-{hosts}-{names.index(name)}"
            with process_group_world(file_store(path, hosts), rank, hosts, CPU, "gloo", 60) as world:
                results[name, hosts] = train_with_bias(name, world)
    return results


def train_oracle(name: str) -> BiasRun:
    """Train the eager model in a plain loop, and move each expert's bias by itself."""
    model = build(name)
    optimizer = eager_optimizer(model)
    losses: list[float] = []
    biases: list[dict[str, Tensor]] = []
    for (ids,) in global_batches(FamilyTask(name).train_data()):
        optimizer.zero_grad()
        with recorded_choices(model) as choices:
            total, count = next_token_loss(model, ids)
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / count)
        for bias_name, bias_E in model.named_buffers():
            if bias_name.endswith("_correction_bias"):
                block = bias_name.removesuffix(".e_score_correction_bias").removesuffix(".gate")
                move_each(bias_E, choices[f"{block}.experts"])
        biases.append(biases_of(model))
    return BiasRun(losses, biases)


def move_each(bias_E: Tensor, chosen: Sequence[int], rate: float = RATE) -> None:
    mean = len(chosen) / len(bias_E)
    for expert in range(len(bias_E)):
        load = chosen.count(expert)
        if load < mean:
            bias_E[expert] += rate
        if load > mean:
            bias_E[expert] -= rate


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[dict[str, list[int]]]:
    """Record the chosen experts of each layer in a forward pass of an eager model."""
    choices: dict[str, list[int]] = {}
    handles: list[Any] = []
    for name, module in model.named_modules():
        if is_experts_module(module):

            def record(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                choices[name] = inputs[1].flatten().tolist()

            handles.append(module.register_forward_pre_hook(record))
    yield choices
    for handle in handles:
        handle.remove()
