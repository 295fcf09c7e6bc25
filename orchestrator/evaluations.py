"""An evaluation of a checkpoint from start to result: in this process, or on the workers of a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from orchestrator.config.reading.reader import Resolved
from orchestrator.config.settings import Config
from orchestrator.errors import CheckpointDamaged, UserError
from orchestrator.live.screen.evaluation_screen import EvaluationScreen
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.redaction import mask_tree
from orchestrator.tasks.generation import GenerationOptions
from orchestrator.types import VERSION, Choice, counted

if TYPE_CHECKING:
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.tasks.task import Task
    from orchestrator.train.remote.opened_checkpoint import OpenedCheckpoint


@dataclass(frozen=True)
class EvaluationResult:
    """The metrics of a checkpoint, as they are in the file beside it."""

    checkpoint: str
    """The folder or the address of the checkpoint."""
    step: int
    split: str
    loss: float
    metrics: Mapping[str, float]
    samples: int
    path: str
    """The file with the result, or its address."""
    generations: Sequence[Mapping[str, str | None]] = ()
    """``prompt``, ``text`` and ``reference`` (from the data) of a language model's generations."""


class CheckpointEvaluation:
    """An evaluation of one split on a checkpoint."""

    def __init__(
        self, checkpoint: OpenedCheckpoint, split: str, options: GenerationOptions, quiet: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._split = split
        self._options = options
        self.screen = EvaluationScreen(quiet, secret_values())

    def settings(self, given: Resolved) -> Resolved:
        """Return the given settings with the checkpoint in the place of one to resume from."""
        config = given.config.but(resume=str(self._checkpoint.path), init_from=None, run_dir=None, name=None)
        return Resolved(config, given.origins)

    def task(self, own_task: Task | None, config: Config) -> Any:
        """Return the task with the split as its validation data."""
        from orchestrator.tasks.load import load_task
        from orchestrator.tasks.split import with_split

        if own_task is None and config.task.startswith("python:"):
            location = self._checkpoint.location
            raise UserError(
                f"{location} is of a run that trains an object of a Python program ({config.task}), which no "
                f"command line can name; evaluate it in Python: Trainer(...).evaluate({location!r})"
            )
        self._checkpoint.check_writable()
        task = own_task or load_task(config, self._checkpoint.path.parent.parent)
        # Now, and not when the data has been evaluated.
        self._options.check_task(task)
        return with_split(task, self._split)

    def run_in_process(self, prepared: PreparedRun) -> EvaluationResult:
        from orchestrator.train.group.world import World
        from orchestrator.train.worker.checkpoint_evaluation import evaluate_checkpoint
        from orchestrator.train.worker.torch_settings import preserved_random_state, torch_settings

        prepared = self._begin(prepared)
        world = World.single_process(prepared.plan.device.value)
        settings = torch_settings(prepared.resolved.config, prepared.plan, world.device)
        try:
            with preserved_random_state(), settings:
                fields = evaluate_checkpoint(prepared, world, self.screen.progress, self._options)
        except CheckpointDamaged as error:
            raise self._damaged(error) from None
        finally:
            self.screen.close()
        return self._end(prepared, fields)

    def run_on_workers(self, prepared: PreparedRun, cluster: Cluster) -> EvaluationResult:
        from orchestrator.runtime.evaluation import EvaluationJob, evaluate_on_workers

        prepared = self._begin(prepared)
        with self._worker_folder() as folder:
            job = EvaluationJob(folder, self._checkpoint, self._split, self._options)
            try:
                fields = evaluate_on_workers(prepared, cluster, job, self.screen)
            except CheckpointDamaged as error:
                raise self._damaged(error) from None
            finally:
                self.screen.close()
        return self._end(prepared, fields)

    @contextmanager
    def _worker_folder(self) -> Iterator[Path]:
        """Yield the folder that the workers write to."""
        path = self._checkpoint.path
        if self._checkpoint.remote is not None:
            # The copy of the run, which is removed at the end. Workers that do not see it need files of it.
            yield path.parent.parent
            return
        # All nodes that see the checkpoint see a folder beside it.
        with TemporaryDirectory(prefix=".evaluation-", dir=path.parent) as folder:
            yield Path(folder)

    def _begin(self, prepared: PreparedRun) -> PreparedRun:
        """Show what is evaluated. Return the plan with the batches of the run's own evaluations."""
        prepared = _with_batch_of_run(prepared, self._checkpoint.path.parent.parent)
        self.screen.banner(self._banner_rows(prepared), "expert-orchestrator evaluate")
        for change in prepared.changes:
            self.screen.note(f"changed: {change.text()}")
        return prepared

    def _banner_rows(self, prepared: PreparedRun) -> list[tuple[str, str]]:
        from orchestrator.run.prepared_run import banner_rows
        from orchestrator.train.worker.resume import experts_to_show

        checkpoint = self._checkpoint
        choice = f" ({checkpoint.choice})" if checkpoint.choice else ""
        saved = experts_to_show(prepared.resolved.config, checkpoint.path.parent.parent)
        rows = dict(banner_rows(prepared, checkpoint.path, saved=saved))
        samples = prepared.facts.validation_samples
        batch = prepared.plan.eval_batch_size
        return [
            ("checkpoint", f"{checkpoint.location}{choice}"),
            ("weights", _weights_text(prepared)),
            ("task", rows["task"]),
            ("data", f"{_samples_text(samples)} of {self._split}"),
            *((name, rows[name]) for name in ("processes", "device", "precision")),
            ("batch", f"{batch.value} per worker: {batch.reason}"),
        ]

    def _damaged(self, error: CheckpointDamaged) -> CheckpointDamaged:
        return CheckpointDamaged(
            f"{self._checkpoint.location} is damaged: {error}; evaluate another checkpoint of the run by its "
            "folder"
        )

    def _end(self, prepared: PreparedRun, fields: Mapping[str, Any]) -> EvaluationResult:
        """Write and show the result."""
        config = prepared.resolved.config
        plan = prepared.plan
        checkpoint = self._checkpoint
        content = {
            "checkpoint": checkpoint.name,
            "step": fields["step"],
            "split": self._split,
            "weights": "ema" if config.optim.evaluate_ema else "trained",
            "loss": fields["loss"],
            "metrics": fields["metrics"],
            "samples": fields["samples"],
            "seconds": fields["seconds"],
            "task": config.task,
            "data_dir": config.data.data_dir,
            "strategy": plan.strategy.value,
            "workers": plan.workers.value,
            "device": plan.device.value,
            "precision": plan.precision.value,
            "eval_batch_size": plan.eval_batch_size.value,
            "version": VERSION,
            "time": time.time(),
        }
        if fields["generations"]:
            content["generations"] = fields["generations"]
        checkpoint.write_result(self._split, mask_tree(content, secret_values(), keys=False))
        path = checkpoint.result_name(self._split)
        self.screen.result(content, path)
        return EvaluationResult(
            checkpoint.location,
            content["step"],
            self._split,
            content["loss"],
            content["metrics"],
            content["samples"],
            path,
            fields["generations"],
        )


def _samples_text(samples: int | None) -> str:
    return "streamed samples" if samples is None else counted(samples, "sample")


def _weights_text(prepared: PreparedRun) -> str:
    averaged = prepared.resolved.config.optim.evaluate_ema
    return "the moving average (--evaluate-ema)" if averaged else "as trained"


def _with_batch_of_run(prepared: PreparedRun, run_dir: Path) -> PreparedRun:
    """Return the plan with the evaluation batch that the run had on as many workers.

    So the sums are those of the run, to the last bit; the plan may have had other memory to divide."""
    from orchestrator.run.plan_file import read_earlier_plan

    earlier = read_earlier_plan(run_dir)
    plan = prepared.plan
    is_given = prepared.resolved.config.batch.eval_batch_size is not None
    if is_given or earlier.get("workers") != plan.workers.value:
        return prepared
    size = Choice(earlier["eval_batch_size"], "as in the run")
    return replace(prepared, plan=replace(plan, eval_batch_size=size))
