"""The training loop: fetch, forward, backward, reduce, step, record.

One loop serves every strategy. It knows neither Ray nor Tune; the code around it connects
through ``LoopHooks``. Forward, backward, reduce and the optimizer's step are in
``stepper.Stepper``; the record is in ``step_recorder``."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from orchestrator.errors import ResourceError
from orchestrator.live.callbacks.callback_values import ModelMoment
from orchestrator.record.events import kinds
from orchestrator.train.data.steps import StepBatch
from orchestrator.train.device.memory import free_cached, release_idle
from orchestrator.train.group.requests import Requests, RequestVotes
from orchestrator.train.loop.memory_watch import MemoryWatch, known_parts
from orchestrator.train.loop.step_recorder import PendingStep, StepRecorder
from orchestrator.train.loop.training import LoopHooks, Training
from orchestrator.train.loop.validation import Validation
from orchestrator.types import counted, first_line

_NAMED_FAULTS = 5  # of samples that were left out
_STEPS_AT_ONCE = 1_000_000  # of a run that is not divided into segments


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its status, and the reason in words."""

    status: str
    reason: str


class Loop:
    """One worker's training, from the training's ``progress`` to the end of the run."""

    def __init__(self, training: Training, hooks: LoopHooks | None = None) -> None:
        hooks = hooks or LoopHooks()
        self.stepper = training.stepper
        self.progress = training.progress
        self.memory = MemoryWatch(training.stepper.world, partial(known_parts, training))
        self._feed = training.feed
        self._cadence = training.cadence
        self._log = training.log
        self._checkpoints = training.checkpoints
        self._snapshots = training.snapshots
        self._evolution = training.evolution
        self._digests = training.digests
        self._last_digest = training.progress.step
        self._recorder = StepRecorder(training)
        self._validation = Validation(training)
        world = training.stepper.world
        self._votes = RequestVotes(world.device, world.size, hooks.take_requests)
        self._after_step = hooks.after_step
        self._show_model = hooks.show_model
        self._monitor = hooks.monitor
        self._heartbeat = training.heartbeat
        self._first_step = training.progress.step
        self._faults: list[str] = []
        self._last_saved = self._saved_content()
        self._steps_in_progress: Generator[None, None, Outcome] | None = None

    def run(self) -> Outcome:
        """Train to the end."""
        outcome = None
        while outcome is None:
            outcome = self.run_steps(_STEPS_AT_ONCE)
        return outcome

    def run_steps(self, num_steps: int, take_snapshot: bool = False) -> Outcome | None:
        """Train for a segment of ``num_steps``. Return the outcome if the run has ended, else None.

        The end of a run writes the events of all steps done and, unless it is a failure, leaves a
        checkpoint of the last step. A segment leaves a snapshot of its last step if
        ``take_snapshot``."""
        if self._steps_in_progress is None:
            # Not in the constructor: starting the observers takes time that belongs to no step.
            self._recorder.restart_window()
            if self._evolution is not None:
                self._evolution.start(self.progress)
            if self._digests is not None and self._digests.is_due_at_start(self.progress.step):
                self._digests.write(self.progress.step)
            self._steps_in_progress = self._steps()
        try:
            for _ in range(num_steps):
                next(self._steps_in_progress)
            # The steps are not written here: fetching their figures would stop the device.
            if take_snapshot:
                self._take_snapshot()
            self._heartbeat.enter_phase("rest")
            return None
        except StopIteration as end:
            outcome: Outcome = end.value
        except BaseException:
            # A second error, a full disk for one, must not hide the first.
            with suppress(Exception):
                self._recorder.flush()
                self._checkpoints.poll()
            raise
        self._recorder.flush()
        self._save_checkpoint()
        self.memory.end_run()
        self._finish_checkpoints()
        return outcome

    def set_snapshot_interval(self, steps: int) -> None:
        """Set the steps between two snapshots; 0 takes none. Call it on all hosts at the same step."""
        if self._snapshots is not None:
            self._snapshots.every = steps

    def close(self) -> None:
        """Drop the steps in progress, which hold the model. ``Training.close`` ends the parts."""
        # The checkpoint writer may still be at work: the driver allows a save more time.
        self._heartbeat.enter_phase("save")
        self._steps_in_progress = None

    def _steps(self) -> Generator[None, None, Outcome]:
        """Train step by step: yield after each step, return the outcome.

        A generator keeps its place in the data between two calls of ``run_steps``. An expert host
        trains in segments, and between segments the driver may move experts or change the number
        of hosts."""
        progress = self.progress
        outcome = self._outcome_at_start()
        if outcome is not None:
            return outcome
        while progress.epoch < self._cadence.epochs:
            self.memory.start_epoch()
            for batch in self._batches():
                # --max-steps may end the run inside an epoch.
                if self._at_last_step:
                    self._evaluate()
                    return Outcome("completed", f"{counted(progress.step, 'step')} done")
                votes = self._train_step(batch)
                self._change_experts()
                self._write_digests()
                self._let_look("step")
                if _is_due(self._cadence.evaluate_every, progress.step) and self._out_of_patience():
                    return self._stopped_early()
                if _is_due(self._cadence.checkpoint_every, progress.step):
                    self._save_checkpoint()
                self._snapshot_if_due()
                # Last, so that a stopped run is evaluated and saved like any other.
                outcome = self._follow(self._votes.agreed(votes))
                if outcome is not None:
                    return outcome
                yield
            self._end_epoch()
            if self._cadence.evaluate_every == 0 and self._out_of_patience():
                return self._stopped_early()
            outcome = self._follow(self._votes.agreed())
            if outcome is not None:
                return outcome
        self._evaluate()
        return Outcome("completed", f"{counted(self._cadence.epochs, 'epoch')} done")

    @property
    def _at_last_step(self) -> bool:
        total_steps = self._cadence.total_steps
        return total_steps is not None and self.progress.step >= total_steps

    def _follow(self, requests: Requests) -> Outcome | None:
        """Carry out what all workers were asked to do. Return the outcome if that ends the run."""
        if requests.save:
            self._save_checkpoint()
        if requests.interrupt:
            return Outcome("stopped", "interrupted")
        if requests.end is not None:
            self._evaluate()
            return Outcome("completed", requests.end)
        return None

    def _batches(self) -> Iterator[StepBatch]:
        """Fetch the batches of the current epoch.

        The wait for each counts as the data phase of its step."""
        batches = self._feed.steps(self.progress.epoch, self.progress.position, self.progress.place)
        while True:
            self.stepper.clock.begin()
            self._heartbeat.enter_phase("data")
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _train_step(self, batch: StepBatch) -> Tensor | None:
        """Do one optimizer step and record it. Return the votes of all workers on requests."""
        progress = self.progress
        # The first step may compile kernels and connect peers: the driver allows it more time.
        phase = "first step" if progress.step == self._first_step else "step"
        votes = self._votes.cast()  # looks at a file, which may take long
        self._heartbeat.enter_phase(phase, progress.step)
        lr = self.stepper.optimizer.learning_rate(progress.step)
        # Forward, backward, reduce and update. The sums stay on the device.
        totals = self.stepper.run(batch, progress.step, votes)
        seconds = self.stepper.clock.end()
        progress.step += 1
        progress.grid_exponent = self.stepper.strategy.grid_exponent
        progress.position += totals.samples
        progress.samples += totals.samples
        progress.place = self._feed.place(progress.position)
        self._faults += batch.faults
        self._recorder.add(PendingStep(progress.step, progress.epoch, lr, seconds, totals))
        if _is_due(self._cadence.monitor_every, progress.step):
            self.record_monitor()
        if _is_due(self._cadence.empty_cache_every, progress.step):
            free_cached(self.stepper.world.device)
        # Both may write to a slow drive.
        with self._heartbeat.within("save"):
            self._checkpoints.poll()
            self._after_step(progress.step)
        return totals.votes

    def _change_experts(self) -> None:
        """Let experts be born, merged, pruned, moved or copied where that is due.

        Before the step is evaluated and saved: what is saved is what the next step trains."""
        if self._evolution is None:
            return
        if self._evolution.is_due(self.progress):
            self._heartbeat.enter_phase("evaluate")
            self._recorder.flush()
            self._evolution.after_step(self.progress)
            self._recorder.restart_window()
        else:
            self._evolution.after_step(self.progress)

    def _end_epoch(self) -> None:
        """Record the epoch, move on to the next one, and save.

        Its seconds are those of its steps. A run that resumes at the end of an epoch records it again with
        the same figures."""
        progress = self.progress
        self._recorder.flush()
        self._log.write(
            kinds.Epoch(
                epoch=progress.epoch,
                step=progress.step,
                seconds=progress.epoch_seconds,
                samples=progress.position,
                loss=progress.epoch_loss / max(1.0, progress.epoch_count),
                samples_per_second=progress.position / max(1e-9, progress.epoch_seconds),
                memory=self.memory.epoch_peak(),
            )
        )
        leak_warning = self.memory.leak_warning()
        if leak_warning is not None:
            self._log.write(kinds.Warned(kind="leak", message=leak_warning))
        progress.start_next_epoch()
        if self._cadence.checkpoint_every == 0:
            # Before the evaluation, which may fail.
            self._save_checkpoint()
        release_idle(self.stepper.world.device)

    def record_monitor(self) -> None:
        """Record a reading of the machine, where a monitor runs."""
        if self._monitor is not None:
            sample = self._monitor()
            step = self.progress.step
            self._log.write(kinds.Monitor(step=step, host=sample.host, devices=sample.devices))

    def _let_look(self, after: ModelMoment) -> None:
        """Let callbacks look at the model, on the main worker. The others wait in their next collective."""
        if self._show_model is not None:
            with self._heartbeat.within("evaluate"):  # a probe may take longer than a step
                self._show_model(after, self.progress)

    # Evaluation and early stopping

    def _outcome_at_start(self) -> Outcome | None:
        """Return the outcome of a resumed run that has nothing left to do, else None."""
        progress = self.progress
        if progress.step == 0:
            return None
        if self._at_last_step or progress.epoch >= self._cadence.epochs:
            self._evaluate()
            limit = "--epochs" if progress.epoch >= self._cadence.epochs else "--max-steps"
            return Outcome("completed", f"nothing left to do at step {progress.step}: raise {limit} to go on")
        # The checkpoint of an epoch is written before its evaluation: a run killed in between
        # evaluates now.
        at_end_of_epoch = progress.position == 0 and self._cadence.evaluate_every == 0
        if (self._validation.is_current or at_end_of_epoch) and self._out_of_patience():
            return self._stopped_early()
        return None

    def _out_of_patience(self) -> bool:
        """Evaluate the current step. Return whether early stopping ends the run."""
        self._evaluate()
        return self._validation.out_of_patience

    def _stopped_early(self) -> Outcome:
        reason = f"no better {self._cadence.metric} in {self._cadence.patience} evaluations"
        return Outcome("completed", reason)

    def _evaluate(self) -> None:
        """Evaluate the current step, unless that is done already. Save a new best result."""
        if not self._validation.is_pending:
            return
        self._recorder.flush()
        self._heartbeat.enter_phase("evaluate")
        try:
            is_best = self._validation.run()
        except Exception:
            self._save_unevaluated()
            raise
        self._let_look("evaluate")
        self._recorder.restart_window()
        # With both intervals at the end of each epoch, that step is saved in any case.
        if is_best and (self._cadence.evaluate_every or self._cadence.checkpoint_every):
            self._save_checkpoint()

    def _save_unevaluated(self) -> None:
        """Save the step whose evaluation has failed: a resumed run evaluates it.

        In one process alone: the other workers of a group may wait in a collective of the evaluation."""
        if self.stepper.world.size > 1:
            return
        try:
            self._save_checkpoint()
            self._checkpoints.finish()
        except Exception as error:
            # A second error must not hide the first, which is raised.
            message = f"step {self.progress.step} could not be saved: {first_line(error)}"
            self._log.write(kinds.Warned(kind="checkpoint", message=message))

    # Checkpoints on disk and snapshots in memory. Both flush first: the sums of the epoch are part
    # of the state.

    def _save_checkpoint(self) -> None:
        """Save a checkpoint, unless this step is saved already.

        A step inside an epoch that was saved before its evaluation is saved again: a resumed run would
        not know its result. The step at the end of an epoch is evaluated when a run resumes there."""
        self._heartbeat.enter_phase("save")
        self._recorder.flush()
        if self._last_saved != self._saved_content():
            self._flush_statistics()
            self._report_bad_samples()
            self._write_digests(saved=True)
            self._checkpoints.save(self.progress)
            self._last_saved = self._saved_content()
            self._let_look("checkpoint")
        self._recorder.restart_window()

    def _write_digests(self, saved: bool = False) -> None:
        """Record digests of the state where that is due, once for each step.

        After the changes of experts: the digests are of what the next step trains and a checkpoint has."""
        step = self.progress.step
        if self._digests is None or step == self._last_digest or not self._digests.is_due(step, saved):
            return
        self._last_digest = step
        # The sums wait for the device, so the figures of the steps before are read with them.
        self._recorder.flush()
        self._digests.write(step)
        self._recorder.restart_window()

    def _report_bad_samples(self) -> None:
        """Record the samples that all workers have left out since the last checkpoint.

        So a run that resumes there counts each of them once."""
        if not self._feed.skips_bad:
            return
        own = self._faults
        by_worker = self.stepper.world.gather_values([len(own), own[:_NAMED_FAULTS]])
        self._faults = []
        count = sum(number for number, _ in by_worker)
        if not count:
            return
        first = [fault for _, faults in by_worker for fault in faults]
        step = self.progress.step
        self._log.write(kinds.BadSamples(step=step, epoch=self.progress.epoch, count=count))
        message = f"{counted(count, 'sample')} left out by --skip-bad up to step {step}: "
        self._log.write(kinds.Warned(kind="data", message=message + "; ".join(first[:_NAMED_FAULTS])))

    def _saved_content(self) -> tuple[int, bool]:
        """Return the current step, and whether a checkpoint of it has a result that it needs."""
        return self.progress.step, self._validation.is_current and self.progress.position > 0

    def _finish_checkpoints(self) -> None:
        """Wait for the last checkpoint, and check that it is on disk."""
        self._checkpoints.finish()
        trained = self.progress.step > self._first_step
        if trained and self._checkpoints.durable_step != self.progress.step:
            raise ResourceError(
                "the last checkpoint could not be written; the newest is of step "
                f"{self._checkpoints.durable_step}: see the warnings"
            )

    def _snapshot_if_due(self) -> None:
        if self._snapshots is None:
            return
        self._snapshots.prepare()
        if self._snapshots.due(self.progress.step):
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        if self._snapshots is None:
            return
        self._heartbeat.enter_phase("snapshot")
        self._recorder.flush()
        self._flush_statistics()
        self._snapshots.take(self.progress)
        self._recorder.restart_window()

    def _flush_statistics(self) -> None:
        """Add up the statistics of the experts over all workers: they are part of the state."""
        if self._evolution is not None:
            self._evolution.flush()


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
