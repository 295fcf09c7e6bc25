"""Memory and power of a GPU among the metrics of a run.

Run with ``make gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.config.settings import Config
from orchestrator.record.events import read_events
from orchestrator.record.live.exposition import exposition
from orchestrator.record.live.state import RunState
from orchestrator.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_memory_and_power_of_the_gpu_are_exported(tmp_path: Path) -> None:
    config = Config.of(
        task="synthetic", max_steps=6, gpu_log_interval=2, trackers=(), run_dir=tmp_path / "run"
    )
    Trainer(config=config, quiet=True).fit()
    state = RunState()
    for event in read_events(tmp_path / "run" / "events.jsonl"):
        state(event)
    families = text_string_to_metric_families(exposition(state, "run"))
    figures = {
        sample.name.removeprefix("orchestrator_gpu_"): sample.value
        for family in families
        for sample in family.samples
        if "gpu" in sample.labels
    }
    assert figures["memory_size_bytes"] > figures["memory_used_bytes"] > torch.cuda.max_memory_allocated()
    assert figures["power_watts"] > 1
    assert 0 <= figures["utilization_ratio"] <= 1
