"""The Python API: training of your own model, data and loss, or of a named task, in a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from orchestrator.config.metric import check_metrics
from orchestrator.config.reading.keywords import known_arguments
from orchestrator.config.reading.reader import Resolved
from orchestrator.config.sections.cross_checks import check_has_documents, check_settings_of_task
from orchestrator.config.settings import Config
from orchestrator.config.writer import changed_settings, with_absolute_paths
from orchestrator.errors import UserError
from orchestrator.live.callbacks.callbacks import CallbackRunner, as_callbacks, load_callbacks
from orchestrator.live.metrics.endpoint import RunMetrics, metrics_endpoint
from orchestrator.live.screen.screen import Screen
from orchestrator.live.trackers.tracker_backends import check_trackers
from orchestrator.plan.device import choose_worker_device
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import (
    Inventory,
    in_cluster,
    inventory,
    results_folder,
    secret_values,
    set_environment,
)
from orchestrator.plan.ladder import check_fits
from orchestrator.plan.workers import (
    check_cpu,
    choose_backend,
    choose_workers,
    num_spares,
    trains_in_process,
    uses_gpus,
    workers_flag,
)
from orchestrator.preparation import plan_request, prepare_run
from orchestrator.result import Result
from orchestrator.storage.address import location_text
from orchestrator.tasks.generation import MAX_NEW_TOKENS, GenerationOptions
from orchestrator.train.remote.addresses import local_records, local_start, remote_run

if TYPE_CHECKING:
    from torch import nn

    from orchestrator.config.metric import Metric
    from orchestrator.config.sweep.sweep import Sweep
    from orchestrator.evaluations import CheckpointEvaluation, EvaluationResult
    from orchestrator.measure.bench import BenchResult
    from orchestrator.record.files.ledger import SweepRecord
    from orchestrator.run.prepared_run import PreparedRun
    from orchestrator.run.run_settings import ResumedSettings
    from orchestrator.tasks.task import Task
    from orchestrator.train.remote.run import RemoteRun
    from orchestrator.train.worker.batch_size import BatchSizeResult
    from orchestrator.training_run import TrainingRun
    from orchestrator.verification import Verification, VerificationResult


class Trainer:
    """Trains a task. Give a ``config`` that names one, or a model, data and loss of your own::

        trainer = Trainer(model, data=(x, y), loss=loss, config=Config.of(epochs=3))
        result = trainer.fit()

    ``data`` and ``validation`` are tensors, tuples of tensors, data sets with ``__len__`` and
    ``__getitem__``, iterable data sets, a ``DataLoader``, or a ``Source`` such as ``JsonLines``.
    ``loss(model, batch)`` returns a scalar mean, a pair (sum, count), or a ``Loss``. ``optimizer``
    builds an optimizer from parameters; ``schedule`` returns the factor of the learning rate at a
    step. ``metrics`` gives the directions of metrics that early stopping may watch, and metrics with a state:
    ``{"churn": Metric(mode="min"), "f1": F1()}``. ``callbacks`` are objects whose methods are called
    during the run, see ``Callback``. After the training the model holds the trained weights.
    """

    @known_arguments
    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        data: Any = None,
        loss: Callable[[Any, Any], Any] | None = None,
        validation: Any = None,
        optimizer: Callable[[Iterable[Any]], Any] | None = None,
        schedule: Callable[[int], float] | None = None,
        metrics: Mapping[str, Metric | Any] | None = None,
        callbacks: Iterable[Any] = (),
        task: Task | None = None,
        config: Config | Resolved | None = None,
        quiet: bool = False,
    ) -> None:
        if not isinstance(config, Config | Resolved | None):
            raise UserError(f"config is a {type(config).__name__}; a Config is needed: Config.of(epochs=3)")
        self.resolved = config if isinstance(config, Resolved) else _given_in_python(config or Config())
        self._resumed: ResumedSettings | None = None
        self._remote: RemoteRun | None = None
        self._screen = Screen(quiet=True)
        self._metrics: RunMetrics | None = None
        self._quiet = quiet
        self._given_callbacks = as_callbacks(callbacks)
        self._callbacks = CallbackRunner([])
        self._model = model
        self._own_task: Task | None = task
        if task is not None:
            from orchestrator.tasks.load import check_task

            check_task(task)
        has_parts = any(part is not None for part in (data, loss, validation, optimizer, schedule, metrics))
        if model is None and has_parts:
            raise UserError("data and loss were given without a model: Trainer(model, data=..., loss=...)")
        if model is not None:
            if data is None or loss is None:
                raise UserError("your own model needs data and loss: Trainer(model, data=..., loss=...)")
            from orchestrator.tasks.object_task import ObjectTask, check_parts

            check_metrics(metrics or {})
            check_parts(optimizer, schedule)
            # Copies of the model are trained; ``fit`` loads the weights into the model itself.
            own_task = ObjectTask(model, data, loss, validation, optimizer, schedule)
            own_task.metrics = dict(metrics or {})
            self._own_task = own_task
        if self._own_task is not None:
            name = type(self._own_task if model is None else model).__name__
            self.resolved = Resolved(self.resolved.config.but(task=f"python:{name}"), self.resolved.origins)

    @classmethod
    def for_model(cls, model: str, *, data: str | Sequence[str], **settings: Any) -> Trainer:
        """Return a trainer of a model of ``transformers``, by its folder or its id on the hub (task ``lm``).

        ``data`` are files of documents or conversations; ``settings`` are flat names as for ``Config.of``.
        """
        return cls(config=Config.of(task="lm", model=model, data=data, **settings))

    def prepare(self) -> PreparedRun:
        """Load the task, probe the hardware, trace the model and plan; write nothing and start no cluster."""
        with self._restored_settings(), local_records(self.resolved) as self.resolved:
            self._take_run_settings()
            return self._prepare(self._take_inventory(), None)

    @contextmanager
    def _restored_settings(self) -> Iterator[None]:
        """Restore the given settings at the end of the block, in which local copies replace addresses."""
        given = self.resolved
        try:
            yield
        finally:
            self.resolved = given

    def _take_run_settings(self) -> None:
        """Let a resumed run have the settings of its folder, except for those that are given again."""
        if self.resolved.config.checkpoint.resume is None:
            return
        from orchestrator.run.run_settings import resume_settings

        self._resumed = resume_settings(self.resolved, results_folder())
        if self._resumed is not None:
            self.resolved = self._resumed.resolved

    def _take_inventory(self) -> Inventory:
        # torch reads it when it first uses the GPU. Without it large batches fail because the free
        # memory is fragmented, although there is enough of it.
        set_environment("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        return inventory(self.resolved.config.run.run_dir or Path.cwd())

    def _prepare(self, hardware: Inventory, cluster: Cluster | None, task: Task | None = None) -> PreparedRun:
        from orchestrator.tasks.load import load_task

        config = with_absolute_paths(self.resolved.config, Path.cwd())
        earlier = self._resumed.folder if self._resumed else None
        task = task or self._given_task(config) or load_task(config, earlier)
        return prepare_run(Resolved(config, self.resolved.origins), task, hardware, cluster, self._resumed)

    def _given_task(self, config: Config) -> Task | None:
        """Return the task of the program, with a part of its data held out if the settings ask for it."""
        if self._own_task is None:
            return None
        from orchestrator.tasks.object_task import ObjectTask

        task = self._own_task
        if not isinstance(task, ObjectTask):
            return task
        return task.with_held_out(config.data.validation_share, config.run.seed)

    def find_batch_size(self) -> BatchSizeResult:
        """Return the choice of ``--batch-size auto``: the largest batch on a GPU, the fastest on a CPU.

        Raises UserError where several workers have parts of the model: only they can measure it together."""
        from orchestrator.train.group.world import World
        from orchestrator.train.worker.batch_probe import divides_model, find_batch
        from orchestrator.train.worker.torch_settings import torch_settings

        prepared = self.prepare()
        config = prepared.resolved.config
        chosen = prepared.plan
        if chosen.workers.value > 1 and divides_model(chosen):
            raise UserError(
                f"find_batch_size() measures in this process, and {chosen.workers.value} workers divide the "
                f"model ({chosen.strategy.value}, sharding {chosen.sharding.value}); train with --batch-size "
                "auto: they measure it together"
            )
        world = World.single_process(chosen.device.value)
        with torch_settings(config, chosen, world.device):
            return find_batch(config, chosen, prepared.task, world, prepared.facts)

    def bench(self, iterations: int = 20, precisions: bool = False) -> list[BenchResult]:
        """Measure forward, backward and optimizer time over whole steps after warm-up.

        ``precisions`` measures every precision that the device supports.
        """
        from orchestrator.measure.bench import measure, measure_precisions

        prepared = self.prepare()
        config = prepared.resolved.config
        if precisions:
            return measure_precisions(config, prepared.plan, prepared.task, iterations)
        return [measure(config, prepared.plan, prepared.task, iterations)]

    def fit(self) -> Result:
        """Train to the end. Works in a notebook and inside a running event loop; ``fit_async``
        does not block it."""
        with self._opened_run():
            config = self.resolved.config
            hardware = self._hardware_for_one_process()
            if hardware is not None:
                return self._run_in_process(self._prepare(hardware, None))
            from orchestrator.run.run_dir import check_unused
            from orchestrator.train.strategies.placement_file import check_placement_file

            # A cluster takes a while to start: checks that need none come first.
            named = results_folder() / config.run.name if config.run.name else None
            check_unused(config, config.run.run_dir or named)
            check_placement_file(config)
            from orchestrator.runtime.cluster.session import session

            with session(config, self._screen.note) as joined:
                return self._run_on_workers(joined)

    @contextmanager
    def _opened_run(self) -> Iterator[None]:
        """Take the settings of the run, and open its screen, its callbacks and its metrics endpoint."""
        self._screen = Screen(quiet=self._quiet, secrets=secret_values())
        note = self._screen.note
        results = results_folder()
        with (
            self._restored_settings(),
            local_start(self.resolved, results, note) as self.resolved,
            remote_run(self.resolved, results, note) as (self.resolved, self._remote),
        ):
            self._take_run_settings()
            config = self.resolved.config
            check_settings_of_task(config.task, config.model, config.data)
            check_has_documents(config.task, config.data)
            check_trackers(config.watch.trackers)
            callbacks = load_callbacks(config, self._given_callbacks)
            self._callbacks = CallbackRunner(callbacks, config.watch.callback_errors == "raise")
            watch = config.watch
            self._screen.log_every = watch.log_every
            with metrics_endpoint(watch.metrics_address, watch.metrics_port, note) as self._metrics:
                yield

    def evaluate(
        self,
        checkpoint: str | Path,
        split: str = "validation",
        prompts: Sequence[str] = (),
        max_new_tokens: int = MAX_NEW_TOKENS,
    ) -> EvaluationResult:
        """Evaluate a checkpoint, or the best one of a run, and write the result beside it.

        ``checkpoint`` is a folder or an address. Settings that are not given are those of its run. ``split``
        is ``validation``, ``train``, or NAME of a task with a method NAME_data. A language model continues
        ``prompts``, texts or files with one a line, else the first prompts of the split, by at most
        ``max_new_tokens``; 0 generates nothing.
        """
        from orchestrator.evaluations import CheckpointEvaluation
        from orchestrator.train.remote.opened_checkpoint import opened_checkpoint

        options = GenerationOptions.of(prompts, max_new_tokens)
        given = self.resolved
        try:
            with opened_checkpoint(checkpoint, results_folder()) as opened:
                evaluation = CheckpointEvaluation(opened, split, options, self._quiet)
                self.resolved = evaluation.settings(given)
                self._take_run_settings()
                return self._evaluate(evaluation)
        finally:
            self.resolved = given
            self._resumed = None

    def _evaluate(self, evaluation: CheckpointEvaluation) -> EvaluationResult:
        config = self.resolved.config
        task = evaluation.task(self._given_task(config), with_absolute_paths(config, Path.cwd()))
        return self._run_job(evaluation, task)

    def _run_job(self, job: CheckpointEvaluation | Verification, task: Task) -> Any:
        """Run a job with the current settings: in this process, or on the workers of a cluster."""
        config = self.resolved.config
        hardware = self._hardware_for_one_process()
        if hardware is not None:
            return job.run_in_process(self._prepare(hardware, None, task))
        from orchestrator.runtime.cluster.session import session
        from orchestrator.runtime.cluster.survey import survey

        with session(config, job.screen.note) as joined:
            cluster, node = survey(self._take_inventory(), joined)
            return job.run_on_workers(self._prepare(node, cluster, task), cluster)

    def _hardware_for_one_process(self) -> Inventory | None:
        """Return the hardware here if this process trains; None if workers do."""
        config = self.resolved.config
        if workers_flag(config):
            return None
        hardware = self._take_inventory()
        return hardware if trains_in_process(config, hardware, in_cluster()) else None

    def verify(
        self, run: str | Path, steps: str | None = None, other_machine: bool = False
    ) -> VerificationResult:
        """Recompute steps of a run with ``--reproducible``, and compare them with its record; write nothing.

        ``steps`` is ``"A..B"``: from the newest checkpoint at or before step A until step B; by default from
        the oldest checkpoint to the last step. Settings are those of the run; ``workers``,
        ``parallel_strategy`` and the like divide the work in another way. ``other_machine`` compares on
        another kind of device too.
        """
        from orchestrator.verification import Verification

        verification = Verification(Path(run), steps, other_machine, self._quiet)
        with self._restored_settings():
            self.resolved = verification.settings(self.resolved)
            config = self.resolved.config
            task = verification.task(self._given_task(config), with_absolute_paths(config, Path.cwd()))
            return self._run_job(verification, task)

    def devices(self) -> tuple[str, int]:
        """Return the devices that a run could use, of the cluster it would join or of this machine.

        They are ``gpu`` and their number if it may use any, else ``cpu`` and the number of cores.
        """
        from orchestrator.runtime.cluster.session import joins_cluster, session
        from orchestrator.runtime.cluster.survey import survey

        config = self.resolved.config
        hardware = self._take_inventory()
        cluster = Cluster.of(hardware, config.parallel.devices)
        if joins_cluster(config):
            with session(config, self._screen.note) as joined:
                cluster, hardware = survey(hardware, joined)
        if uses_gpus(config, cluster) and hardware.gpus:
            return "gpu", cluster.gpus
        return "cpu", cluster.cpus

    def sweep(self, sweep: Sweep, resume: Path | None = None) -> SweepRecord:
        """Compare settings, each in a short run of its own; ``resume`` is the folder of a sweep to continue.

        The result of each trial, tables and pictures are in the folder of the sweep; see also
        ``orchestrator.read_sweep``.
        """
        from orchestrator.config.metric import declared_metrics
        from orchestrator.config.sweep.objective import complete_objective
        from orchestrator.record.files.ledger import read_sweep_record
        from orchestrator.sweeps import finish_sweep, is_complete, run_trials
        from orchestrator.tasks.load import load_task

        if self._given_callbacks or self.resolved.config.watch.callbacks:
            raise UserError("trials of a sweep call no callbacks; leave callbacks out")
        init_from = self.resolved.config.checkpoint.init_from
        if init_from is not None:
            raise UserError(
                f"--init-from {location_text(init_from)}: trials of a sweep begin with new weights; leave it "
                "out, and give it to 'orchestrator train --tuned FOLDER' afterwards"
            )
        earlier = read_sweep_record(resume) if resume is not None else None
        if earlier is not None and is_complete(sweep, earlier):
            return finish_sweep(sweep, earlier.folder, self._quiet)
        config = self.resolved.config
        hardware = self._take_inventory()
        # A task that cannot be loaded is reported before a cluster starts.
        task = self._given_task(config) or load_task(with_absolute_paths(config, Path.cwd()))
        from orchestrator.runtime.cluster.session import session
        from orchestrator.runtime.cluster.survey import survey
        from orchestrator.runtime.sweep.devices import SweepDevices, check_feasible

        sweep = replace(sweep, objective=complete_objective(sweep.objective, declared_metrics(task)))
        check_feasible(sweep, config, hardware)
        with session(config, Screen(quiet=self._quiet, secrets=secret_values()).note) as joined:
            cluster, node = survey(hardware, joined)
            devices = SweepDevices.of(config, sweep.space, node, cluster)
            return run_trials(sweep, self._prepare(node, cluster, task), devices, earlier, self._quiet)

    async def fit_async(self) -> Result:
        return await asyncio.to_thread(self.fit)

    def _run_in_process(self, prepared: PreparedRun) -> Result:
        """Train in this process."""
        from orchestrator.run.run_dir import opened_run_dir
        from orchestrator.train.worker.resume import check_start_checkpoint

        config = prepared.resolved.config
        check_fits(plan_request(prepared))
        check_start_checkpoint(config)
        with opened_run_dir(config, results_folder()) as run_dir:
            return self._training_run().in_process(prepared, run_dir)

    def _run_on_workers(self, joined: bool) -> Result:
        """Train on the workers of a cluster; ``joined`` if the cluster was running already."""
        from orchestrator.run.run_dir import opened_run_dir
        from orchestrator.runtime.cluster.prestart import prestart_workers
        from orchestrator.runtime.cluster.survey import survey
        from orchestrator.train.strategies.placement_file import placement_file
        from orchestrator.train.worker.resume import check_start_checkpoint

        start_s = perf_counter()
        cluster, node = survey(self._take_inventory(), joined)
        # Insufficient resources are reported before the model is traced.
        requested = self.resolved.config
        num_workers = choose_workers(requested, cluster, node).value
        on_gpu = choose_worker_device(requested, node, cluster.gpus).value != "cpu"
        check_cpu(requested, on_gpu)
        choose_backend(requested, on_gpu, num_workers)
        if not joined:
            prestart_workers(num_workers + num_spares(requested), requested)
        prepared = self._prepare(node, cluster)
        config = prepared.resolved.config
        check_fits(plan_request(prepared))
        check_start_checkpoint(config)
        if prepared.plan.strategy_facts.divides_experts:
            placement_file(config, prepared.facts, num_workers)
        with opened_run_dir(config, results_folder()) as run_dir:
            return self._training_run().on_workers(prepared, cluster, run_dir, start_s)

    def _training_run(self) -> TrainingRun:
        from orchestrator.training_run import TrainingRun

        is_own = self._own_task is not None
        return TrainingRun(
            self._screen, self._callbacks, self._metrics, self._remote, self._resumed, self._model, is_own
        )


def _given_in_python(config: Config) -> Resolved:
    """Return the config with the origin of its values, as flags have one."""
    given = config.given | changed_settings(config).keys()
    return Resolved(config, dict.fromkeys(given, "Config"))
