"""The memory of a training state by part, against bytes counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.balance import gated_layers
from harness.hosts.ranks import run_ranks
from harness.runs.steppers import make_stepper, run_steps
from orchestrator.config.settings import Config
from orchestrator.plan.estimate import ShardingForm
from orchestrator.tasks.synthetic import Synthetic
from orchestrator.train.device.memory_parts import StateMemory, StorageCounter, state_parts
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.optim import adamw
from orchestrator.train.optim.adamw import AdamW
from orchestrator.train.optim.named_optimizers import build_named_optimizer
from orchestrator.train.optim.optimizer import ScheduledOptimizer
from orchestrator.train.optim.weight_average import WeightAverage
from orchestrator.train.optim.weight_copies import WeightCopies
from orchestrator.train.stepper import Stepper

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "width": 16,
    "layers": 1,
    "sequence_length": 8,
    "vocabulary": 16,
    "samples": 32,
    "experts": 3,
    "expert_hidden_size": (8,),
    "top_k": 2,
}
GATE = 3 * 16  # weights: one row of the width for each expert
BLOCK = 256  # numbers with one scale in the 8-bit optimizer


def stepper_of(optimizer: str = "adamw", ema: float | None = None, world: World | None = None) -> Stepper:
    """Return a stepper of a small MoE model after one step."""
    stepper, feed = make_stepper(Synthetic(Config.of(**SETTINGS)), 4, 8, world=world)
    if optimizer != "adamw" or ema is not None:
        settings = Config.of(optimizer=optimizer, learning_rate=1e-3).optim
        inner = build_named_optimizer(stepper.strategy.model, settings, fused=optimizer == "adamw")
        average = WeightAverage(inner, ema) if ema is not None else None
        stepper.optimizer = ScheduledOptimizer(inner, lambda _: 1.0, average=average)
    run_steps(stepper, feed, 1)
    return stepper


def sizes(stepper: Stepper) -> list[tuple[int, ...]]:
    """Return the shapes of all weights but the gate's, which are of the shape ``(3, 16)``."""
    model = stepper.strategy.model
    (layer,) = (layer for _, layer in gated_layers(model))
    assert sum(p.numel() for p in layer.gate.parameters()) == GATE
    gate = {id(p) for p in layer.gate.parameters()}
    return [tuple(p.shape) for p in model.parameters() if id(p) not in gate]


def elements(shapes: list[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def buffer_bytes(stepper: Stepper) -> int:
    return sum(buffer.nbytes for buffer in stepper.strategy.model.buffers())


@pytest.mark.parametrize("ema", [None, 0.9])
def test_adamw_has_two_moments_and_a_counter(ema: float | None) -> None:
    stepper = stepper_of(ema=ema)
    shapes = sizes(stepper)
    weights = elements(shapes)
    averages = 0 if ema is None else 1
    assert stepper.state_memory.parts == {
        "parameters": 4 * weights,
        "weight_copies": 0,
        "gradients": 4 * weights,
        "optimizer": 8 * weights + 4 * len(shapes),
        "average": 4 * weights * averages,
        "gate": (4 + 4 + 8 + 4 * averages) * GATE + 4,
        "buffers": buffer_bytes(stepper),
    }


def test_adamw8bit_has_a_byte_per_moment_and_scales() -> None:
    stepper = stepper_of("adamw8bit")
    parts = stepper.state_memory.parts

    def moment(shape: tuple[int, ...]) -> int:
        if len(shape) < 2:  # vectors are kept in full
            return 4 * elements([shape])
        rows = shape[0]
        blocks = -(-elements([shape]) // rows // BLOCK)
        return elements([shape]) + 4 * rows * blocks

    assert parts["optimizer"] == sum(2 * moment(shape) + 4 for shape in sizes(stepper))
    assert parts["parameters"] == parts["gradients"] == 4 * elements(sizes(stepper))


def test_kept_copies_of_weights_are_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "LARGE", 1)
    stepper, _ = make_stepper(Synthetic(Config.of(**SETTINGS)), 8, 8)
    model = stepper.strategy.model
    inner = AdamW(model.parameters(), 1e-3, (0.9, 0.999), 1e-8)
    copies = WeightCopies(model, inner, torch.bfloat16)
    parts = state_parts(model, inner, copies.tensors, CPU)
    experts = 3 * (16 * 16 + 8 * 16)  # up for gate and value, and down
    assert parts["weight_copies"] == 2 * experts
    assert parts["optimizer"] == parts["gradients"] == 0


def test_shared_storages_and_views_count_once() -> None:
    counter = StorageCounter(CPU)
    whole = torch.zeros(100)
    assert counter.add([whole[:10], whole[50:], whole, nn.Parameter(whole)]) == 400
    assert counter.add([whole.view(10, 10)]) == 0
    assert counter.add([torch.zeros(3, dtype=torch.uint8), torch.zeros(0)]) == 3


def test_tensors_of_other_devices_do_not_count() -> None:
    meta = torch.zeros(100, device="meta")
    assert StorageCounter(CPU).add([meta]) == 0
    assert StorageCounter(torch.device("meta")).add([meta, torch.zeros(7)]) == 400


def test_tied_weights_and_frozen_weights_count_as_parameters() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    found = state_parts(model, optimizer, [], CPU)
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (2 * 64, 64, 64)


def test_the_state_is_measured_until_there_is_optimizer_state() -> None:
    """fp16 may skip the first updates. Later updates cost nothing."""
    memory = StateMemory()
    found = [{"parameters": 8, "optimizer": 0}, {"parameters": 8, "optimizer": 16}]
    taken: list[dict[str, int]] = []

    def measure() -> dict[str, int]:
        taken.append(found[min(len(taken), 1)])
        return taken[-1]

    for _ in range(5):
        memory.after_update(measure)
    assert (len(taken), memory.parts) == (2, found[1])
    memory.experts_changed()
    memory.after_update(lambda: {"parameters": 4, "optimizer": 8})
    assert memory.parts == found[1], "of fewer experts than before"


def parts_of_rank(rank: int, size: int, store: str, sharding: ShardingForm) -> tuple[dict[str, int], int]:
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 30) as world:
        stepper, feed = make_stepper(Synthetic(Config.of(**SETTINGS)), 4, 8, world=world, sharding=sharding)
        run_steps(stepper, feed, 1)
        local: list[Tensor] = [
            p.to_local() if hasattr(p, "to_local") else p for p in stepper.strategy.model.parameters()
        ]
        return stepper.state_memory.parts, sum(tensor.nbytes for tensor in local)


@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
def test_workers_count_what_they_hold(sharding: ShardingForm) -> None:
    whole = stepper_of().state_memory.parts
    held = [parts for parts, _ in run_ranks(parts_of_rank, 2, sharding)]
    if sharding == "none":
        assert [parts["parameters"] for parts in held] == [whole["parameters"]] * 2
        assert [parts["optimizer"] for parts in held] == [whole["optimizer"]] * 2
    else:
        for name in ("parameters", "gradients", "optimizer"):
            # Rows that do not divide evenly are padded.
            assert 0.45 * whole[name] <= held[0][name] <= 0.62 * whole[name], name
