"""Samples in an order that depends on seed and epoch alone, split into steps and micro-batches.

A global batch is split into micro-batches first, and each of those over the workers. So neither the number
of workers nor the accumulation changes which samples meet in a step, and training can resume at any step of
any epoch without reading the ones before it.

Shapes: B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from experts.model import mix
from orchestrator.errors import UserError
from orchestrator.tasks.task import Gatherable, TensorData
from orchestrator.tasks.user_code import user_code
from orchestrator.train.batches import to_device
from orchestrator.train.loading import BatchLoader, BatchRequest, LoaderOptions
from orchestrator.train.parts.world import World


@dataclass(frozen=True)
class MicroBatch:
    """This worker's samples of a micro-batch, and the function that brings them to the device."""

    num_samples: int
    """Samples that count; 0 if this worker has only dummy samples."""
    fetch: Callable[[], Any]
    first_sample: int = 0
    """Index of the first sample in the global batch."""
    num_dummies: int = 1
    """Number of dummy samples to compute if none count."""


@dataclass(frozen=True)
class StepBatch:
    """This worker's part of a global batch; every worker has the same number of micro-batches."""

    micro_batches: list[MicroBatch]
    global_samples: int
    """Samples of the whole global batch."""
    all_have_samples: bool
    """Whether every worker has samples in each micro-batch. In a short last batch some may have none."""


@dataclass(frozen=True)
class _Share:
    """One worker's share of a micro-batch: samples that count, and the samples to compute."""

    num_samples: int
    samples: slice
    """Positions in the epoch's order; those of dummy samples if no sample counts."""


class Feed:
    """A data set as a stream of steps."""

    def __init__(
        self,
        data: Any,
        world: World,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int | None,
        loader: LoaderOptions,
    ) -> None:
        """``micro_batch`` is the mean per worker.

        Without a seed the order is the data's own (evaluation).
        """
        self.data = as_dataset(data)
        self.num_samples = len(self.data)
        if self.num_samples == 0:
            raise UserError("the data set is empty; at least one sample is needed")
        self.world = world
        self.seed = seed
        self.global_batch = min(global_batch, self.num_samples)
        self.micro_batch = micro_batch
        self._loader: BatchLoader | None = None
        if not isinstance(self.data, Gatherable):
            self._loader = BatchLoader(self.data, loader, world.device)
        elif loader.on_device:
            self.data = self.data.to(world.device)

    @property
    def largest_micro_batch(self) -> int:
        """Samples of the largest micro-batch of this worker."""
        total = min(self.micro_batch * self.world.data_ranks, self.global_batch)
        part = self.world.split_batch(total)[self.world.rank]
        return max(1, part.stop - part.start)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.global_batch)

    def order(self, epoch: int) -> Tensor:
        """Return the indices of an epoch's samples, in order."""
        if self.seed is None:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(mix(self.seed, "order", epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def steps(self, epoch: int, position: int = 0) -> Iterator[StepBatch]:
        """Yield the steps of an epoch, from a sample of its order on. The last one may be short."""
        order = self.order(epoch)
        if isinstance(self.data, Gatherable):
            yield from self._gathered_steps(self.data, order, position)
        else:
            yield from self._loaded_steps(order, epoch, position)

    def close(self) -> None:
        """End the loader processes."""
        if self._loader is not None:
            self._loader.close()

    def _step_starts(self, position: int) -> range:
        return range(position, self.num_samples, self.global_batch)

    def _micro_batch_bounds(self, begin: int) -> list[tuple[int, int]]:
        """Return the bounds of each micro-batch, over all workers, of the step that begins at a sample."""
        end = min(begin + self.global_batch, self.num_samples)
        size = self.micro_batch * self.world.data_ranks
        return [(start, min(start + size, end)) for start in range(begin, end, size)]

    def _shares(self, begin: int) -> list[_Share]:
        """Return this worker's share of each micro-batch of the step that begins at a sample.

        A worker without samples gets dummy ones: where workers wait for each other in a pass, all must
        compute.
        """
        shares: list[_Share] = []
        for start, end in self._micro_batch_bounds(begin):
            part = self.world.split_batch(end - start)[self.world.rank]
            if part.stop > part.start:
                samples = slice(start + part.start, start + part.stop)
            else:
                samples = self._dummy_samples(start)
            shares.append(_Share(part.stop - part.start, samples))
        return shares

    def _dummy_samples(self, start: int) -> slice:
        """Return two samples if there are two: batch norm needs more than one."""
        begin = max(0, min(start, self.num_samples - 2))
        return slice(begin, min(begin + 2, self.num_samples))

    def _step_batch(self, begin: int, shares: list[_Share], fetches: list[Callable[[], Any]]) -> StepBatch:
        micro_batches = [
            MicroBatch(
                share.num_samples,
                fetch,
                first_sample=share.samples.start - begin,
                num_dummies=share.samples.stop - share.samples.start,
            )
            for share, fetch in zip(shares, fetches, strict=True)
        ]
        bounds = self._micro_batch_bounds(begin)
        # All micro-batches but the last are of one size.
        parts = [
            part for start, end in (bounds[0], bounds[-1]) for part in self.world.split_batch(end - start)
        ]
        all_have_samples = all(part.start < part.stop for part in parts)
        return StepBatch(micro_batches, bounds[-1][1] - begin, all_have_samples)

    def _gathered_steps(self, data: Gatherable, order: Tensor, position: int) -> Iterator[StepBatch]:
        order = order.to(_device_of(data))
        for begin in self._step_starts(position):
            shares = self._shares(begin)
            fetches = [_GatherRows(data, order[share.samples], self.world.device) for share in shares]
            yield self._step_batch(begin, shares, fetches)

    def _loaded_steps(self, order: Tensor, epoch: int, position: int) -> Iterator[StepBatch]:
        assert self._loader is not None
        batches = self._loader.load(lambda: self._requests(order, epoch, position))
        for begin in self._step_starts(position):
            shares = self._shares(begin)
            with user_code("reading a batch of the data set"):
                loaded = [next(batches) for _ in shares]
            fetches = [_Move(batch, self.world.device) for batch in loaded]
            yield self._step_batch(begin, shares, fetches)

    def _requests(self, order: Tensor, epoch: int, position: int) -> Iterator[BatchRequest]:
        for begin in self._step_starts(position):
            for share in self._shares(begin):
                seed = mix(self.seed, "sample", epoch, share.samples.start)
                yield BatchRequest(seed, tuple(order[share.samples].tolist()))


@dataclass(frozen=True)
class _GatherRows:
    """Gathers rows of the data into a batch, and brings it to the device."""

    data: Gatherable
    index_B: Tensor
    device: torch.device

    def __call__(self) -> Any:
        return to_device(self.data.gather(self.index_B), self.device, pin=True)


@dataclass(frozen=True)
class _Move:
    """Brings a loaded batch to the device."""

    batch: Any
    device: torch.device

    def __call__(self) -> Any:
        return to_device(self.batch, self.device, pin=False)  # the loader has pinned it


def as_dataset(data: Any) -> Any:
    """Return tensors, arrays and tensor data sets as ``TensorData``, and other data sets unchanged."""
    if isinstance(data, Tensor):  # before Gatherable: a tensor has a ``gather`` of its own
        return TensorData(data)
    if isinstance(data, Gatherable):
        return data
    if isinstance(data, np.ndarray):
        return TensorData(torch.from_numpy(data))
    if isinstance(data, tuple) and data and all(isinstance(part, np.ndarray | Tensor) for part in data):
        return TensorData(*(torch.as_tensor(part) for part in data))
    if isinstance(data, TensorDataset):
        return TensorData(*data.tensors)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UserError(
            f"the data is a {type(data).__name__}; tensors, or a data set with __len__ and __getitem__, were "
            "needed (the run chooses the order of samples, so that it can be resumed)"
        )
    return data


def _device_of(data: Gatherable) -> torch.device:
    """Return the device of the first tensor among the data's attributes."""
    values = vars(data).values()
    tensors = [value for value in values if isinstance(value, Tensor)]
    for value in values:
        if isinstance(value, tuple):
            tensors += [member for member in value if isinstance(member, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
