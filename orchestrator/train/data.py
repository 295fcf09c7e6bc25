"""Samples in an order that is a function of seed and epoch alone, cut into steps and micro-batches.

A global batch is cut into micro-batches first and each of those into shares, so which samples meet in a step depends on
neither the number of workers nor the accumulation, and any step of any epoch can be begun at without reading the ones
before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info

from experts.model import mix
from orchestrator.errors import UserError
from orchestrator.tasks.load import user_code
from orchestrator.tasks.task import Gatherable, TensorData
from orchestrator.train.parts.world import World


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are brought to the device."""

    loader_workers: int = 0
    prefetch: int = 2
    on_device: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of this worker: how many samples of it count, and how to bring it to the device."""

    num_samples: int
    fetch: Callable[[], Any]
    first_sample: int = 0
    """Place of its first sample in the global batch."""
    num_dummies: int = 1
    """Samples that stand in where none count."""


@dataclass(frozen=True)
class StepBatch:
    """This worker's part of a global batch, in micro-batches: as many as every other worker has."""

    micro_batches: list[MicroBatch]
    global_samples: int
    """Of the whole global batch."""
    all_have_samples: bool
    """Whether every worker has samples in each micro-batch. In a short last batch some may have none."""


@dataclass(frozen=True)
class Ticket:
    """What a loader process needs to make a batch, randomness included."""

    seed: int
    indices: tuple[int, ...]


class Feed:
    """A data set as a stream of steps, each a portion of the global batch."""

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
        """``micro_batch`` is the mean per worker. With ``seed`` None the order is the data's own (evaluation)."""
        self.data = as_dataset(data)
        self.samples = len(self.data)
        if self.samples == 0:
            raise UserError("the data set is empty; at least one sample is needed")
        self.world, self.seed = world, seed
        self.global_batch, self.micro_batch = min(global_batch, self.samples), micro_batch
        if isinstance(self.data, Gatherable) and loader.on_device:
            self.data = self.data.to(world.device)
        self._loader = None if isinstance(self.data, Gatherable) else _loader(self.data, loader, world.device)

    @property
    def largest_micro_batch(self) -> int:
        """Samples of the largest micro-batch that this worker gets."""
        part = self.world.split_batch(min(self.micro_batch * self.world.data_ranks, self.global_batch))[
            self.world.rank
        ]
        return max(1, part.stop - part.start)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    def order(self, epoch: int) -> Tensor:
        if self.seed is None:
            return torch.arange(self.samples)
        return torch.randperm(
            self.samples, generator=torch.Generator().manual_seed(mix(self.seed, "order", epoch))
        )

    def steps(self, epoch: int, position: int = 0) -> Iterator[StepBatch]:
        """The steps of an epoch, from the given sample of its order on. The last one may be short."""
        order = self.order(epoch)
        if isinstance(self.data, Gatherable):
            yield from self._gathered(self.data, order, position)
        else:
            yield from self._loaded(order, epoch, position)

    def close(self) -> None:
        """End the loader's processes now, not when they happen to be collected."""
        handle: Any = self._loader
        if handle is not None:
            iterator, handle._iterator = handle._iterator, None
            if iterator is not None and hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
            handle.sampler.tickets = lambda: iter(())

    def _micro_batches(self, begin: int) -> Iterator[tuple[int, int]]:
        """Where the micro-batches of all workers together begin and end, for the step that begins at a sample."""
        end = min(begin + self.global_batch, self.samples)
        together = self.micro_batch * self.world.data_ranks
        yield from ((start, min(start + together, end)) for start in range(begin, end, together))

    def _cut(self, begin: int) -> list[tuple[int, slice]]:
        """This worker's micro-batches of the step that begins at a sample: how many samples count, and where they lie in the
        epoch's order. A worker without any gets some to stand in, which do not count: where workers wait for each other in
        a pass, all compute or none can."""
        parts = [
            (start, self.world.split_batch(end - start)[self.world.rank])
            for start, end in self._micro_batches(begin)
        ]
        return [
            (
                part.stop - part.start,
                slice(start + part.start, start + part.stop)
                if part.stop > part.start
                else self._stand_in(start),
            )
            for start, part in parts
        ]

    def _stand_in(self, start: int) -> slice:
        """Two samples, where there are two: batch norm cannot do with one."""
        begin = max(0, min(start, self.samples - 2))
        return slice(begin, min(begin + 2, self.samples))

    def _portion(self, begin: int, micros: list[MicroBatch]) -> StepBatch:
        ends = list(self._micro_batches(begin))
        parts = [part for start, end in (ends[0], ends[-1]) for part in self.world.split_batch(end - start)]
        return StepBatch(micros, ends[-1][1] - begin, all(part.start < part.stop for part in parts))

    def _gathered(self, data: Gatherable, order: Tensor, position: int) -> Iterator[StepBatch]:
        order = order.to(_device_of(data))
        for begin in range(position, self.samples, self.global_batch):
            micros = [
                MicroBatch(
                    count, _Gathering(data, order[s], self.world.device), s.start - begin, s.stop - s.start
                )
                for count, s in self._cut(begin)
            ]
            yield self._portion(begin, micros)

    def _loaded(self, order: Tensor, epoch: int, position: int) -> Iterator[StepBatch]:
        assert self._loader is not None
        self._loader.sampler.tickets = lambda: self._tickets(order, epoch, position)  # pyright: ignore[reportAttributeAccessIssue]
        batches = iter(self._loader)
        for begin in range(position, self.samples, self.global_batch):
            cut = self._cut(begin)
            with user_code("reading a batch of the data set"):
                made = [next(batches) for _ in cut]
            micros = [
                MicroBatch(count, _Moving(batch, self.world.device), s.start - begin, s.stop - s.start)
                for (count, s), batch in zip(cut, made, strict=True)
            ]
            yield self._portion(begin, micros)

    def _tickets(self, order: Tensor, epoch: int, position: int) -> Iterator[Ticket]:
        for begin in range(position, self.samples, self.global_batch):
            for _, s in self._cut(begin):
                yield Ticket(mix(self.seed, "sample", epoch, s.start), tuple(order[s].tolist()))


@dataclass(frozen=True)
class _Gathering:
    data: Gatherable
    index_B: Tensor
    device: torch.device

    def __call__(self) -> Any:
        return to_device(self.data.gather(self.index_B), self.device, pin=True)


@dataclass(frozen=True)
class _Moving:
    batch: Any
    device: torch.device

    def __call__(self) -> Any:
        return to_device(self.batch, self.device, pin=False)  # the loader has pinned it


class _Batches(Dataset[Any]):
    """Whole batches by ticket. Randomness in a user's ``__getitem__`` is seeded per batch, so it does not depend on
    which process loads it or on what was loaded before."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitem__(self, ticket: Ticket) -> Any:
        if get_worker_info() is not None:
            return self._make(ticket)
        before = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
        )  # the training process has its own
        try:
            return self._make(ticket)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])

    def _make(self, ticket: Ticket) -> Any:
        seed_host(ticket.seed)
        torch.default_generator.manual_seed(ticket.seed)
        collate = getattr(self.data, "collate", default_collate)
        return collate([self.data[index] for index in ticket.indices])


def seed_host(seed: int) -> None:
    """Python's and numpy's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


class _Tickets:
    """A sampler whose source is set anew at each epoch, so that the loader and its processes live on."""

    def __init__(self) -> None:
        self.tickets: Callable[[], Iterator[Ticket]] = lambda: iter(())

    def __iter__(self) -> Iterator[Ticket]:
        return self.tickets()


def _loader(data: Any, feeding: LoaderOptions, device: torch.device) -> DataLoader[Any]:
    workers = feeding.loader_workers
    return DataLoader(
        _Batches(data),
        batch_size=None,
        sampler=_Tickets(),  # pyright: ignore[reportArgumentType]
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=feeding.prefetch if workers else None,
    )


def as_dataset(data: Any) -> Any:
    """Tensors, a tuple of tensors, a TensorDataset or anything with a length and ``[index]``."""
    if isinstance(data, Tensor):  # first: a tensor has a gather of its own
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
            f"the data is a {type(data).__name__}; tensors, or a data set with __len__ and __getitem__, were needed "
            "(the order of samples is ours to choose, so that runs can be resumed)"
        )
    return data


def _device_of(data: Gatherable) -> torch.device:
    tensors = [value for value in vars(data).values() if isinstance(value, Tensor)]
    tensors += [
        t for value in vars(data).values() if isinstance(value, tuple) for t in value if isinstance(t, Tensor)
    ]
    return tensors[0].device if tensors else torch.device("cpu")


def to_device(batch: Any, device: torch.device, pin: bool) -> Any:
    """A batch of tensors in any nesting, moved without making the host wait."""
    if isinstance(batch, Tensor):
        if batch.device == device or batch.device.type == device.type == "cpu":
            return batch.contiguous()
        return (
            (batch.pin_memory() if pin and device.type == "cuda" else batch)
            .to(device, non_blocking=True)
            .contiguous()
        )
    if isinstance(batch, dict):
        return {key: to_device(value, device, pin) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, pin) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, pin) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_of(value)


def _is_fields(batch: list[Any], samples: int) -> bool:
    """Whether a list as long as the batch holds its fields, each a tensor of all samples, rather than its samples."""
    return all(isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == samples for value in batch)


def slice_batch(batch: Any, begin: int, end: int, samples: int) -> Any:
    """Samples ``begin`` to ``end`` of a batch: whatever is as long as the batch is cut, the rest is handed on."""
    if isinstance(batch, Tensor):
        return batch[begin:end] if batch.ndim and batch.shape[0] == samples else batch
    if isinstance(batch, dict):
        return {key: slice_batch(value, begin, end, samples) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(slice_batch(value, begin, end, samples) for value in batch))
    if isinstance(batch, list) and len(batch) == samples and not _is_fields(batch, samples):
        return batch[begin:end]
    if isinstance(batch, list | tuple):
        return type(batch)(slice_batch(value, begin, end, samples) for value in batch)
    return batch
