"""Feeds of data with random access: the run chooses an order that depends on seed and epoch alone.

Shapes: B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experts.model import mix
from orchestrator.data.source import SavedPlace
from orchestrator.errors import UserError
from orchestrator.tasks.task import ChoosesSamples, Gatherable
from orchestrator.tasks.user_code import user_code
from orchestrator.train.data.loading import (
    EVALUATION,
    TRAINING,
    BatchLoader,
    BatchRequest,
    LoadedBatch,
    LoaderOptions,
)
from orchestrator.train.data.steps import Feed, StepBatch
from orchestrator.train.device.batches import to_device
from orchestrator.train.group.world import World


class IndexedFeed(Feed):
    """Data with random access, in an order that the run chooses: each worker reads its share alone."""

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
        self.data = data
        self._num_samples = len(data)
        if self._num_samples == 0:
            raise UserError("the data set is empty; at least one sample is needed")
        super().__init__(world, min(global_batch, self._num_samples), micro_batch, seed)
        self.skips_bad = loader.skip_bad
        self._loader: BatchLoader | None = None
        self._bytes_on_device = 0
        if not isinstance(self.data, Gatherable):
            purpose = loader.purpose or (EVALUATION if seed is None else TRAINING)
            self._loader = BatchLoader(self.data, loader, world.device, purpose)
        elif loader.on_device:
            self.data = self.data.to(world.device)
            self._bytes_on_device = self.data.nbytes

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def bytes_on_device(self) -> int:
        return self._bytes_on_device

    @property
    def note(self) -> str | None:
        return getattr(self.data, "note", None)

    def order(self, epoch: int) -> Tensor:
        """Return the indices of an epoch's samples, in order."""
        if self.seed is None:
            return torch.arange(self._num_samples)
        generator = torch.Generator().manual_seed(mix(self.seed, "order", epoch))
        order = torch.randperm(self._num_samples, generator=generator)
        if not isinstance(self.data, ChoosesSamples):
            return order
        return self.data.epoch_samples(mix(self.seed, "mixture"), epoch)[order]

    def steps(self, epoch: int, position: int = 0, saved: SavedPlace | None = None) -> Iterator[StepBatch]:
        del saved  # random access needs no place to begin at
        order = self.order(epoch)
        if isinstance(self.data, Gatherable):
            yield from self._gathered_steps(self.data, order, position)
        else:
            yield from self._loaded_steps(order, epoch, position)

    def named_samples(self, epoch: int, begin: int, count: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        for index in self.order(epoch)[begin : begin + count].tolist():
            yield str(index), partial(self._sample, index)

    def _sample(self, index: int) -> Any:
        data = self.data
        return data.gather(torch.tensor([index])) if isinstance(data, Gatherable) else data[index]

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def _first_good(self) -> LoadedBatch:
        assert self._loader is not None
        return self._loader.first_good(range(self._num_samples))

    def _dummy_samples(self, start: int) -> slice:
        begin = max(0, min(start, self._num_samples - 2))
        return slice(begin, min(begin + 2, self._num_samples))

    def _step_bounds(self, position: int) -> Iterator[tuple[int, int]]:
        for begin in range(position, self._num_samples, self.global_batch):
            yield begin, min(begin + self.global_batch, self._num_samples)

    def _gathered_steps(self, data: Gatherable, order: Tensor, position: int) -> Iterator[StepBatch]:
        order = to_device(order, _device_of(data), pin=True)
        for begin, end in self._step_bounds(position):
            shares = self._shares(begin, end)
            fetches = [_GatherRows(data, order[share.samples], self.world.device) for share in shares]
            yield self._step_batch(begin, end, shares, fetches)

    def _loaded_steps(self, order: Tensor, epoch: int, position: int) -> Iterator[StepBatch]:
        assert self._loader is not None
        batches = self._loader.load(lambda: self._requests(order, epoch, position))
        for begin, end in self._step_bounds(position):
            shares = self._shares(begin, end)
            with user_code("reading a batch of the data set"):
                loaded = [next(batches) for _ in shares]
            shares, fetches, faults = self._without_bad_samples(shares, loaded)
            yield replace(self._step_batch(begin, end, shares, fetches), faults=faults)

    def _requests(self, order: Tensor, epoch: int, position: int) -> Iterator[BatchRequest]:
        for begin, end in self._step_bounds(position):
            for share in self._shares(begin, end):
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


def _device_of(data: Gatherable) -> torch.device:
    """Return the device of the first tensor among the data's attributes."""
    values = vars(data).values()
    tensors = [value for value in values if isinstance(value, Tensor)]
    for value in values:
        if isinstance(value, tuple):
            tensors += [member for member in value if isinstance(member, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
