"""A tiny MoE classifier of random features, with every option of the layer, for hundreds of short
runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts.balance import gated_layers
from experts.model import initialise
from experts.moe.layer import MoELayer
from orchestrator.tasks.task import Loss, Task, TensorData

FEATURES = 7
CLASSES = 4
OPTIONS = (
    ("kind", "ffn"),
    ("scores", "sigmoid"),
    ("normalise", False),
    ("shared", 3),
    ("bias_rate", 0.01),
    ("jitter", 0.2),
)


@dataclass(frozen=True)
class Tiny(Task):
    """A task with the tiny model."""

    sizes: tuple[tuple[int, ...], ...]
    """Hidden sizes of the experts, by layer."""
    top_k: int = 2
    width: int = 8
    tokens: int = 1
    """Tokens per sample. With one, a batch has no dimension for them."""
    samples: int = 40
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)

    def build_model(self) -> nn.Module:
        model = TinyModel(self)
        initialise(model, 5)
        for _, layer in gated_layers(model):
            # Decided gates: uneven loads, and no ties that rounding could decide.
            layer.gate.weight_ED.data.mul_(30)
        return model.to(self.dtype)

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(2)
        shape = (self.samples, self.tokens, FEATURES) if self.tokens > 1 else (self.samples, FEATURES)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return TensorData(x.to(self.dtype), torch.randint(CLASSES, shape[:-1], generator=generator))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, labels = batch
        logits, routings = model(x)
        total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        for routing in routings:
            total = total + 0.05 * routing.balance + 0.001 * routing.z
        return Loss(total, labels.numel(), {}, tuple(r.counts_E for r in routings))


class TinyBlock(nn.Module):
    def __init__(self, task: Tiny, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(task.width)
        self.ffn = MoELayer(task.width, sizes, min(task.top_k, len(sizes)), **task.options)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y, routing = self.ffn(self.norm(x))
        return x + y, routing


class TinyModel(nn.Module):
    def __init__(self, task: Tiny) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, task.width)
        self.blocks = nn.ModuleList(TinyBlock(task, sizes) for sizes in task.sizes)
        self.head = nn.Linear(task.width, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        x = self.stem(x)
        routings: list[Any] = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        return self.head(x), routings


@dataclass(frozen=True)
class HostCase:
    """A run on several hosts: the placement of experts, the sizes of batches, and the hosts that
    have data."""

    task: Tiny
    hosts: int
    host_of: tuple[tuple[int, ...], ...]
    micro_batch: int
    global_batch: int
    data_on_main: bool = False
    shares: tuple[float, ...] = ()
    chunks: int = 1
    recompute: bool = False
    sharding: str = "none"
    bucket_mb: int = 1

    @property
    def data_ranks(self) -> int:
        return 1 if self.data_on_main else self.hosts


def random_case(seed: int, hosts: int, dtype: torch.dtype) -> HostCase:
    """A case drawn by a seed: up to 17 experts of any sizes, any placement, hosts without experts
    or tokens."""
    draw = random.Random(f"{seed}/{hosts}/{dtype}")
    layers = draw.choice([1, 1, 2, 3])
    experts = draw.randint(1, 17)
    sizes = tuple(tuple(draw.choice([1, 2, 3, 4, 5, 8, 13]) for _ in range(experts)) for _ in range(layers))
    # Hosts with experts, by layer: not always all of them.
    hosts_in_use = [draw.sample(range(hosts), draw.randint(1, hosts)) for _ in range(layers)]
    options: dict[str, Any] = {name: value for name, value in OPTIONS if draw.random() < 0.25}
    if draw.random() < 0.15:
        options["capacity"] = draw.choice([0.5, 1.0, 2.0])
    data_on_main = draw.random() < 0.25
    micro_batch = draw.randint(1, 6)
    task = Tiny(
        sizes,
        draw.randint(1, min(4, experts)),
        tokens=draw.choice([1, 1, 3]),
        samples=draw.randint(9, 40),
        dtype=dtype,
        options=options,
    )
    host_of = tuple(tuple(draw.choice(of_layer) for _ in range(experts)) for of_layer in hosts_in_use)
    data_ranks = 1 if data_on_main else hosts
    global_batch = draw.randint(1, 4) * micro_batch * data_ranks - draw.randint(0, micro_batch - 1)
    shares: tuple[float, ...] = ()
    if not data_on_main and draw.random() < 0.3:
        shares = tuple(draw.choice([1.0, 2.0, 0.25]) for _ in range(hosts))
    return HostCase(
        task,
        hosts,
        host_of,
        micro_batch,
        global_batch,
        data_on_main,
        shares,
        chunks=draw.choice([1, 1, 2, 3]),
        recompute=layers > 1 and draw.random() < 0.3,
    )
