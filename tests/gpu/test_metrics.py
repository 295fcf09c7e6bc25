"""Memory and power of a GPU, read by the monitor and among the metrics of a run.

Run with ``make gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from harness.runs.records import made
from orchestrator.config.settings import Config
from orchestrator.live.metrics.metrics import exposition
from orchestrator.record.files.reading import read_events
from orchestrator.record.live.state import RunState
from orchestrator.record.machine.monitor import Monitor
from orchestrator.trainer import Trainer

pytestmark = pytest.mark.gpu


def test_memory_and_power_of_the_gpu_are_exported(tmp_path: Path) -> None:
    config = Config.of(
        task="synthetic", max_steps=6, gpu_log_interval=2, trackers=(), run_dir=tmp_path / "run"
    )
    Trainer(config=config, quiet=True).fit()
    state = RunState()
    for event in read_events(tmp_path / "run" / "events.jsonl"):
        state(made(event))
    families = text_string_to_metric_families(exposition(state, "run").decode())
    figures = {
        sample.name.removeprefix("orchestrator_gpu_"): sample.value
        for family in families
        for sample in family.samples
        if "gpu" in sample.labels
    }
    assert figures["memory_size_bytes"] > figures["memory_used_bytes"] > torch.cuda.max_memory_allocated()
    assert figures["power_watts"] > 1
    assert 0 <= figures["utilization_ratio"] <= 1


def test_a_real_gpu() -> None:
    import pynvml

    pynvml.nvmlInit()
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    monitor = Monitor(gpu_indices=(0, uuid))
    by_index, by_uuid = monitor.record().devices
    assert monitor.info()["gpu_error"] is None
    assert by_index.index == by_uuid.index == 0
    assert by_index.name == by_uuid.name
    for name in ("memory_used", "memory_total", "utilization", "memory_utilization", "temperature", "power"):
        assert getattr(by_index, name) is not None, name
