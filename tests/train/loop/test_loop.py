"""The loop: segments, hooks, the record of its steps, and what ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experts.tokens.received_rows import InvalidRows, RowCheck
from harness.runs.loop_runs import StepCounter, build_small_training, losses_in, run_loop
from orchestrator.checkpoint.progress import Progress
from orchestrator.errors import TrainingFailed
from orchestrator.record.events.kinds import HostSample
from orchestrator.record.files.event_log import EventLog
from orchestrator.record.files.reading import of_kind, read_events
from orchestrator.record.machine.monitor import Sample
from orchestrator.tasks.task import Task, TensorData
from orchestrator.train.group.heartbeat import Heartbeat, Phase
from orchestrator.train.group.requests import Requests
from orchestrator.train.loop import loop as loop_module
from orchestrator.train.loop.loop import Loop
from orchestrator.train.loop.training import LoopHooks


class PhaseRecorder(Heartbeat):
    """A heartbeat that keeps all phases."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[Phase] = []
        self.beats: list[Phase] = []

    def beat(self) -> None:
        super().beat()
        self.beats.append(self.phase)

    def enter_phase(self, phase: Phase, step: int | None = None) -> None:
        super().enter_phase(phase, step)
        self.phases.append(phase)


@pytest.mark.extended
def test_segments_train_the_same_steps_as_one_run(tmp_path: Path) -> None:
    """A segment continues where the one before ended.

    Its end writes nothing: events are written every ``log_every`` steps, after the first step and
    at the end of the warm-up."""
    whole, losses = run_loop(tmp_path / "whole", max_steps=95)
    run_dir = tmp_path / "segments"
    run_dir.mkdir()
    log = EventLog(run_dir / "events.jsonl")
    loop = Loop(build_small_training(run_dir, log, max_steps=95, log_every=50))
    assert loop.run_steps(7) is None
    assert losses_in(run_dir) == losses[:3]
    assert loop.run_steps(46) is None
    assert losses_in(run_dir) == losses[:53]
    outcome = loop.run_steps(1000)
    log.close()
    assert outcome is not None
    assert outcome.status == "completed"
    assert losses_in(run_dir) == losses
    assert loop.progress.epoch_loss == whole.progress.epoch_loss


def test_a_request_to_stop_ends_the_run_after_the_step_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    steps: list[int] = []
    hooks = LoopHooks(take_requests=lambda: Requests(len(steps) >= 3), after_step=steps.append)
    run_loop(tmp_path, hooks=hooks)
    assert steps == [1, 2, 3]
    (checkpoint,) = of_kind(read_events(tmp_path / "events.jsonl"), "checkpoint")
    assert checkpoint["step"] == 3


def test_the_monitor_is_read_at_its_interval(tmp_path: Path) -> None:
    hooks = LoopHooks(monitor=lambda: Sample(0.0, HostSample(cpu_percent=1.5)))
    run_loop(tmp_path, hooks=hooks, max_steps=7, gpu_log_interval=3, monitor_gpu=True)
    readings = of_kind(read_events(tmp_path / "events.jsonl"), "monitor")
    assert [(event["step"], event["host"]["cpu_percent"]) for event in readings] == [
        (3, 1.5),
        (6, 1.5),
    ]


def test_cached_memory_is_freed_at_its_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[torch.device] = []
    monkeypatch.setattr(loop_module, "free_cached", freed.append)
    run_loop(tmp_path / "never", max_steps=7)
    assert freed == []
    run_loop(tmp_path / "often", max_steps=7, empty_cache_every=3)
    assert freed == [torch.device("cpu")] * 2


def test_the_heartbeat_follows_the_phases(tmp_path: Path) -> None:
    heartbeat = PhaseRecorder()
    run_loop(tmp_path, heartbeat=heartbeat, max_steps=2, evaluate_every=2, checkpoint_every=2)
    fetch_micro_batch = ["data", "first step"]
    write_events = ["save", "first step"]
    begin_step = ["data", "first step"]
    assert heartbeat.phases[:6] == [*begin_step, *fetch_micro_batch, *write_events]
    after_evaluation = heartbeat.phases[heartbeat.phases.index("evaluate") :]
    assert after_evaluation[1] == "save", "the checkpoint"
    assert heartbeat.step == 1, "the step in progress, counted from 0"


def test_each_micro_batch_and_each_batch_of_an_evaluation_is_progress(tmp_path: Path) -> None:
    heartbeat = PhaseRecorder()
    training: dict[str, Any] = {"batch_size": 4, "global_batch_size": 64, "eval_batch_size": 40}
    run_loop(tmp_path, heartbeat=heartbeat, max_steps=1, evaluate_every=1, **training)
    before_events = heartbeat.phases[: heartbeat.phases.index("save")]
    assert before_events.count("first step") == 1 + 16, "entered again after each micro-batch's data"
    # 359 samples of the digits are for validation.
    assert heartbeat.beats.count("evaluate") == 9


def test_the_first_steps_of_a_process_are_marked_as_warm_up(tmp_path: Path) -> None:
    run_loop(tmp_path, max_steps=5)
    run_loop(tmp_path, max_steps=10, resume="auto")
    steps = of_kind(read_events(tmp_path / "events.jsonl"), "step")
    marked = [event["step"] for event in steps if event.get("warm_up")]
    assert marked == [1, 2, 3, 6, 7, 8]


def test_a_process_records_its_first_step_at_once(tmp_path: Path) -> None:
    """The driver times a restart by that event."""
    run_loop(tmp_path, max_steps=5, log_every=50)
    run_loop(tmp_path, max_steps=10, log_every=50, resume="auto")
    phases = of_kind(read_events(tmp_path / "events.jsonl"), "phases")
    assert [event["step"] for event in phases] == [1, 3, 5, 6, 8, 10], "one event for each flush"


class Diverging(Task):
    """A task whose loss is infinite from a given step on."""

    def __init__(self, step: int) -> None:
        self._step = step

    def build_model(self) -> nn.Module:
        return StepCounter()

    def train_data(self) -> TensorData:
        return TensorData(torch.ones(64, 1))

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        assert isinstance(model, StepCounter)
        output = model(batch[0]).mean()
        return output * float("inf") if int(model.count) >= self._step else output


def test_a_diverged_run_is_recorded_and_not_saved(tmp_path: Path) -> None:
    settings = {
        "experts": None,
        "expert_hidden_size": (),
        "batch_size": 4,
        "checkpoint_every": 2,
    }
    log = EventLog(tmp_path / "events.jsonl")
    training = build_small_training(tmp_path, log, Diverging(step=4), **settings)
    with pytest.raises(TrainingFailed, match=r"step 4: loss inf.* diverged"):
        Loop(training).run()
    training.close()
    log.close()
    assert float(losses_in(tmp_path)[-1]) == float("inf")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]


def test_steps_with_wrong_rows_from_another_host_are_neither_recorded_nor_saved(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    training = build_small_training(tmp_path, log, max_steps=10)
    ids_GK = torch.tensor([[0], [9]])
    wrong_rows = RowCheck.start("blocks.0", ids_GK, torch.tensor([[0], [-1]]), (1, 1), 2)
    context = training.stepper.strategy.context
    hooks = LoopHooks(after_step=lambda step: context.row_checks.append(wrong_rows) if step == 4 else None)
    with pytest.raises(InvalidRows, match=r"layer blocks.0: .* from host 1"):
        Loop(training, hooks).run()
    log.close()
    events = read_events(tmp_path / "events.jsonl")
    assert [event["step"] for event in of_kind(events, "step")] == [1, 2, 3, 4]
    assert not of_kind(events, "checkpoint")


def test_statistics_of_the_experts_are_added_up_before_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    settings: dict[str, Any] = {"evolution": "bold", "max_steps": 2, "checkpoint_every": 1}
    loop = Loop(build_small_training(tmp_path, log, **settings))
    calls: list[str] = []
    save = loop._checkpoints.save

    def save_after(progress: Progress) -> None:
        calls.append("save")
        save(progress)

    monkeypatch.setattr(loop._evolution, "flush", lambda: calls.append("flush"))
    monkeypatch.setattr(loop._checkpoints, "save", save_after)
    loop.run()
    log.close()
    assert calls == ["flush", "save"] * 3, "of both steps, and at the end"
