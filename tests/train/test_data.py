"""The order of samples is a function of seed and epoch; each is seen once; any step can be begun at."""

from __future__ import annotations

import multiprocessing
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from orchestrator.errors import TaskFailed, UserError
from orchestrator.tasks.task import TensorData, WindowData
from orchestrator.train.batches import slice_batch, to_device
from orchestrator.train.data import Feed
from orchestrator.train.loading import LoaderOptions
from orchestrator.train.parts.world import World


def feed(samples: int, whole: int, micro: int, world: World | None = None, seed: int | None = 0) -> Feed:
    data = TensorData(torch.arange(samples))
    return Feed(
        data,
        world or World.single_process(),
        global_batch=whole,
        micro_batch=micro,
        seed=seed,
        loader=LoaderOptions(),
    )


def seen(steps: Any) -> list[list[int]]:
    return [
        [int(v) for micro in step.micro_batches if micro.num_samples for v in micro.fetch()[0]]
        for step in steps
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 40), st.integers(1, 17), st.integers(1, 4), st.integers(0, 3))
def test_each_sample_once_and_steps_do_not_depend_on_the_cut(
    samples: int, whole: int, micro: int, workers: int, epoch: int
) -> None:
    one = seen(feed(samples, whole, whole).steps(epoch))
    assert sorted(v for step in one for v in step) == list(range(samples))
    ranks = [
        seen(feed(samples, whole, micro, World(r, workers, torch.device("cpu"))).steps(epoch))
        for r in range(workers)
    ]
    for number, step in enumerate(one):
        assert sorted(v for rank in ranks for v in rank[number]) == sorted(step)


def test_order_depends_on_seed_and_epoch() -> None:
    orders = [feed(50, 10, 10, seed=seed).order(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == feed(50, 7, 3).order(0).tolist()
    assert feed(5, 2, 2, seed=None).order(3).tolist() == [0, 1, 2, 3, 4]


@given(st.integers(0, 20), st.integers(0, 200))
@settings(max_examples=30, deadline=None)
def test_any_step_can_be_begun_at(first: int, samples: int) -> None:
    one = feed(max(1, samples), 10, 4)
    whole = min(10, max(1, samples))
    assert seen(one.steps(2, first * whole)) == seen(one.steps(2))[first:]


def test_another_batch_size_goes_on_where_the_first_left_off() -> None:
    begun = [v for step in seen(feed(50, 8, 8).steps(1))[:3] for v in step]
    rest = [v for step in seen(feed(50, 7, 3).steps(1, len(begun))) for v in step]
    assert sorted(begun + rest) == list(range(50))


@given(st.integers(0, 100), st.integers(1, 9))
def test_shares_are_even_and_whole(count: int, size: int) -> None:
    parts = World(0, size, torch.device("cpu")).split_batch(count)
    lengths = [part.stop - part.start for part in parts]
    assert sum(lengths) == count
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 200), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6))
def test_shares_by_speed_are_whole_and_in_proportion(count: int, shares: list[float]) -> None:
    world = World(0, len(shares), torch.device("cpu")).with_shares(shares)
    lengths = [part.stop - part.start for part in world.split_batch(count)]
    assert sum(lengths) == count
    assert all(
        abs(length - count * share / sum(shares)) <= 1.0 + 1e-9
        for length, share in zip(lengths, shares, strict=True)
    )


class Augmented:
    """Reads sample by sample, with randomness of all three kinds."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_of_samples_is_the_same_in_any_process_and_from_any_step(workers: int) -> None:
    def read(count: int, first: int) -> list[Any]:
        made = Feed(
            Augmented(),
            World.single_process(),
            global_batch=6,
            micro_batch=4,
            seed=1,
            loader=LoaderOptions(loader_workers=count),
        )
        return [
            micro.fetch()
            for epoch in (0, 1)
            for step in made.steps(epoch, first)
            for micro in step.micro_batches
        ]

    plain, other = read(0, 0), read(workers, 0)
    assert [b[0].tolist() for b in plain] == [b[0].tolist() for b in other]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(plain, other, strict=True))
    per_epoch = len(plain) // 2
    late = read(workers, 12)
    assert torch.equal(late[0][1], plain[4][1])
    assert len(late) == 2 * (per_epoch - 4)
    assert not torch.equal(plain[0][1], plain[per_epoch][1])


def test_an_error_in_the_data_set_is_the_users() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise FileNotFoundError("image 7 is gone")

    made = Feed(
        Broken(), World.single_process(), global_batch=6, micro_batch=4, seed=1, loader=LoaderOptions()
    )
    with pytest.raises(TaskFailed, match="image 7 is gone"):
        next(made.steps(0))


def test_what_may_be_data() -> None:
    for data in (
        torch.zeros(4, 2),
        (torch.zeros(4), torch.ones(4)),
        TensorDataset(torch.zeros(4)),
        [1, 2, 3, 4],
    ):
        assert (
            Feed(
                data, World.single_process(), global_batch=2, micro_batch=2, seed=0, loader=LoaderOptions()
            ).steps_per_epoch
            == 2
        )
    with pytest.raises(UserError, match="generator"):
        Feed(
            (x for x in range(3)),
            World.single_process(),
            global_batch=2,
            micro_batch=2,
            seed=0,
            loader=LoaderOptions(),
        )
    with pytest.raises(UserError, match="empty"):
        Feed([], World.single_process(), global_batch=2, micro_batch=2, seed=0, loader=LoaderOptions())


def test_windows_cover_the_text_once() -> None:
    data = WindowData(torch.arange(101, dtype=torch.uint8), 10)
    batch = data.gather(torch.arange(len(data)))
    assert batch.shape == (10, 11)
    assert batch[:, 1:].flatten().tolist() == list(range(1, 101))
    with pytest.raises(ValueError, match="no window"):
        WindowData(torch.zeros(5), 10)


def test_loading_leaves_the_training_process_its_own_randomness() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    made = Feed(
        Augmented(), World.single_process(), global_batch=6, micro_batch=4, seed=1, loader=LoaderOptions()
    )
    next(made.steps(0))
    assert random.random() == expected


def test_closing_a_feed_ends_its_processes() -> None:
    others = {child.pid for child in multiprocessing.active_children()}
    made = Feed(
        Augmented(),
        World.single_process(),
        global_batch=6,
        micro_batch=6,
        seed=1,
        loader=LoaderOptions(loader_workers=2),
    )
    next(made.steps(0))
    own = {child.pid for child in multiprocessing.active_children()} - others
    assert len(own) == 2
    made.close()
    assert not {child.pid for child in multiprocessing.active_children()} & own


def test_lists_of_samples_are_cut_and_lists_of_fields_too() -> None:
    images, targets = [torch.zeros(3, n) for n in (4, 5, 6, 7)], [{"n": n} for n in range(4)]
    part = slice_batch((images, targets), 2, 4, 4)
    assert [image.shape[1] for image in part[0]] == [6, 7]
    assert [target["n"] for target in part[1]] == [2, 3]
    fields = slice_batch([torch.arange(4), torch.arange(8).view(4, 2)], 1, 3, 4)
    assert [field.shape[0] for field in fields] == [2, 2]


def test_cutting_a_nested_batch() -> None:
    batch = {
        "x": torch.arange(6),
        "names": list("abcdef"),
        "pair": (torch.arange(12).view(6, 2), torch.tensor(3.0)),
        "k": 7,
    }
    part = slice_batch(batch, 2, 5, 6)
    assert part["x"].tolist() == [2, 3, 4]
    assert part["names"] == ["c", "d", "e"]
    assert part["pair"][0].shape == (3, 2)
    assert part["pair"][1] == 3.0
    assert part["k"] == 7
    assert to_device(part, torch.device("cpu"), pin=False)["names"] == ["c", "d", "e"]
