"""A small model with one MoE layer in fp64, for tests of changes of its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experts.model import attach, initialise
from experts.moe.context import MoEContext, StepContext
from experts.moe.layer import MoELayer
from experts.structure import Change
from experts.surgery.expert_transfer import Slot, StateSpec
from experts.surgery.surgery import Surgery, change_layer
from orchestrator.train.optim.muon import Muon

WIDTH = 6
SPEC = StateSpec(
    (
        Slot("step", torch.float32, True),
        Slot("exp_avg", torch.float64, False),
        Slot("exp_avg_sq", torch.float64, False),
    ),
)


class Model(nn.Module):
    """A projection before and after the layer, so that the order of parameters matters."""

    def __init__(self, sizes: tuple[int, ...], top_k: int, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.moe = MoELayer(WIDTH, sizes, top_k, **options)
        self.after = nn.Linear(WIDTH, 1)

    def forward(self, x_TD: Tensor) -> Tensor:
        hidden, _ = self.moe(self.before(x_TD))
        return self.after(hidden)


def make(
    sizes: tuple[int, ...], top_k: int, steps: int = 3, **options: Any
) -> tuple[Model, torch.optim.AdamW]:
    """Return a model after a few steps of AdamW, in fp64."""
    model = Model(sizes, top_k, **options)
    initialise(model, 0)
    # Large enough that tokens differ in their choices.
    nn.init.normal_(model.moe.gate.weight_ED, generator=torch.Generator().manual_seed(3))
    model.double()
    attach(model, MoEContext())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        train_step(model, optimizer, step)
    return model, optimizer


def tokens(seed: int, count: int = 24) -> Tensor:
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train_step(model: Model, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    with model.moe.context.use_step(StepContext(seed=step)):
        loss = (model(tokens(step)) - tokens(step).sum(1, keepdim=True)).square().mean()
        loss.backward()
    optimizer.step()
    return loss.item()


def carry_out(model: Model, optimizer: torch.optim.Optimizer, change: Change, step: int = 3) -> Any:
    return change_layer(model, model.moe, change, Surgery(optimizer, SPEC, seed=0, step=step))


def born(new_id: int, parent: int | None = None, **fields: Any) -> Change:
    parents = () if parent is None else (parent,)
    return Change("born", 0, (new_id,), "a test", parents=parents, **fields)


def make_sgd(model: Model, lr: float = 1e-2) -> tuple[torch.optim.Optimizer, StateSpec]:
    """Return SGD with momentum, and the form of its state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return optimizer, StateSpec((Slot("momentum_buffer", torch.float64, False),))


def make_adamw(model: Model, lr: float = 1e-2) -> tuple[torch.optim.Optimizer, StateSpec]:
    """Return AdamW, and the form of its state."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0), SPEC


def make_muon(model: Model, lr: float = 1e-2) -> tuple[torch.optim.Optimizer, StateSpec]:
    """Return Muon over gate and experts, and the form of its state."""
    trained = [model.moe.gate.weight_ED, *model.moe.bank.parameters()]
    known = {id(p) for p in trained}
    others = [p for p in model.parameters() if id(p) not in known]
    adamw = torch.optim.AdamW(others, lr=lr, weight_decay=0)
    optimizer = Muon(trained, adamw, lr, momentum=0.9, weight_decay=0.0)
    return optimizer, StateSpec((Slot("momentum_buffer", torch.float64, False),))
