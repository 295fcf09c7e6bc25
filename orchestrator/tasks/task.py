"""The interface of a task: a model, its data, and the loss of a batch.

Shapes: B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from orchestrator.config.metric import Metric


@dataclass(frozen=True)
class Loss:
    """The loss of a batch as a sum and a count.

    The loop divides by the count of the *global* batch, so that the result does not depend on how that
    batch was split into micro-batches or over workers.
    """

    sum: Tensor
    count: int | Tensor
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Sums over the same count; a tuple has the arguments of ``update`` of a ``Metric``."""
    loads: tuple[Tensor, ...] = ()
    """Tokens per expert of each MoE layer."""
    updates: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The tuples among ``metrics``; ``as_loss`` moves them here."""


class StepPreview(Protocol):
    """The passes of an optimizer step before they are trained."""

    model: nn.Module
    is_single_pass: bool
    """Whether the step has one pass on each worker, in which all workers take part."""

    def batches(self) -> Iterator[Any]:
        """Yield the batches of this worker's micro-batches; none where it has no samples."""
        ...

    def forward(self, function: Callable[[Any], Any]) -> list[Any]:
        """Return the results of a function for each pass, without gradients and with its randomness."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all workers; with --reproducible, of whole numbers alone."""
        ...


class Task(Protocol):
    """A task. Subclass it for the defaults, or write the same members yourself.

    ``loss`` may return a ``Loss``, a pair (sum, count), or a plain scalar: the mean over the batch's
    samples.

    A task may also have ``initialise(model) -> None``, which fills the initial weights of a model in place,
    the same for every expert wherever it lives; ``experts.model.initialise(model, seed)`` does. In expert
    parallel a host then builds the model without memory for its weights, removes the experts of other
    hosts, and fills the rest. Without it each host builds the whole model first, and ``build_model`` must
    build the same one everywhere.

    A model whose frozen weights ``initialise`` reads from files may have an attribute ``frozen_base``, a text
    that identifies these files. Checkpoints and snapshots then hold the trained weights alone.

    A task with ``keep_files(run_dir) -> None`` copies files into the run folder that a later start needs, and
    takes the folder of the earlier start as a second argument of its constructor.

    A task whose loss depends on the whole step has ``prepare_step(preview) -> None``, which is called on
    every worker before the step's first pass.
    """

    unit: str = "samples"
    """The unit of a count. Throughput is reported in samples per second and, if it differs, in this."""
    units_per_sample: int = 1
    """Units in a sample, padding included. The throughput is counted by it where it is above 1."""
    metrics: Mapping[str, Metric | Any] = MappingProxyType({})
    """Directions of the metrics that ``loss`` returns, for names that are not known, and metrics with
    a state: ``{"churn": Metric(mode="min"), "f1": F1()}``. Those of torchmetrics are accepted."""
    settings_read: Collection[str] | None = None
    """Names of the settings of models, experts, data and optimizers that the task reads; others are refused.
    Default: those that it reads of the config that it is made with."""

    def build_model(self) -> nn.Module: ...

    def train_data(self) -> Any: ...

    def validation_data(self) -> Any:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Any: ...

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """Return the task's own optimizer; None for AdamW with the configured settings."""
        del parameters
        return None

    def schedule(self) -> Callable[[int], float] | None:
        """Return the task's own schedule: optimizer step (from 0) to a factor of the learning rate."""
        return None


@runtime_checkable
class Gatherable(Protocol):
    """Data that returns a whole batch at once: faster than by sample, and it may live on the device."""

    def __len__(self) -> int: ...

    def gather(self, index_B: Tensor) -> Any: ...

    def to(self, device: torch.device) -> Gatherable: ...

    @property
    def nbytes(self) -> int: ...


@runtime_checkable
class ChoosesSamples(Protocol):
    """Data with random access that decides which samples an epoch has; ``len`` of it says how many."""

    def epoch_samples(self, seed: int, epoch: int) -> Tensor:
        """Return the indices of an epoch's samples: a function of these two numbers alone."""
        ...


class TensorData:
    """Tensors with one sample per row; a batch is a tuple of their rows."""

    def __init__(self, *tensors: Tensor) -> None:
        if not tensors or any(len(tensor) != len(tensors[0]) for tensor in tensors):
            lengths = [len(tensor) for tensor in tensors]
            raise ValueError(f"tensors of one length were needed; got lengths {lengths}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def gather(self, index_B: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.index_select(0, index_B) for tensor in self.tensors)

    def to(self, device: torch.device) -> TensorData:
        return TensorData(*(tensor.to(device) for tensor in self.tensors))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def as_tensor_data(data: Any) -> TensorData | None:
    """Return tensors and arrays, alone, in a tuple or in a ``TensorDataset``; None for other data."""
    if isinstance(data, TensorData):
        return data
    if isinstance(data, Tensor):
        return TensorData(data)
    if isinstance(data, np.ndarray):
        return TensorData(torch.from_numpy(data))
    if isinstance(data, tuple) and data and all(isinstance(part, np.ndarray | Tensor) for part in data):
        return TensorData(*(torch.as_tensor(part) for part in data))
    return TensorData(*data.tensors) if isinstance(data, TensorDataset) else None


class WindowData:
    """Windows of a token stream: sample i is tokens [i × context, (i + 1) × context].

    A window has one token more than the context, so that each token but the first is a target once.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context
        if len(self) < 1:
            raise ValueError(
                f"{len(tokens)} tokens hold no window of {context} + 1; "
                "give more text or lower --sequence-length"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def gather(self, index_B: Tensor) -> Tensor:
        start_B1 = (index_B * self.context).unsqueeze(1)
        offsets = torch.arange(self.context + 1, device=self.tokens.device)
        return self.tokens[start_B1 + offsets].long()

    def to(self, device: torch.device) -> WindowData:
        return WindowData(self.tokens.to(device), self.context)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes
