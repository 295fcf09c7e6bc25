"""The Python API: train a model, data and loss of your own, or a named task, in a few lines."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from orchestrator.config.reader import Resolved, absolute
from orchestrator.config.settings import Config
from orchestrator.errors import UserError
from orchestrator.plan.experts import unused_settings
from orchestrator.plan.inventory.cluster import Cluster, chosen_gpus
from orchestrator.plan.inventory.hardware import (
    Inventory,
    in_cluster,
    inventory,
    results_folder,
    secret_values,
    set_environment,
)
from orchestrator.plan.planning import choose_device, choose_precision, choose_worker_device, plan
from orchestrator.plan.workers import (
    asks_for_workers,
    check_cpu,
    choose_backend,
    choose_strategy,
    choose_workers,
    on_gpus,
)
from orchestrator.record.screen import Screen

if TYPE_CHECKING:
    from torch import nn

    from orchestrator.config.sweep import Sweep
    from orchestrator.measure.bench import BenchResult
    from orchestrator.record.ledger import SweepRecord
    from orchestrator.tasks.task import Task
    from orchestrator.train.worker.batch_size import Found
    from orchestrator.train.worker.run_dir import Prepared


@dataclass(frozen=True)
class Result:
    """How a run ended: its status, its folder, its summary, and the trained model."""

    status: str
    run_dir: Path
    summary: dict[str, Any]
    model: nn.Module

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best validation result; ``--init-from`` begins with its weights."""
        step = self.summary["best"].get("step")
        path = self.run_dir / "checkpoints" / f"step_{step or 0:08d}"
        return path if step and path.is_dir() else None

    def performance_summary(self) -> str:
        return (self.run_dir / "performance_summary.txt").read_text(encoding="utf-8")


class Trainer:
    """Trains a task. Give a ``config`` that names one, or a model, data and loss of your own::

        trainer = Trainer(model, data=(x, y), loss=loss, config=Config.of(epochs=3))
        result = trainer.fit()

    ``data`` and ``validation`` are tensors, tuples of tensors, or data sets with ``__len__`` and ``__getitem__``.
    ``loss(model, batch)`` returns a scalar mean, a pair (sum, count), or a ``Loss``. ``optimizer`` makes an optimizer
    from parameters; ``schedule`` gives the factor of the learning rate at a step. The model holds the trained weights
    afterwards."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        data: Any = None,
        loss: Callable[[Any, Any], Any] | None = None,
        validation: Any = None,
        optimizer: Callable[[Iterable[Any]], Any] | None = None,
        schedule: Callable[[int], float] | None = None,
        task: Task | None = None,
        config: Config | Resolved | None = None,
        quiet: bool = False,
    ) -> None:
        self.resolved = config if isinstance(config, Resolved) else Resolved(config or Config(), {})
        self._screen = Screen(quiet=True)
        self._quiet = quiet
        self._model = model
        self._given: Task | None = task
        if not isinstance(config, Config | Resolved | None):
            raise UserError(f"config is a {type(config).__name__}; a Config was needed: Config.of(epochs=3)")
        if task is not None and not all(
            callable(getattr(task, member, None)) for member in ("build_model", "train_data", "loss")
        ):
            raise UserError(
                f"task is {task!r}; an object with build_model, train_data and loss was needed (a name goes into Config.of(task=...))"
            )
        if model is None and any(part is not None for part in (data, loss, validation, optimizer, schedule)):
            raise UserError("data and loss were given without a model: Trainer(model, data=..., loss=...)")
        if model is not None:
            if data is None or loss is None:
                raise UserError(
                    "a model of your own needs data and loss beside it: Trainer(model, data=..., loss=...)"
                )
            self._given = _given_task(model, data, loss, validation, optimizer, schedule)
        if self._given is not None:
            own = f"python:{type(self._given if model is None else model).__name__}"
            self.resolved = Resolved(self.resolved.config.but(task=own), self.resolved.origins)

    def prepare(self) -> Prepared:
        """Load the task, look at the hardware, trace the model and plan. Nothing is written, and no cluster is started."""
        return self._prepare(self._look(), None)

    def _look(self) -> Inventory:
        # read by torch when it first touches the GPU: without it large batches fail for fragments, not for lack of memory
        set_environment("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        return inventory(self.resolved.config.run.run_dir or Path.cwd())

    def _prepare(self, found: Inventory, cluster: Cluster | None, task: Task | None = None) -> Prepared:
        from orchestrator.measure.model_facts import model_facts
        from orchestrator.tasks.load import load_task
        from orchestrator.train.worker.run_dir import Prepared, kept_batch, planned_before, run_before

        config = absolute(self.resolved.config, Path.cwd())
        task = task or self._given or load_task(config)
        device = self._device(config, found, cluster)
        precision = choose_precision(config, found, device).value
        facts = model_facts(task, device, precision)
        before = run_before(config, config.run.name, results_folder())
        known = planned_before(before) if before else {}
        chosen = plan(config, found, facts, kept_batch(config, known), cluster, in_cluster())
        return Prepared(
            Resolved(config, self.resolved.origins), task, found, facts, chosen, cluster, in_cluster()
        )

    def _device(self, config: Config, found: Inventory, cluster: Cluster | None) -> str:
        """What the model is traced for."""
        joined = cluster is not None and cluster.joined
        if choose_strategy(config, found, joined or in_cluster()).value == "single":
            return choose_device(config, found).value
        if not joined:
            found = replace(found, gpus=chosen_gpus(found, config.parallel.devices))
        return choose_worker_device(config, found, cluster.gpus if cluster else len(found.gpus)).value

    def find_batch_size(self) -> Found:
        """What ``--batch-size auto`` would find: the largest batch that fits the GPU, or the fastest on the CPU."""
        from orchestrator.train.parts.world import World
        from orchestrator.train.worker.batch_probe import find_batch
        from orchestrator.train.worker.build import machine_settings

        prepared = self.prepare()
        config, chosen = prepared.resolved.config, prepared.plan
        world = World.single_process(chosen.device.value)
        with machine_settings(config, chosen, world.device):
            return find_batch(config, chosen, prepared.task, world, prepared.facts)

    def bench(self, iterations: int = 20, precisions: bool = False) -> list[BenchResult]:
        """Forward, backward and optimizer time over whole steps, warm-up left out; in each precision if asked for."""
        from orchestrator.measure.bench import measure, measure_precisions

        prepared = self.prepare()
        config, chosen, task = prepared.resolved.config, prepared.plan, prepared.task
        return (
            measure_precisions(config, chosen, task, iterations)
            if precisions
            else [measure(config, chosen, task, iterations)]
        )

    def fit(self) -> Result:
        """Train to the end. Works in a notebook and from a running event loop too; ``fit_async`` leaves that loop free."""
        self._screen = Screen(quiet=self._quiet, secrets=secret_values())
        if not asks_for_workers(self.resolved.config):
            found = self._look()
            if choose_strategy(self.resolved.config, found, in_cluster()).value == "single":
                return self._alone(self._prepare(found, None))
        from orchestrator.train.strategies.placement_file import check_placement_file
        from orchestrator.train.worker.run_dir import check_unused

        run = self.resolved.config.run  # a cluster takes a while to start: what needs none is told before
        check_unused(self.resolved.config, run.run_dir or (results_folder() / run.name if run.name else None))
        check_placement_file(self.resolved.config)
        from orchestrator.runtime.cluster.session import session

        with session(self.resolved.config, self._screen.note) as joined:
            return self._together(joined)

    def devices(self) -> tuple[str, int]:
        """Devices that a run here could have, of the cluster that it would join or of this machine: ``gpu`` and how many, where
        there are any that it may use, else ``cpu`` and the cores."""
        from orchestrator.runtime.cluster.session import cluster_runs, session
        from orchestrator.runtime.cluster.survey import survey

        config, found = self.resolved.config, self._look()
        cluster = Cluster.of(found, config.parallel.devices)
        if cluster_runs(config):
            with session(config, self._screen.note) as joined:
                cluster, found = survey(found, joined)
        return ("gpu", cluster.gpus) if on_gpus(config, cluster) and found.gpus else ("cpu", cluster.cpus)

    def sweep(self, sweep: Sweep, resume: Path | None = None) -> SweepRecord:
        """Try settings against each other, each in a short run of its own; ``resume`` is the folder of a sweep to go on with. What
        came of each trial, and tables and pictures of it, lie in the folder of the sweep."""
        from orchestrator.record.ledger import read_sweep_record
        from orchestrator.sweeps import carry_out, conclude, is_made
        from orchestrator.tasks.load import load_task

        before = read_sweep_record(resume) if resume is not None else None
        if before is not None and is_made(sweep, before):
            return conclude(sweep, before.folder, self._quiet)
        config, found = self.resolved.config, self._look()
        task = self._given or load_task(
            absolute(config, Path.cwd())
        )  # what is wrong with it is told before a cluster starts
        from orchestrator.runtime.cluster.session import session
        from orchestrator.runtime.cluster.survey import survey
        from orchestrator.runtime.sweep.run import Ground, check_first

        check_first(sweep, config, found)
        with session(config, Screen(quiet=self._quiet, secrets=secret_values()).note) as joined:
            cluster, node = survey(found, joined)
            ground = Ground.of(config, sweep.space, node, cluster)
            return carry_out(sweep, self._prepare(node, cluster, task), ground, before, self._quiet)

    async def fit_async(self) -> Result:
        return await asyncio.to_thread(self.fit)

    def _alone(self, prepared: Prepared) -> Result:
        """The run in this process."""
        from orchestrator.train.parts.world import World
        from orchestrator.train.worker.build import check_beginning, kept_randomness
        from orchestrator.train.worker.observers import interruptible, recording
        from orchestrator.train.worker.run import Supervision, record_failure, work
        from orchestrator.train.worker.run_dir import banner_rows, open_run_dir

        config, begun = prepared.resolved.config, perf_counter()
        check_beginning(config)
        run_dir = open_run_dir(config, self.resolved.config.run.name, results_folder())
        with kept_randomness(), recording(config, run_dir, self._screen) as log, interruptible() as asked:
            self._introduce(prepared, banner_rows(prepared, run_dir))
            try:
                outcome, model = work(
                    prepared,
                    World.single_process(prepared.plan.device.value),
                    run_dir,
                    log,
                    Supervision(asked),
                )
            except BaseException as error:
                record_failure(run_dir, error, perf_counter() - begun, log)
                raise
        return self._concluded(outcome.status, run_dir, model)

    def _together(self, joined: bool) -> Result:
        """The run on the workers of a cluster; ``joined`` if it is someone else's."""
        from orchestrator.runtime.cluster.survey import survey
        from orchestrator.runtime.driver import drive, trained_model
        from orchestrator.train.strategies.placement_file import placement_file
        from orchestrator.train.worker.build import check_beginning
        from orchestrator.train.worker.run_dir import banner_rows, open_run_dir

        cluster, node = survey(self._look(), joined)
        asked = self.resolved.config  # what cannot be had is told before anything is traced
        count, on_gpu = (
            choose_workers(asked, cluster, node).value,
            choose_worker_device(asked, node, cluster.gpus).value != "cpu",
        )
        check_cpu(asked, on_gpu)
        choose_backend(asked, on_gpu, count)
        prepared = self._prepare(node, cluster)
        config = prepared.resolved.config
        check_beginning(config)
        if prepared.plan.strategy.value == "expert_parallel":
            placement_file(config, prepared.facts, count)
        run_dir = open_run_dir(config, self.resolved.config.run.name, results_folder())
        self._introduce(prepared, banner_rows(prepared, run_dir))
        status = drive(_start_of(prepared), prepared, cluster, run_dir, self._screen)
        return self._concluded(status, run_dir, trained_model(prepared, run_dir))

    def _introduce(self, prepared: Prepared, rows: list[tuple[str, str]]) -> None:
        self._screen.banner(rows, "expert-orchestrator")
        unused = unused_settings(prepared.resolved.config, prepared.plan.strategy.value, prepared.facts)
        if unused:
            self._screen.note(f"note: {unused}")

    def _concluded(self, status: str, run_dir: Path, model: nn.Module) -> Result:
        from orchestrator.report.run.page import draw_report
        from orchestrator.train.worker.run_dir import conclude, outcome_lines

        if self._model is not None:
            self._model.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()})
        summary = conclude(run_dir)
        draw_report(run_dir)
        for line in outcome_lines(summary, run_dir):
            self._screen.note(line)
        return Result(status, run_dir, summary, model)


def _start_of(prepared: Prepared) -> Any:
    """How a group of workers is started, by the strategy of the plan."""
    if prepared.plan.strategy.value == "expert_parallel":
        from orchestrator.runtime.expert_parallel.run import ExpertParallelRun

        return ExpertParallelRun
    from orchestrator.runtime.data_parallel.fit import Fit

    return Fit


def _given_task(model: Any, data: Any, loss: Any, validation: Any, optimizer: Any, schedule: Any) -> Task:
    """A task from objects. Models for tracing and probing are copies; the trained weights go back into the given one."""
    from orchestrator.tasks.task import Task as Protocol

    class Given(Protocol):
        def build_model(self) -> Any:
            return copy.deepcopy(model)

        def train_data(self) -> Any:
            return data

        def validation_data(self) -> Any:
            return validation

        def loss(self, model: Any, batch: Any) -> Any:
            return loss(model, batch)

        def build_optimizer(self, parameters: Iterable[Any]) -> Any:
            return optimizer(parameters) if optimizer else None

        def schedule(self) -> Any:
            return schedule

    return Given()
