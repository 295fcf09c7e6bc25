"""Training of families of ``transformers``: by our experts on hosts, and by their eager code in one
process.

The differences are relative: of the loss, of a gradient to its own norm plus a thousandth of the
global one, and of a weight to the largest of its tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from experts.balance import moe_layers
from experts.model import attach, place
from experts.moe.context import MoEContext
from experts.structure import Change
from experts.surgery.surgery import Surgery, change_layer
from experts.tokens.exchange import GroupExchange
from experts.transformers.balance import balance_loss, step_counts
from experts.transformers.registration import use
from harness.lm.families import (
    EXPERTS,
    FAMILIES,
    FamilyTask,
    Fp32MeansFp64,
    build,
    in_their_names,
    next_token_loss,
    tokens,
)
from harness.lm.family_lm import FamilyLanguageModel, LmSamples, eager_loss
from harness.runs.host_runs import by_expert, step_batches
from harness.runs.steppers import make_stepper, mean_loss
from orchestrator.config.settings import Config
from orchestrator.train.data.indexed import IndexedFeed
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.evolution.execution import state_spec
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import World, process_group_world
from orchestrator.train.stepper import Stepper

STEPS = 5
GLOBAL_BATCH = 5
"""Samples of a step: they divide by no number of hosts."""
PLACEMENTS: Mapping[int, Sequence[Sequence[int]]] = {
    2: ((0, 1, 1, 0, 1, 0, 1, 0), (1, 1, 0, 1, 1, 1, 1, 1)),
    # Uneven, and the first host has no expert of the second layer.
    3: ((0, 1, 1, 2, 1, 0, 1, 1), (2, 1, 1, 2, 1, 2, 1, 1)),
}
AUX_FAMILIES = [name for name in FAMILIES if name not in ("DeepSeek-V2", "DeepSeek-V3", "GLM-4 MoE")]
"""Families that have an auxiliary loss."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class FamilyRun:
    """Losses of the steps, gradients of the first, weights after the last, and the auxiliary loss."""

    losses: list[float]
    norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    aux_loss: float = 0.0
    aux_gradients: dict[str, Tensor] | None = None
    lm_losses: list[float] = field(default_factory=list)
    """Of steps of the task lm with its auxiliary loss."""
    lm_weights: dict[str, Tensor] = field(default_factory=dict)


def train_hosted(name: str, world: World) -> FamilyRun:
    """Train with our experts, by the loop of the orchestrator; two samples at a time."""
    host_of = placement(name, world.size)
    stepper, feed = make_stepper(
        FamilyTask(name), 2, GLOBAL_BATCH, 1e-3, clip_norm=1e9, world=world, host_of=host_of
    )
    model = stepper.strategy.model
    losses: list[float] = []
    norm = 0.0
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(step_batches(feed, STEPS)):
        totals = stepper.run(batch, step)
        losses.append(mean_loss(totals))
        if step == 0:
            assert totals.norm is not None
            norm = float(totals.norm)
            gradients = gradients_of(model)
    weights = by_expert(model, dict(model.named_parameters()))
    if name not in AUX_FAMILIES:
        return FamilyRun(losses, norm, gradients, weights)
    return FamilyRun(losses, norm, gradients, weights, *hosted_aux(name, world))


def train_in_one_process(name: str) -> FamilyRun:
    run = train_hosted(name, World.single_process())
    return with_lm(run, name, World.single_process())


def with_lm(run: FamilyRun, name: str, world: World) -> FamilyRun:
    """Return a run with steps of the task lm, in a world of their own: it has reduced no other metrics."""
    if name not in AUX_FAMILIES:
        return run
    losses, weights = train_lm(name, world)
    return replace(run, lm_losses=losses, lm_weights=weights)


def train_lm(name: str, world: World) -> tuple[list[float], dict[str, Tensor]]:
    """Train by the task lm with its auxiliary loss; return losses, and weights after the last step."""
    host_of = placement(name, world.size)
    stepper, feed = make_stepper(
        FamilyLanguageModel(name), 2, GLOBAL_BATCH, 1e-3, clip_norm=1e9, world=world, host_of=host_of
    )
    batches = step_batches(feed, STEPS)
    losses = [mean_loss(stepper.run(batch, step)) for step, batch in enumerate(batches)]
    model = stepper.strategy.model
    return losses, by_expert(model, dict(model.named_parameters()))


def train_with_moves(rank: int, size: int, store: str, name: str) -> FamilyRun:
    """Train on two hosts, and exchange experts between them after the second step."""
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 60) as world:
        host_of = placement(name, size)
        assert host_of is not None
        stepper, feed = make_stepper(
            FamilyTask(name), 2, GLOBAL_BATCH, 1e-3, clip_norm=1e9, world=world, host_of=host_of
        )
        model = stepper.strategy.model
        losses: list[float] = []
        for step, batch in enumerate(step_batches(feed, STEPS)):
            losses.append(mean_loss(stepper.run(batch, step)))
            if step == 1:
                move_experts(stepper, host_of)
        weights = by_expert(model, dict(model.named_parameters()))
        return FamilyRun(losses, 0.0, {}, weights)


def move_experts(stepper: Stepper, host_of: Sequence[Sequence[int]]) -> None:
    """Move the first and the last expert of each layer to the other of two hosts."""
    model = stepper.strategy.model
    for number, (_, layer) in enumerate(moe_layers(model)):
        ids = (0, len(host_of[number]) - 1)
        hosts = tuple((1 - host_of[number][expert],) for expert in ids)
        change = Change("moved", number, ids, "a test", hosts=hosts)
        optimizer = stepper.optimizer.inner
        spec = state_spec(layer, optimizer, stepper.world)
        change_layer(model, layer, change, Surgery(optimizer, spec, seed=0, step=2))
        stepper.experts_changed()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return by_expert(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def placement(name: str, hosts: int) -> list[Sequence[int]] | None:
    if hosts == 1:
        return None
    num_experts = FAMILIES[name].sizes.get("n_routed_experts", EXPERTS)
    return [layer[:num_experts] for layer in PLACEMENTS[hosts]]


def hosted_aux(name: str, world: World) -> tuple[float, dict[str, Tensor]]:
    """Return the auxiliary loss of eight samples and its gradients, over hosts and micro-batches."""
    model = use(build(name))
    if world.group is not None:
        host_of = placement(name, world.size)
        assert host_of is not None
        place(model, host_of, world.rank)
        attach(model, MoEContext(GroupExchange(world.group)))
    samples, mask = aux_batch()
    # Each host has an uneven part; each part is computed in two passes.
    bounds = {1: [0, 8], 2: [0, 3, 8], 3: [0, 2, 5, 8]}[world.size]
    begin, end = bounds[world.rank : world.rank + 2]
    middle = (begin + end) // 2
    passes = [(samples[rows], mask[rows]) for rows in (slice(begin, middle), slice(middle, end))]

    def forward(part: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
        ids, attended = part
        with Fp32MeansFp64():
            outputs = model(input_ids=ids, attention_mask=attended, output_router_logits=True)
        return outputs.router_logits, attended

    counts = step_counts(model, passes, forward)
    total = 0.0
    for part in passes:
        logits, attended = forward(part)
        share = balance_loss(model, logits, attended, counts)
        share.backward()
        total += float(share.detach())
    dense = {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None and "bank" not in name
    }
    if world.size == 1:
        return total, gradients_of(model)
    for gradient in dense.values():
        world.all_reduce(gradient)
    return float(world.all_reduce(torch.tensor(total, dtype=torch.float64))), gradients_of(model)


def aux_batch() -> tuple[Tensor, Tensor]:
    """Return eight samples and a mask that hides the end of some."""
    samples = tokens(8)
    mask = torch.ones_like(samples)
    mask[1, 4:] = 0
    mask[4, 3:] = 0
    return samples, mask


def train_on_hosts(
    rank: int, size: int, store: str, names: Sequence[str], host_counts: Sequence[int]
) -> dict[tuple[str, int], FamilyRun]:
    """Train all families on each number of hosts; ranks beyond that number have a rest."""
    results: dict[tuple[str, int], FamilyRun] = {}
    for hosts in host_counts:
        if rank >= hosts:
            continue
        for name in names:
            path = f"{store}-{hosts}-{names.index(name)}"
            with process_group_world(file_store(path, hosts), rank, hosts, CPU, "gloo", 60) as world:
                run = train_hosted(name, world)
            with process_group_world(file_store(f"{path}-lm", hosts), rank, hosts, CPU, "gloo", 60) as world:
                results[name, hosts] = with_lm(run, name, world)
    del size
    return results


def train_eager(name: str) -> FamilyRun:
    """Train the model as it comes from ``transformers``, in a plain loop of torch."""
    model = build(name)
    optimizer = eager_optimizer(model)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for (ids,) in global_batches(FamilyTask(name).train_data()):
        optimizer.zero_grad()
        total, count = next_token_loss(model, ids)
        (total / count).backward()
        first = first or {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(float(total.detach()) / count)
    norm = float(torch.stack([gradient.norm() for gradient in first.values()]).norm())
    weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    if name not in AUX_FAMILIES:
        return FamilyRun(losses, norm, first, weights)
    return FamilyRun(losses, norm, first, weights, *eager_aux(name), *train_lm_eagerly(name))


def train_lm_eagerly(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train with the auxiliary loss of ``transformers`` for the whole batch."""
    model = build(name)
    optimizer = eager_optimizer(model)
    losses: list[float] = []
    for batch in global_batches(LmSamples()):
        optimizer.zero_grad()
        loss = eager_loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {key: p.detach().clone() for key, p in model.named_parameters()}


def eager_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with the settings of a run by our experts."""
    settings = Config.of(learning_rate=1e-3).optim
    biases = [p for key, p in model.named_parameters() if is_vector(key, p)]
    matrices = [p for key, p in model.named_parameters() if not is_vector(key, p)]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": biases, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=settings.betas, eps=settings.eps)


def is_vector(name: str, parameter: Tensor) -> bool:
    """Whether the parameter, or each expert's part of it, is a norm's scale or a bias."""
    return parameter.ndim < 2 or name.endswith("proj_bias")


def global_batches(data: Any) -> list[Any]:
    feed = IndexedFeed(
        data,
        World.single_process(),
        global_batch=GLOBAL_BATCH,
        micro_batch=GLOBAL_BATCH,
        seed=0,
        loader=LoaderOptions(),
    )
    return [batch.micro_batches[0].fetch() for batch in step_batches(feed, STEPS)]


def eager_aux(name: str) -> tuple[float, dict[str, Tensor]]:
    model = build(name)
    samples, mask = aux_batch()
    with Fp32MeansFp64():
        loss = model(input_ids=samples, attention_mask=mask, output_router_logits=True).aux_loss
    loss.backward()
    return float(loss.detach()), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


# --- differences


def differences(name: str, hosts: Sequence[FamilyRun], expected: FamilyRun) -> dict[str, float]:
    """Return the largest difference of each kind between a run on hosts and the eager one."""
    first = hosts[0]
    model = build(name)
    losses = [abs(a - b) / abs(b) for a, b in zip(first.losses, expected.losses, strict=True)]
    found = {
        "loss": losses[0],
        "gradients": worst_gradient(
            merged(hosts, "gradients", expected.gradients, model), expected.gradients
        ),
        "norm": abs(first.norm - expected.norm) / expected.norm,
        "5 AdamW steps": max(*losses, worst_weight(hosts, expected, model)),
    }
    if expected.aux_gradients is not None:
        aux_gradients = merged(hosts, "aux_gradients", expected.aux_gradients, model)
        off = abs(first.aux_loss - expected.aux_loss) / expected.aux_loss
        found["auxiliary loss"] = off
        found["its gradients"] = worst_gradient(aux_gradients, expected.aux_gradients)
        lm_losses = [abs(a - b) / abs(b) for a, b in zip(first.lm_losses, expected.lm_losses, strict=True)]
        lm_weights = worst_weight(hosts, expected, model, "lm_weights")
        found["5 AdamW steps with it"] = max(*lm_losses, lm_weights)
    return found


def merged(
    hosts: Sequence[FamilyRun], part: str, expected: Mapping[str, Tensor], model: nn.Module
) -> dict[str, Tensor]:
    """Return the tensors of all hosts, in the names of ``transformers``."""
    tensors = {key: tensor for host in hosts for key, tensor in getattr(host, part).items()}
    return in_their_names(tensors, list(expected), model)


def worst_gradient(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    off = [(actual[key] - g).norm() / (g.norm() + 1e-3 * norm) for key, g in expected.items()]
    return float(torch.stack(off).max())


def worst_weight(
    hosts: Sequence[FamilyRun], expected: FamilyRun, model: nn.Module, part: str = "weights"
) -> float:
    right: dict[str, Tensor] = getattr(expected, part)
    weights = merged(hosts, part, right, model)
    off = [(weights[key] - w).abs().max() / w.abs().max() for key, w in right.items()]
    return float(torch.stack(off).max())


def num_moe_layers(name: str) -> int:
    return len(moe_layers(use(build(name))))
