"""What a user writes to train something of their own: a model, data, and the loss of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Loss:
    """The loss of a batch as a sum and a count. The loop divides by the count of the *global* batch, so the result does
    not depend on how that batch was cut into micro-batches or shared out.

    ``metrics`` are sums over the same count. ``loads`` are the tokens per expert of each MoE layer."""

    sum: Tensor
    count: int | Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    loads: tuple[Tensor, ...] = ()


class Task(Protocol):
    """A task. Subclass it for the defaults, or write the same members yourself.

    ``loss`` may return a ``Loss``, a pair (sum, count), or a plain scalar, which is taken as the mean over the batch's
    samples.

    A task may also have ``initialise(model) -> None``, which fills the initial weights of a model in place, the same whatever of
    it is there: ``experts.model.initialise(model, seed)`` does. In expert parallel a host then builds the model without its
    weights, cuts away the experts that live elsewhere, and fills what is left. Without it each host builds the whole model
    first, and ``build_model`` must make the same one everywhere."""

    unit: str = "samples"
    """What a count counts: throughput is reported in samples per second and, where this differs, in these."""
    units_per_sample: int = 1
    """How many of them a sample holds."""

    def build_model(self) -> nn.Module: ...

    def train_data(self) -> Any: ...

    def validation_data(self) -> Any:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Any: ...

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """An optimizer of the task's own, in place of AdamW with the configured settings."""
        del parameters
        return None

    def schedule(self) -> Callable[[int], float] | None:
        """A schedule of the task's own: optimizer step (from 0) to a factor of the learning rate."""
        return None


@runtime_checkable
class Gatherable(Protocol):
    """Data that hands out a whole batch at once: faster than sample by sample, and it may live on the device."""

    def __len__(self) -> int: ...

    def gather(self, index_B: Tensor) -> Any: ...

    def to(self, device: torch.device) -> Gatherable: ...

    @property
    def nbytes(self) -> int: ...


class TensorData:
    """Tensors with one sample per row: a batch is a tuple of their rows."""

    def __init__(self, *tensors: Tensor) -> None:
        if not tensors or any(len(t) != len(tensors[0]) for t in tensors):
            raise ValueError(f"tensors of one length were needed; got lengths {[len(t) for t in tensors]}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def gather(self, index_B: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.index_select(0, index_B) for t in self.tensors)

    def to(self, device: torch.device) -> TensorData:
        return TensorData(*(t.to(device) for t in self.tensors))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class WindowData:
    """Windows of a token stream: sample i is tokens [i × context, (i + 1) × context], one more than the context, so that
    each token but the first is once a target."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context
        if len(self) < 1:
            raise ValueError(
                f"{len(tokens)} tokens hold no window of {context} + 1; give more text or lower --context-length"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def gather(self, index_B: Tensor) -> Tensor:
        start_B1 = (index_B * self.context).unsqueeze(1)
        return self.tokens[start_B1 + torch.arange(self.context + 1, device=self.tokens.device)].long()

    def to(self, device: torch.device) -> WindowData:
        return WindowData(self.tokens.to(device), self.context)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes
