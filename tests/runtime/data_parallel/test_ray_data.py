"""Ray Data sets on workers: the losses of one process, on another number of workers after each resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from harness.hosts.cluster import RayCluster
from harness.hosts.ranks import run_ranks
from harness.runs.cli_runs import enter_folder
from harness.runs.records import by_step
from orchestrator import Config, Trainer
from orchestrator.record.files.reading import read_events

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
ROWS = 70


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (as_row({"id": number}) for number in range(ROWS))


def as_row(row: dict[str, int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(row["id"])
    return {"x": torch.randn(4, generator=generator).numpy(), "y": row["id"] % 3}


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def train(data: Any, run_dir: str, **given: Any) -> None:
    torch.manual_seed(0)
    config = Config.of(
        run_dir=run_dir, epochs=2, global_batch_size=16, schedule="constant", warmup_steps=0, resume="auto",
        checkpoint_every=1, trackers=(), monitor_gpu=False, shuffle_buffer=24, **given,
    )  # fmt: skip
    Trainer(nn.Linear(4, 3), data=data, loss=cross_entropy, config=config).fit()


def train_on_workers(
    _rank: int, _size: int, _store: str, folder: str, environment: dict[str, str], materialize: bool
) -> str:
    # Here, because most tests need no Ray and its import takes a second.
    import ray

    from orchestrator.runtime.ray_internals import reload_auth_mode

    log = enter_folder(folder, environment)
    reload_auth_mode()
    ray.init(log_to_driver=False)
    data: Any = ray.data.range(ROWS, override_num_blocks=5).map(as_row)
    if materialize:
        # Its blocks stay in the order in which they were computed.
        data.context.execution_options.preserve_order = True
        data = data.materialize()
    for workers, steps in ((1, 3), (3, 6), (2, 100)):
        train(data, "run", workers=workers, max_steps=steps)
    return log.read_text(encoding="utf-8", errors="replace")


def losses_of(run_dir: Path) -> list[float]:
    return [event["loss"] for event in by_step(read_events(run_dir / "events.jsonl"))]


@pytest.mark.extended
@pytest.mark.parametrize("materialize", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_three_and_two_workers_see_what_one_process_sees(
    shared_cluster: RayCluster, tmp_path: Path, materialize: bool
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    changed = {key: text for key, text in shared_cluster.environment.items() if os.environ.get(key) != text}
    environment = changed | {"RAY_ADDRESS": shared_cluster.address, "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
    run_ranks(train_on_workers, 1, str(folder), environment, materialize, timeout=800)
    train(Rows(), str(tmp_path / "alone"), max_steps=100)
    expected = losses_of(tmp_path / "alone")
    assert len(expected) == 10
    assert losses_of(folder / "run") == pytest.approx(expected, rel=1e-5)
