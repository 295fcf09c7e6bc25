"""Data as steps: a global batch is split into micro-batches first, and each of those over the workers.

So neither the number of workers nor the accumulation changes which samples meet in a step, and training can
resume at any step of any epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.data.adapt import as_source
from orchestrator.data.source import SavedPlace, Source
from orchestrator.errors import UserError
from orchestrator.tasks.task import Gatherable, as_tensor_data
from orchestrator.train.data.loading import LoadedBatch
from orchestrator.train.device.batches import MoveToDevice, start_copy
from orchestrator.train.group.world import World
from orchestrator.types import counted


@dataclass(frozen=True)
class MicroBatch:
    """This worker's samples of a micro-batch, and the function that brings them to the device."""

    num_samples: int
    """Samples that count; 0 if this worker has only dummy samples."""
    fetch: Callable[[], Any]
    first_sample: int = 0
    """Index of the first sample in the global batch."""
    number: int = 0
    """Number of the micro-batch in the global batch, where each is computed by one worker."""
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
    next_samples: int | None = None
    """Samples of the next global batch, 0 at the end of the data. None if workers cannot disagree on it."""
    num_parts: int = 1
    """Micro-batches of the whole global batch, where each is computed by one worker."""
    faults: Sequence[str] = ()
    """The name and the error of each sample of this worker that could not be loaded and was left out."""


@dataclass(frozen=True)
class Share:
    """One worker's share of a micro-batch: samples that count, and the samples to compute."""

    num_samples: int
    samples: slice
    """Positions in the epoch's order; those of dummy samples if no sample counts."""


class Feed(ABC):
    """Data as a stream of steps: what is common to data with and without random access."""

    def __init__(self, world: World, global_batch: int, micro_batch: int, seed: int | None) -> None:
        """``micro_batch`` is the mean per worker.

        Without a seed the order is the data's own (evaluation).
        """
        self.world = world
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.seed = seed
        self.skips_bad = False
        self._last_good: LoadedBatch | None = None

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch; None if only reading them all would tell."""
        return None

    @property
    def note(self) -> str | None:
        """The limitations of this data, for the record of the run; None without any."""
        return None

    @property
    def bytes_on_device(self) -> int:
        """Bytes of the data set that were copied to a GPU."""
        return 0

    @abstractmethod
    def steps(self, epoch: int, position: int = 0, saved: SavedPlace | None = None) -> Iterator[StepBatch]:
        """Yield the steps of an epoch, from a sample of its order on. The last one may be short.

        ``saved`` is what ``place`` returned for this position or an earlier one of the epoch.
        """

    def place(self, position: int) -> SavedPlace | None:
        """Return what leads to a position faster than the data's beginning; None if nothing is needed."""
        del position
        return None

    @abstractmethod
    def named_samples(self, epoch: int, begin: int, count: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield the names of samples of an epoch's order, with functions that return the samples."""

    @abstractmethod
    def close(self) -> None:
        """End the loader processes."""

    @property
    def largest_micro_batch(self) -> int:
        """Samples of the largest micro-batch of this worker."""
        total = min(self.micro_batch * self.world.data_ranks, self.global_batch)
        part = self.world.split_batch(total, self.micro_batch)[self.world.rank]
        return max(1, part.stop - part.start)

    def steps_from(self, position: int) -> int | None:
        """Return the steps of an epoch from a sample on; None for some, if only reading them would tell."""
        if self.num_samples is None:
            return None
        return -(-(self.num_samples - position) // self.global_batch)

    def _micro_batch_bounds(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the bounds of each micro-batch, over all workers, of the step with these samples."""
        size = self.micro_batch * self.world.data_ranks
        return [(start, min(start + size, end)) for start in range(begin, end, size)]

    def _shares(self, begin: int, end: int) -> list[Share]:
        """Return this worker's share of each micro-batch of the step with these samples.

        A worker without samples gets dummy ones: where workers wait for each other in a pass, all must
        compute.
        """
        shares: list[Share] = []
        for start, stop in self._micro_batch_bounds(begin, end):
            part = self.world.split_batch(stop - start, self.micro_batch)[self.world.rank]
            if part.stop > part.start:
                samples = slice(start + part.start, start + part.stop)
            else:
                samples = self._dummy_samples(start)
            shares.append(Share(part.stop - part.start, samples))
        return shares

    def _without_bad_samples(
        self, shares: list[Share], loaded: Sequence[LoadedBatch]
    ) -> tuple[list[Share], list[Callable[[], Any]], list[str]]:
        """Return the shares and batches of a step without its bad samples, and the faults of these.

        The positions of all samples stay, so that a run resumes at the same one. A worker without a good
        sample computes other ones as dummy samples."""
        kept: list[Share] = []
        fetches: list[Callable[[], Any]] = []
        faults: list[str] = []
        for share, found in zip(shares, loaded, strict=True):
            start = share.samples.start
            if share.num_samples:
                faults += found.faults
            if found.num_samples and self.skips_bad:
                self._last_good = found
            usable = found if found.num_samples else self._good_samples(found.faults[0])
            num_samples = found.num_samples if share.num_samples else 0
            kept.append(Share(num_samples, slice(start, start + usable.num_samples)))
            # The first batch of a step is copied while the device computes the step before.
            move = start_copy if not fetches else MoveToDevice
            fetches.append(move(usable.batch, self.world.device))
        return kept, fetches, faults

    def _good_samples(self, fault: str) -> LoadedBatch:
        """Return samples that can be loaded: those of the last batch or, before there is one, the first.

        ``fault`` is the fault of a bad sample, for the error if there are no good ones."""
        if self._last_good is None:
            first = self._first_good()
            if not first.num_samples:
                tried = counted(len(first.faults), "sample")
                raise UserError(f"none of the first {tried} can be used, for instance: {fault}")
            self._last_good = first
        return self._last_good

    @abstractmethod
    def _first_good(self) -> LoadedBatch:
        """Return the first samples of the data that can be loaded."""

    @abstractmethod
    def _dummy_samples(self, start: int) -> slice:
        """Return two samples if there are two: batch norm needs more than one."""

    def _step_batch(
        self, begin: int, end: int, shares: list[Share], fetches: Sequence[Callable[[], Any]]
    ) -> StepBatch:
        micro_batches = [
            MicroBatch(
                share.num_samples,
                fetch,
                first_sample=share.samples.start - begin,
                number=(share.samples.start - begin) // self.micro_batch,
                num_dummies=share.samples.stop - share.samples.start,
            )
            for share, fetch in zip(shares, fetches, strict=True)
        ]
        bounds = self._micro_batch_bounds(begin, end)
        # All micro-batches but the last are of one size.
        parts = [
            part
            for start, stop in (bounds[0], bounds[-1])
            for part in self.world.split_batch(stop - start, self.micro_batch)
        ]
        all_have_samples = all(part.start < part.stop for part in parts)
        num_parts = -(-(end - begin) // self.micro_batch)
        return StepBatch(micro_batches, end - begin, all_have_samples, num_parts=num_parts)


def different_ends(rank: int, found: str) -> UserError:
    """Return the error of a worker whose data has another length than that of the others."""
    return UserError(
        f"the data has different lengths on the workers: {found} on worker {rank}, unlike on others; "
        "every worker must read all of it, so do not divide it by rank"
    )


def as_dataset(data: Any) -> Any:
    """Return data in one of three forms: ``Gatherable``, with ``__len__`` and ``__getitem__``, or ``Source``.

    Raises ``UserError`` for anything else."""
    tensors = as_tensor_data(data)  # before Gatherable: a tensor has a ``gather`` of its own
    if tensors is not None:
        return tensors
    return data if isinstance(data, Gatherable | Source) else as_source(data)


def num_samples(data: Any) -> int | None:
    """Return the length of data in one of the three forms; None if only reading it all would tell."""
    return data.num_samples if isinstance(data, Source) else len(data)
