"""Workers whose data ends at different samples end with a message instead of waiting for each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from harness.hosts.ranks import run_ranks
from orchestrator import Config, Trainer
from orchestrator.errors import UserError
from orchestrator.record.files.log import SilentLog
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world
from orchestrator.train.loop.loop import Loop
from orchestrator.train.worker.build import WorkerContext, build_training

CPU = torch.device("cpu")


class Rows(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return ((torch.full((4,), float(number)), number % 3) for number in range(self.count))


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def error_on_rank(
    rank: int, size: int, store: str, run_dir: Path, training: list[int], validation: list[int]
) -> str:
    """Train on data whose length depends on the rank. Return the error, if there is one."""
    config = Config.of(
        run_dir=run_dir, epochs=2, global_batch_size=16, parallel_strategy="data_parallel", workers=size
    )
    data = Rows(training[rank])
    trainer = Trainer(
        nn.Linear(4, 3), data=data, loss=cross_entropy, validation=Rows(validation[rank]), config=config
    )
    prepared = trainer.prepare()
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 30) as world:
        built = build_training(WorkerContext(prepared, world, run_dir, SilentLog()))
        try:
            Loop(built).run()
        except UserError as error:
            return str(error)
        finally:
            built.close()
    return ""


EQUAL = [40, 40, 40]


@pytest.mark.extended(but_first=2)
@pytest.mark.parametrize(
    ("training", "validation", "found"),
    [
        # One worker has whole steps more.
        ([70, 70, 102], EQUAL, ["the next step has 6", "the next step has 6", "the next step has 16"]),
        # One worker ends where the last step of the others begins.
        ([64, 70, 70], EQUAL, ["the epoch ends", "the next step has 6", "the next step has 6"]),
        # The data is shorter than a step.
        ([9, 8, 9], EQUAL, ["its first step has 9", "its first step has 8", "its first step has 9"]),
        (EQUAL, [200, 201, 200], ["an evaluation has 200", "an evaluation has 201", "an evaluation has 200"]),
    ],
)
def test_workers_whose_data_ends_at_different_samples_are_told(
    tmp_path: Path, training: list[int], validation: list[int], found: list[str]
) -> None:
    errors = run_ranks(error_on_rank, 3, tmp_path / "run", training, validation)
    for rank, error in enumerate(errors):
        assert error.startswith("the data has different lengths on the workers: " + found[rank])
        assert f"on worker {rank}, unlike on others" in error


def test_equal_lengths_are_not_refused(tmp_path: Path) -> None:
    assert run_ranks(error_on_rank, 3, tmp_path / "run", [70] * 3, EQUAL) == [""] * 3
