"""Streams on expert hosts: samples that cannot be loaded, and lengths that differ, make no host wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.hosts.ranks import run_ranks
from harness.runs.loop_runs import losses_in
from harness.runs.streamed_task import write_digits
from orchestrator.config.settings import Config
from orchestrator.data.json_lines import JsonLines
from orchestrator.errors import UserError
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.log import Log, SilentLog
from orchestrator.tasks.digits import Digits
from orchestrator.train.group.stores import file_store
from orchestrator.train.group.world import process_group_world
from orchestrator.train.worker.run import Supervision, run_worker
from orchestrator.trainer import Trainer

CPU = torch.device("cpu")
ROWS = 70
GLOBAL_BATCH = 16
SETTINGS: dict[str, Any] = {
    "experts": 7,
    "expert_hidden_size": (4, 8, 4, 12, 8, 4, 4),
    "width": 8,
    "layers": 2,
    "evolution": "off",
    "global_batch_size": GLOBAL_BATCH,
    "learning_rate": 1e-3,
    "epochs": 2,
    "schedule": "constant",
    "warmup_steps": 0,
    "skip_bad": True,
    "log_every": 1,
}


class StreamedRows(Digits):
    """The digits of a JSONL file; the rows whose numbers are in ``bad`` cannot be loaded."""

    def __init__(self, config: Config, file: Path, bad: Sequence[int], num_validation: int = ROWS) -> None:
        super().__init__(config)
        self.file = file
        self.bad = set(bad)
        self.num_validation = num_validation

    def train_data(self) -> Any:
        return JsonLines(self.file, transform=self._as_sample)

    def validation_data(self) -> Any:
        return JsonLines(self.file.parent / f"{self.num_validation}.jsonl", transform=self._as_sample)

    def _as_sample(self, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
        if row["id"] in self.bad:
            raise KeyError("no label")
        return torch.tensor(row["image"]), row["label"]


def train_on_host(
    rank: int, size: int, store: str, folder: Path, bad: Sequence[int], settings: dict[str, Any]
) -> tuple[list[float], str]:
    """Train on a host. Return its losses, if it is the main one, and the error, if there is one.

    The validation data of the last host has as many rows as ``settings`` say."""
    settings = dict(settings)
    last_validation = settings.pop("last_validation", ROWS)
    run_dir = folder / f"{size} workers"
    run_dir.mkdir(exist_ok=True)
    parallel = {"workers": size, "parallel_strategy": "expert_parallel" if size > 1 else "auto"}
    config = Config.of(**SETTINGS | parallel | settings | {"run_dir": run_dir})
    num_validation = last_validation if rank == size - 1 else ROWS
    task = StreamedRows(config, folder / f"{ROWS}.jsonl", bad, num_validation)
    prepared = Trainer(task=task, config=config, quiet=True).prepare()
    log: Log = EventLog(run_dir / "events.jsonl") if rank == 0 else SilentLog()
    with process_group_world(file_store(store, size), rank, size, CPU, "gloo", 30) as world:
        try:
            run_worker(prepared, world, run_dir, log, Supervision())
        except UserError as error:
            return [], str(error)
        finally:
            log.close()
    return (losses_in(run_dir) if rank == 0 else []), ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_digits(tmp_path / f"{ROWS}.jsonl", ROWS)
    return tmp_path


BAD_ROWS = {
    "the second step of the third host": [3, *range(27, 32), 64],
    "the first step": range(16),
}


SMALLER_PASSES: dict[str, dict[str, Any]] = {
    "hosts": {},
    "hosts in small passes": {"batch_size": 1},
    "workers in small passes": {"batch_size": 1, "parallel_strategy": "data_parallel"},
}


@pytest.mark.extended
@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("settings", SMALLER_PASSES.values(), ids=SMALLER_PASSES)
def test_workers_without_a_good_sample_have_the_losses_of_one_process(
    folder: Path, settings: dict[str, Any], bad: str
) -> None:
    """In one pass for each step, and in smaller ones, as after running out of memory."""
    ((expected, _),) = run_ranks(train_on_host, 1, folder, BAD_ROWS[bad], {})
    (found, error), *_ = run_ranks(train_on_host, 3, folder, BAD_ROWS[bad], settings)
    assert error == ""
    assert len(expected) == 10
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.extended
def test_hosts_whose_validation_data_has_different_lengths_are_told(folder: Path) -> None:
    write_digits(folder / "150.jsonl", 150)
    results = run_ranks(train_on_host, 3, folder, [], {"last_validation": 150})
    for rank, (_, error) in enumerate(results):
        assert error.startswith("the data has different lengths on the workers: "), f"rank {rank}"
