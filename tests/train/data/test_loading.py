"""Tests of loading sample by sample: batches are the same in any process."""

from __future__ import annotations

import multiprocessing
import random
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.errors import TaskFailed, UserError
from orchestrator.train.data.first_samples import first_samples
from orchestrator.train.data.loading import LoaderOptions
from orchestrator.train.data.opening import open_feed
from orchestrator.train.data.steps import Feed
from orchestrator.train.group.world import World


class Augmented:
    """Samples with randomness from Python, numpy and torch."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])


def make_feed(data: Any, micro_batch: int = 4, loader_workers: int = 0, seed: int | None = 1) -> Feed:
    return open_feed(
        data,
        World.single_process(),
        global_batch=6,
        micro_batch=micro_batch,
        seed=seed,
        loader=LoaderOptions(loader_workers=loader_workers),
    )


def read_two_epochs(loader_workers: int, position: int) -> list[Any]:
    """Return the batches of two epochs, each from a sample on."""
    feed = make_feed(Augmented(), loader_workers=loader_workers)
    steps = [step for epoch in (0, 1) for step in feed.steps(epoch, position)]
    return [micro_batch.fetch() for step in steps for micro_batch in step.micro_batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_in_any_process_and_from_any_step(workers: int) -> None:
    expected = read_two_epochs(0, 0)
    batches = read_two_epochs(workers, 0)
    assert [batch[0].tolist() for batch in batches] == [batch[0].tolist() for batch in expected]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(batches, expected, strict=True))
    per_epoch = len(expected) // 2
    late = read_two_epochs(workers, 12)
    assert torch.equal(late[0][1], expected[4][1])
    assert len(late) == 2 * (per_epoch - 4)
    assert not torch.equal(expected[0][1], expected[per_epoch][1]), "each epoch has its own randomness"


def test_an_error_of_the_data_set_is_the_users() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise FileNotFoundError("image 7 is gone")

    with pytest.raises(TaskFailed, match="image 7 is gone"):
        next(make_feed(Broken()).steps(0))


class OneIsGone(Augmented):
    """Samples of which one cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise FileNotFoundError("gone")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_sample_and_its_purpose(workers: int) -> None:
    feed = make_feed(OneIsGone(), loader_workers=workers)
    with closing(feed), pytest.raises(TaskFailed) as caught:
        list(feed.steps(0))
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["FileNotFoundError: gone", "  while reading sample 7 for the training"]
    assert lines[-1].strip() == 'raise FileNotFoundError("gone")', "the last frame is the user's"


def test_an_error_of_an_evaluation_says_so() -> None:
    feed = make_feed(OneIsGone(), seed=None)
    with pytest.raises(TaskFailed, match="reading sample 7 for an evaluation"):
        list(feed.steps(0))


def test_an_error_of_a_first_batch_names_no_evaluation() -> None:
    class AllAreGone(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise FileNotFoundError("gone")

    with pytest.raises(TaskFailed, match="reading sample 0 for a first batch of the training data"):
        first_samples(AllAreGone(), 2)


def test_a_dict_of_tensors_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"is a dict with the keys 'x', 'y', which is not .*TensorData\(x, y\)"
    ):
        make_feed({"x": torch.ones(8, 2), "y": torch.ones(8)})


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_different_sizes_are_refused_with_a_remedy(workers: int) -> None:
    feed = make_feed([torch.ones(1 + index) for index in range(8)], loader_workers=workers)
    with closing(feed), pytest.raises(UserError, match=r"^the samples .*Pad .*collate\(samples\)"):
        next(feed.steps(0))


def test_items_may_be_dicts() -> None:
    samples = [{"x": torch.ones(2), "y": index} for index in range(8)]
    for data in (samples, dict(enumerate(samples))):
        batch = next(make_feed(data, seed=None).steps(0)).micro_batches[0].fetch()
        assert batch["y"].tolist() == [0, 1, 2, 3]


def test_loading_preserves_the_random_state_of_the_training_process() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    next(make_feed(Augmented()).steps(0))
    assert random.random() == expected


@pytest.mark.extended
def test_closing_a_feed_ends_its_processes() -> None:
    others = {child.pid for child in multiprocessing.active_children()}
    feed = make_feed(Augmented(), micro_batch=6, loader_workers=2)
    next(feed.steps(0))
    loaders = {child.pid for child in multiprocessing.active_children()} - others
    assert len(loaders) == 2
    feed.close()
    assert not {child.pid for child in multiprocessing.active_children()} & loaders
