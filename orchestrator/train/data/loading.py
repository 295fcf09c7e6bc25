"""Loading of batches by the keys of their samples, in this process or in loader processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from orchestrator.errors import UserError
from orchestrator.tasks.user_code import user_code
from orchestrator.train.device.batches import tensors_of
from orchestrator.types import first_line

MAX_TRIED = 10_000
"""Samples that are tried in search of one that can be loaded."""
TRAINING = "the training"
EVALUATION = "an evaluation"
_NUM_DUMMIES = 2  # batch norm needs more than one


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are loaded and brought to the device."""

    loader_workers: int = 0
    prefetch: int = 2
    on_device: bool = False
    """Whether the whole data set lies on the device."""
    shuffle_buffer: int = 0
    """Samples of a source that are shuffled together; 0 keeps the order of the source."""
    skip_bad: bool = False
    """Whether samples that cannot be loaded are left out."""
    purpose: str | None = None
    """The purpose of the samples, for messages. None: the training, or an evaluation without a seed."""


@dataclass(frozen=True)
class BatchRequest:
    """The samples of a batch, and the seed of its randomness."""

    seed: int
    keys: tuple[Any, ...]
    """Indices of samples, or raw items of a source."""


class LoadedBatch(NamedTuple):
    """A batch, without the samples that could not be loaded."""

    batch: Any
    """None if no sample is left."""
    num_samples: int
    faults: Sequence[str]
    """The name and the error of each sample that could not be loaded."""


class BatchLoader:
    """A data loader that lives for all epochs, with its processes; each epoch sets its own requests.

    ``purpose`` names the purpose of the samples in error messages."""

    def __init__(self, data: Any, options: LoaderOptions, device: torch.device, purpose: str) -> None:
        workers = options.loader_workers
        self._sampler = _RequestSampler()
        self._batches = _RequestedBatches(data, options.skip_bad, purpose)
        self._loader: Any = DataLoader(
            self._batches,
            batch_size=None,
            sampler=self._sampler,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            prefetch_factor=options.prefetch if workers else None,
            worker_init_fn=getattr(data, "worker_init", None),
            # A separate generator: each pass draws a number from it, and a resumed run makes one more pass.
            generator=torch.Generator(),
        )

    def load(self, requests: Callable[[], Iterator[BatchRequest]]) -> Iterator[LoadedBatch]:
        """Yield the requested batches, in order."""
        self._sampler.requests = requests
        return iter(self._loader)

    def first_good(self, keys: Iterable[Any]) -> LoadedBatch:
        """Load the first samples that can be loaded, in this process; the faults are of those before."""
        good: list[Any] = []
        faults: list[str] = []
        for key in islice(keys, MAX_TRIED):
            found = self._batches[BatchRequest(0, (key,))]
            good += [key] * found.num_samples
            faults += found.faults
            if len(good) == _NUM_DUMMIES:
                break
        batch, num_samples, _ = self._batches[BatchRequest(0, tuple(good))]
        return LoadedBatch(batch, num_samples, faults)

    def close(self) -> None:
        """End the loader processes now, not when the garbage collector finds them."""
        iterator = self._loader._iterator
        self._loader._iterator = None
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        self._sampler.requests = lambda: iter(())


class _RequestSampler:
    """A sampler whose requests can be replaced, so that the loader outlives an epoch."""

    def __init__(self) -> None:
        self.requests: Callable[[], Iterator[BatchRequest]] = lambda: iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.requests()


class _RequestedBatches(Dataset[Any]):
    """Batches by request.

    Randomness in a user's ``__getitem__`` is seeded per batch, so that it depends neither on the process
    that loads the batch nor on the batches before it.
    """

    def __init__(self, data: Any, skip_bad: bool, purpose: str) -> None:
        self.data = data
        self._skip_bad = skip_bad
        self._purpose = purpose

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:  # pyrefly: ignore[bad-override-param-name]
        if get_worker_info() is not None:
            return self._load(request)
        # In the training process, the model's own random state must survive.
        with RandomState(request.seed).in_use():
            return self._load(request)

    def _load(self, request: BatchRequest) -> LoadedBatch:
        seed_all(request.seed)
        collate = getattr(self.data, "collate", _stack)
        samples: list[Any] = []
        faults: list[str] = []
        for key in request.keys:
            try:
                samples.append(self.data[key])
            except Exception as error:
                if not self._skip_bad:
                    # Here, because only this place knows which sample of the batch it is.
                    with user_code(f"reading {self._name_of(key)} for {self._purpose}"):
                        raise
                faults.append(self._fault_text(key, error))
        return LoadedBatch(collate(samples) if samples else None, len(samples), faults)

    def _fault_text(self, key: Any, error: Exception) -> str:
        text = first_line(error)
        if isinstance(error, UserError):
            return text  # it names the sample
        return f"{self._name_of(key)}: {type(error).__name__}: {text}"

    def _name_of(self, key: Any) -> str:
        return self.data.name_of(key) if hasattr(self.data, "name_of") else f"sample {key}"


def _stack(samples: list[Any]) -> Any:
    """Return the samples as a batch, as torch does; UserError for samples of different sizes."""
    try:
        return default_collate(samples)
    except RuntimeError as error:
        shapes = {tuple(tuple(tensor.shape) for tensor in tensors_of(sample)) for sample in samples}
        # In a loader process torch says only that it cannot resize a storage.
        if len(shapes) == 1 and "equal size" not in str(error):
            raise
        raise UserError(
            f"the samples of a batch have different sizes ({first_line(error)}); equal ones are needed to "
            "stack them. Pad the samples, or give the data set a method collate(samples) that makes a batch, "
            "or give a DataLoader with a collate_fn (docs/data.md)"
        ) from None


class RandomState:
    """A state of Python's, NumPy's and torch's random numbers that begins with a seed and goes on from
    block to block, beside the one of the model."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[Any, Any, Tensor] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the block draw from this state."""
        outside = _random_state()
        if self._state is None:
            seed_all(self._seed)
        else:
            _set_random_state(self._state)
        try:
            yield
        finally:
            self._state = _random_state()
            _set_random_state(outside)


def _random_state() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_random_state(state: tuple[Any, Any, Tensor]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def seed_all(seed: int) -> None:
    seed_python_and_numpy(seed)
    torch.default_generator.manual_seed(seed)


def seed_python_and_numpy(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
