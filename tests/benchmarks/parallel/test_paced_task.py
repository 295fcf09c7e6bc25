"""The task of ``segments`` records the steps of a loop, and the benchmark reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parallel import paced_task, segments
from benchmarks.parallel.paced_task import Paced
from orchestrator.config.settings import Config
from orchestrator.record.files.log import SilentLog
from orchestrator.train.group.world import World
from orchestrator.train.loop.loop import Loop
from orchestrator.train.worker.build import WorkerContext, build_training
from orchestrator.trainer import Trainer


def test_each_segment_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_train_step", "run_steps"):  # restored at the end
        monkeypatch.setattr(Loop, name, getattr(Loop, name))
    monkeypatch.setattr(segments, "_SETTLING_S", -1.0)  # no step is left out
    config = Config.of(run_dir=tmp_path, max_steps=6, batch_size=32, gpu_mode="cpu", trackers=())
    paced_task.record_steps(tmp_path)
    prepared = Trainer(task=Paced(config), config=config, quiet=True).prepare()
    training = build_training(WorkerContext(prepared, World.single_process(), tmp_path, SilentLog()))
    loop = Loop(training)
    for _ in range(2):
        loop.run_steps(2)
    loop.close()
    training.close()
    (file,) = tmp_path.glob("steps-*.jsonl")
    gaps = segments.gaps(file)
    assert [gap.ends_segment for gap in gaps] == [False, True, False]
    assert all(gap.seconds >= 0 for gap in gaps)
    assert 0 <= segments.lost_between_segments(gaps) < 1
