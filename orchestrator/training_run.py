"""A prepared training in its run folder, in this process or on workers: banner, steps, summary, report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from orchestrator.live.callbacks.callbacks import CallbackRunner
from orchestrator.live.metrics.endpoint import RunMetrics
from orchestrator.live.screen.screen import Screen
from orchestrator.plan.evolution import unused_thresholds
from orchestrator.plan.experts import unused_settings
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.record.events.kinds import Event
from orchestrator.record.files.event_log import DriverLog, Listener
from orchestrator.record.summary.summary import write_json
from orchestrator.result import Result
from orchestrator.types import counted

if TYPE_CHECKING:
    from torch import nn

    from orchestrator.config.settings import Config
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.run.run_settings import ResumedSettings
    from orchestrator.runtime.driver import StartAttempt
    from orchestrator.train.remote.run import RemoteRun


@dataclass(frozen=True)
class TrainingRun:
    """The observers of a training, and what it begins and ends with besides its plan."""

    screen: Screen
    callbacks: CallbackRunner
    metrics: RunMetrics | None
    """The figures that a metrics endpoint serves."""
    remote: RemoteRun | None
    """Uploads the run folder, if it is a copy of a remote one."""
    resumed: ResumedSettings | None
    """The settings of the folder of a run that continues."""
    model: nn.Module | None
    """The user's model, which gets the trained weights."""
    is_own_task: bool
    """Whether Python code gave the task, so that only Python code can continue the run."""

    def in_process(self, prepared: PreparedRun, run_dir: Path) -> Result:
        """Train in this process, to the end."""
        from orchestrator.train.group.requests import Requests
        from orchestrator.train.group.world import World
        from orchestrator.train.remote.run import mirroring
        from orchestrator.train.worker.final_model import final_model
        from orchestrator.train.worker.observers import open_event_log, stop_on_signal, with_requests_of
        from orchestrator.train.worker.run import Supervision, count_starts, record_failure, run_worker
        from orchestrator.train.worker.torch_settings import preserved_random_state

        start_s = perf_counter()
        config = prepared.resolved.config
        starts_before = count_starts(run_dir)
        world = World.single_process(prepared.plan.device.value)
        with (
            preserved_random_state(),
            open_event_log(config, run_dir, self.screen, self.callbacks, self._listeners(run_dir)) as log,
            stop_on_signal() as stop_requested,
            mirroring(self.remote, log, config.checkpoint.keep),
        ):
            self._show_banner(prepared, run_dir)
            take_requests = with_requests_of(self.callbacks, lambda: Requests(stop_requested()))
            supervision = Supervision(take_requests, callbacks=self.callbacks)
            try:
                outcome, model = run_worker(prepared, world, run_dir, log, supervision)
                model = final_model(prepared, run_dir, log, start_s, model, log.held)
                self.callbacks.check()
            except BaseException as error:
                record_failure(run_dir, error, perf_counter() - start_s, starts_before, log)
                self._show_failure(config, run_dir, starts_before)
                raise
        return self._finish(outcome.status, run_dir, model, log.held)

    def on_workers(self, prepared: PreparedRun, cluster: Cluster, run_dir: Path, start_s: float) -> Result:
        """Train on the workers of a cluster, to the end. ``start_s`` is when the run was asked for."""
        from orchestrator.runtime.driver import Observers, drive
        from orchestrator.train.worker.final_model import final_model
        from orchestrator.train.worker.run import count_starts

        starts_before = count_starts(run_dir)
        self._show_banner(prepared, run_dir)
        observers = Observers(self.screen, self.callbacks, self.remote, self._listeners(run_dir))
        try:
            status = drive(attempt_starter(prepared), prepared, cluster, run_dir, observers)
        except Exception:
            self._show_failure(prepared.resolved.config, run_dir, starts_before)
            raise
        with closing(DriverLog(run_dir / "events.jsonl", secrets=secret_values())) as log:
            model = final_model(prepared, run_dir, log, start_s)
        return self._finish(status, run_dir, model, log.held)

    def _listeners(self, run_dir: Path) -> list[Listener]:
        """Return the readers of the events that the run's settings ask for."""
        if self.metrics is None:
            return []
        self.metrics.run_name = run_dir.name
        return [self.metrics]

    def _show_banner(self, prepared: PreparedRun, run_dir: Path) -> None:
        from orchestrator.run.prepared_run import banner_rows, loss_note
        from orchestrator.run.run_dir import remote_of
        from orchestrator.run.run_settings import resume_lines
        from orchestrator.train.worker.resume import experts_to_show

        config = prepared.resolved.config
        saved = experts_to_show(config, run_dir)
        self.screen.banner(banner_rows(prepared, run_dir, remote_of(run_dir), saved), "expert-orchestrator")
        plan = prepared.plan
        for line in resume_lines(self.resumed, prepared.changes, config.checkpoint.resume):
            self.screen.note(line)
        unused = unused_settings(config, plan.strategy_facts, prepared.facts)
        thresholds = unused_thresholds(config, plan.evolution.value)
        for message in (unused, thresholds, loss_note(prepared.facts)):
            if message:
                self.screen.note(f"note: {message}")

    def _show_failure(self, config: Config, run_dir: Path, starts_before: int) -> None:
        """Show how a run that has failed can be continued, if it has begun and left a checkpoint."""
        from orchestrator.run.run_dir import after_failure
        from orchestrator.train.worker.run import count_starts

        # An error in here must not hide the failure itself.
        with suppress(Exception):
            if count_starts(run_dir) > starts_before:
                line = after_failure(config, run_dir)
                if line is not None:
                    self.screen.note(line)

    def _finish(self, status: str, run_dir: Path, model: nn.Module, held: Sequence[Event]) -> Result:
        """Write summary and report, and return the result. ``held`` are events that could not be written."""
        from orchestrator.report.run.page import draw_report
        from orchestrator.run.run_dir import read_summary, resume_call, summary_lines
        from orchestrator.train.worker.final_model import copy_model

        summary = read_summary(run_dir, held)
        if self.model is not None:
            copy_model(model, self.model, summary["final"]["step"])
        problems = [f"the last {counted(len(held), 'event')} of events.jsonl"] if held else []
        for what, write in (
            ("summary.json", lambda: write_json(run_dir / "summary.json", summary)),
            ("the report", lambda: draw_report(run_dir, self.screen.note, at_end=True)),
        ):
            try:
                write()
            except OSError as error:
                problems.append(f"{what} ({error.strerror or error})")
        for line in summary_lines(summary, run_dir):
            self.screen.note(line)
        not_written = ""
        if problems:
            not_written = (
                f"could not be written to {run_dir}: {', '.join(problems)}; make room there, then draw the "
                f"report again with: orchestrator report {shlex.quote(str(run_dir))}"
            )
            self.screen.note(f"warning: {not_written}")
        if status == "stopped" and self.is_own_task:
            self.screen.note(f"continue with: {resume_call(run_dir)}")
        return Result(status, run_dir, summary, model, not_written)


def attempt_starter(prepared: PreparedRun) -> StartAttempt:
    """Return the function that starts the workers of the plan's strategy, and lets them be watched."""
    if prepared.plan.strategy_facts.replaces_workers:
        from orchestrator.runtime.expert_parallel.run import ExpertParallelRun

        return ExpertParallelRun
    from orchestrator.runtime.data_parallel.fit import start_attempt

    return start_attempt
