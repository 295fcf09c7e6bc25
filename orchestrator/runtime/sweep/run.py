"""A sweep: Ray Tune runs the trials, and our own ledger records them.

A failed trial is a row of the ledger, never the end of the sweep. An interrupted sweep continues
from its ledger.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ray.tune import (
    Callback,
    CheckpointConfig,
    FailureConfig,
    PlacementGroupFactory,
    RunConfig,
    Stopper,
    TuneConfig,
    Tuner,
    with_parameters,
    with_resources,
)
from ray.tune.schedulers import ASHAScheduler

from orchestrator.config.settings import Config
from orchestrator.config.sweep.space import Point, point_key
from orchestrator.config.sweep.sweep import Sweep
from orchestrator.config.writer import to_json
from orchestrator.live.screen.sweep_screen import SweepScreen
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.plan.planning import Plan
from orchestrator.record.files.ledger import Ledger, TrialRow, parse_trial
from orchestrator.redaction import mask, secrets_in
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.runtime.ray_internals import unpropagated_variables
from orchestrator.runtime.sweep.devices import SweepDevices
from orchestrator.runtime.sweep.optuna_search import OptunaSource
from orchestrator.runtime.sweep.search import (
    FixedPoints,
    NotPickled,
    PointSource,
    TrialRules,
    TrialSearcher,
    planned_point,
)
from orchestrator.runtime.sweep.trial import MAX_RETRIES, SweepTrial
from orchestrator.runtime.sweep.trial_worker import TrialSetup
from orchestrator.tasks.load import loads_by_name

_ASHA_SLICES = 8
"""Parts of a trial after each of which ASHA may stop it."""
_ASHA_REDUCTION = 2
_MAX_REASON_CHARS = 300


@dataclass(frozen=True)
class SweepRun:
    """One start of a sweep, with the rows of earlier starts."""

    sweep: Sweep
    prepared: PreparedRun
    devices: SweepDevices
    ledger: Ledger
    done: tuple[TrialRow, ...]
    screen: SweepScreen
    stop_requested: Callable[[], bool]

    @property
    def _config(self) -> Config:
        return self.prepared.resolved.config

    def run(self) -> None:
        """Run the trials that the ledger does not hold yet, until there are none left or a stop
        is requested."""
        rules = TrialRules(
            self.sweep.num_trials,
            lambda row: row.score(self.sweep.objective),
            self._workers_or_refusal,
            self._record,
        )
        source = make_source(
            self.sweep, self._config, self.prepared.plan, self.done, self._workers_or_refusal
        )
        searcher = TrialSearcher(source, self.done, rules)
        recorder = _Recorder(searcher, self._record, self.screen, self.stop_requested)
        self._tune(searcher, recorder)

    def _record(self, row: TrialRow) -> None:
        # Masked before it is cut: half a secret would not be recognised.
        reason = mask(row.reason, secret_values())[:_MAX_REASON_CHARS]
        row = replace(row, reason=reason)
        self.ledger.add(row)
        self.screen.trial_done(row)

    def _workers_or_refusal(self, point: Point) -> int | TrialRow:
        return self.devices.workers_or_refusal(self._config, point)

    def _setup(self) -> TrialSetup:
        """Return the data that all trials share."""
        config = self._config
        space = self.sweep.space
        return TrialSetup(
            config,
            self.devices.inventory,
            self.devices.cluster,
            Path.cwd(),
            self.devices.on_gpu,
            self.devices.cores,
            self.sweep.objective,
            self.sweep.trial_seconds,
            self.sweep.trial_steps,
            _ASHA_SLICES if self.sweep.asha else 1,
            None if loads_by_name(config.task) else self.prepared.task,
            secrets_in([to_json(config), space.to_json(), *space.given], secret_values()),
        )

    def _tune(self, searcher: TrialSearcher, recorder: _Recorder) -> None:
        scheduler = None
        if self.sweep.asha:
            scheduler = ASHAScheduler(
                time_attr="training_iteration",
                max_t=_ASHA_SLICES,
                grace_period=1,
                reduction_factor=_ASHA_REDUCTION,
            )
        tune_config = TuneConfig(
            metric="score",
            mode="max",
            search_alg=searcher,
            scheduler=scheduler,
            # One more than there are trials: the searcher ends the search.
            num_samples=self.sweep.num_trials + 1,
            max_concurrent_trials=self.sweep.concurrent,
            reuse_actors=True,
            trial_name_creator=_trial_name,
            trial_dirname_creator=_trial_name,
        )
        trainable = with_resources(
            with_parameters(SweepTrial, setup=self._setup()), _trial_resources(self.devices)
        )
        with _temporary_folder() as folder, _silent_tune(), unpropagated_variables("AWS_"):
            run_config = RunConfig(
                name="trials",
                storage_path=folder,
                verbose=0,
                callbacks=[recorder],
                stop=_StopOnRequest(self.stop_requested),
                checkpoint_config=CheckpointConfig(checkpoint_at_end=False),
                # The process that leads a trial, which has no checkpoint: it begins again.
                failure_config=FailureConfig(max_failures=MAX_RETRIES),
            )
            Tuner(trainable, tune_config=tune_config, run_config=run_config).fit()


def _trial_resources(devices: SweepDevices) -> Callable[[dict[str, Any]], PlacementGroupFactory]:
    """Return a function from a trial's configuration to its bundles, one for each worker.

    The leader of a trial has an empty bundle; Ray drops it, so the bundles of the workers begin
    at 0. A function of its own, because Tune pickles it: a method would bring the open ledger
    along.
    """
    bundle = {"GPU": 1.0} if devices.on_gpu else {"CPU": float(devices.cores)}
    return lambda config: PlacementGroupFactory([{}, *[bundle] * config["workers"]])


@contextmanager
def _temporary_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="sweep_")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _silent_tune() -> Iterator[None]:
    """Silence Tune's log: the row of a trial reports what happened."""
    logger = logging.getLogger("ray.tune")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _trial_name(trial: Any) -> str:
    return f"trial_{trial.config['trial']}"


def make_source(
    sweep: Sweep,
    config: Config,
    plan: Plan,
    done: tuple[TrialRow, ...],
    workers_or_refusal: Callable[[Point], int | TrialRow],
) -> PointSource:
    """Return the source of a sweep's points. Given points keep their order.

    Points of a grid or of random draws are sorted: first those that cannot be tried, which get
    their rows at once; then by the number of workers, because trials with the same number reuse
    each other's workers.
    """
    if sweep.search == "optuna":
        first = [] if done else [planned_point(sweep.space, config, plan)]
        return OptunaSource(sweep.space, config.run.seed, first)
    if sweep.search == "grid" and sweep.space.given:
        return FixedPoints(sweep.space.given)
    points = sweep.space.grid() if sweep.search == "grid" else sweep.space.draws(config.run.seed)
    points = list(islice(points, sweep.num_trials))
    num_workers: dict[str, int] = {}
    for point in points:
        workers = workers_or_refusal(point)
        num_workers[point_key(point)] = 0 if isinstance(workers, TrialRow) else workers
    return FixedPoints(sorted(points, key=lambda point: num_workers[point_key(point)]))


class _StopOnRequest(NotPickled, Stopper):
    """Ends the sweep when a stop is requested."""

    def __init__(self, stop_requested: Callable[[], bool]) -> None:
        self._stop_requested = stop_requested

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        return False

    def stop_all(self) -> bool:
        return self._stop_requested()


class _Recorder(NotPickled, Callback):
    """Records the row of each trial as soon as it has ended."""

    def __init__(
        self,
        searcher: TrialSearcher,
        record: Callable[[TrialRow], None],
        screen: SweepScreen,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._searcher = searcher
        self._record = record
        self._screen = screen
        self._stop_requested = stop_requested

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:  # noqa: ARG002
        self._screen.trial_started(trial.config["trial"], trial.config["point"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:  # noqa: ARG002
        result = trial.last_result or {}
        row = parse_trial({"event": "trial", **result["row"]}) if "row" in result else None
        ended = bool(result.get("ended"))
        if row is None or (self._stop_requested() and not ended):
            return  # interrupted: the next start of the sweep tries it again
        if not ended:
            row = replace(row, status="stopped", reason="stopped early: others were better")
        self._finish(trial, row)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:  # noqa: ARG002
        if self._stop_requested():
            return
        config = trial.config
        error = trial_error(trial)
        reason = f"the process that led the trial was lost {MAX_RETRIES + 1} times"
        reason += f": {error}" if error else ""
        row = TrialRow(config["trial"], config["point"], "failed", reason, workers=config["workers"])
        self._finish(trial, row)

    def _finish(self, trial: Any, row: TrialRow) -> None:
        retries = (row.retries or 0) + min(trial.num_failures, MAX_RETRIES)
        row = replace(row, retries=retries or None)
        self._record(row)
        with suppress(Exception):
            self._searcher.record_result(trial.trial_id, row)


def trial_error(trial: Any) -> str:
    """Return the last line of the error that Tune wrote down for a trial; empty without one."""
    with suppress(OSError, TypeError, AttributeError):
        lines = Path(trial.error_file).read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""
