"""The banner at the start of a run."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.settings import Config
from orchestrator.run.prepared_run import banner_rows
from orchestrator.trainer import Trainer


def rows_of(**settings: object) -> dict[str, str]:
    small = {"task": "synthetic", "samples": 96, "width": 8, "layers": 1, "gpu_mode": "cpu"}
    prepared = Trainer(config=Config.of(**small, batch_size=4, **settings), quiet=True).prepare()
    return dict(banner_rows(prepared, Path("results/one")))


def test_the_banner_has_processes_strategy_device_precision_and_the_effective_batch() -> None:
    alone = rows_of(accumulation_steps=3)
    assert alone["processes"] == "1 (strategy: single device)"
    assert alone["device"].startswith("cpu: ")
    assert alone["precision"].startswith("fp32: ")
    assert alone["batch"] == "4 × 3 accumulation × 1 worker = 12"
    assert alone["folder"] == "results/one"
    workers = rows_of(accumulation_steps=3, workers=2)
    assert workers["processes"].startswith("2 (strategy: data_parallel, gloo): ")
    assert workers["batch"] == "4 × 3 accumulation × 2 workers = 24"
    hosts = rows_of(parallel_strategy="expert_parallel", workers=3, global_batch_size=20)
    assert hosts["processes"].startswith("3 (strategy: expert_parallel, gloo): ")
    assert hosts["batch"] == "4 × 2 accumulation × 3 workers at most, for 20"
