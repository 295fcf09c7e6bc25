"""The user's own ``DataLoader``: its data set, its collate function and its sampler, in batches of ours.

A loader yields batches of one process. A run needs samples, which it divides among any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from orchestrator.data.iterable import IterableSource, IteratorReader
from orchestrator.data.source import LoaderSettings, Reader, Source, State
from orchestrator.errors import UserError


class LoadedSamples:
    """The data set of a loader that shuffles: with random access, in the order of the run's seed."""

    def __init__(self, loader: DataLoader[Any], settings: LoaderSettings) -> None:
        self.loader_settings = settings
        self.collate = loader.collate_fn
        self.worker_init = loader.worker_init_fn
        self.note = _note(loader, "its shuffling is replaced by the order of --seed")
        self._data: Any = loader.dataset

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


class SampledSource(Source):
    """The data set of a loader in the order of its sampler, whose indices are read as a stream."""

    def __init__(
        self, loader: DataLoader[Any], sampler: Any, settings: LoaderSettings, lost: str | None = None
    ) -> None:
        self.loader_settings = settings
        self.collate = loader.collate_fn
        self.worker_init = loader.worker_init_fn
        self.note = _note(loader, lost)
        self._data: Any = loader.dataset
        self._sampler = sampler
        self._yields_batches = sampler is loader.batch_sampler
        if not self._yields_batches and hasattr(sampler, "__len__"):
            self.num_samples = len(sampler)

    def read(self, epoch: int, state: State | None = None) -> Reader:
        del state
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        # A batch sampler may draw from the generator of a sampler inside.
        for sampler in (self._sampler, getattr(self._sampler, "sampler", None)):
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                # Its state depends on the passes before. The global one is seeded by seed and epoch.
                generator.manual_seed(int(torch.randint(2**62, ())))
        indices: Iterable[Any] = self._sampler
        return IteratorReader(chain.from_iterable(indices) if self._yields_batches else iter(indices))

    def name_of(self, item: Any, position: int) -> str:
        del position
        return str(item)

    def decode(self, item: Any) -> Any:
        return self._data[item]


def read_loader(loader: DataLoader[Any]) -> LoadedSamples | Source:
    """Return the samples of a loader; their ``note`` names the settings of the loader that are lost.

    Raises ``UserError`` for a loader whose data set makes its own batches.
    """
    if loader.batch_sampler is None:
        raise UserError(
            f"the data is a {type(loader).__name__} with batch_size=None, which yields what its data set "
            "yields; samples and a batch size were needed: set batch_size, or give the data set itself"
        )
    if isinstance(loader.dataset, IterableDataset):
        return _iterable_source(loader)
    batch_sampler: Any = loader.batch_sampler
    # A subclass may group its samples; torchdata has a class of its own with this name.
    if type(batch_sampler).__name__ != "BatchSampler":
        settings = LoaderSettings(None, loader.num_workers)
        lost = f"the batches of its {type(batch_sampler).__name__} are joined and divided anew"
        return SampledSource(loader, batch_sampler, settings, lost)
    sampler = batch_sampler.sampler
    settings = LoaderSettings(batch_sampler.batch_size, loader.num_workers)
    if _shuffles(sampler):
        return LoadedSamples(loader, settings)
    if isinstance(sampler, DistributedSampler):
        # The run divides the samples itself.
        sampler = SequentialSampler(sampler.dataset)  # pyrefly: ignore[bad-argument-type]
    return SampledSource(loader, sampler, settings)


def _iterable_source(loader: DataLoader[Any]) -> Source:
    source = IterableSource(loader.dataset)
    source.loader_settings = LoaderSettings(loader.batch_size, loader.num_workers)
    source.collate = loader.collate_fn
    # A worker_init_fn divides a data set among loader processes; ours do not read the data set.
    lost = "its worker_init_fn is not called" if loader.worker_init_fn is not None else None
    source.note = "; ".join(filter(None, (source.note, _note(loader, lost)))) or None
    return source


def _shuffles(sampler: Any) -> bool:
    """Return whether a sampler draws each sample of the data set once, in a random order."""
    if isinstance(sampler, DistributedSampler):
        return sampler.shuffle
    if type(sampler).__name__ != "RandomSampler":
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _note(loader: DataLoader[Any], lost: str | None) -> str | None:
    losses = [lost] if lost else []
    if getattr(loader.batch_sampler, "drop_last", False):
        losses.append("a short last batch is trained on, in spite of drop_last")
    return f"of the {type(loader).__name__}: {'; '.join(losses)}" if losses else None
