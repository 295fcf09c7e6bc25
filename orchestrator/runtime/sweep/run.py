"""A sweep: trials over a space of settings, run by Ray Tune and written to our own ledger. A failed trial is a row, never the end;
a sweep that is broken off goes on from its ledger."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ray.tune import (
    Callback,
    CheckpointConfig,
    PlacementGroupFactory,
    RunConfig,
    Stopper,
    TuneConfig,
    Tuner,
    with_parameters,
    with_resources,
)
from ray.tune.schedulers import ASHAScheduler

from orchestrator.config.checks import Switch
from orchestrator.config.settings import Config, flat_names, setting_types
from orchestrator.config.space import MAX_POINTS, Point, Space, Values, point_key
from orchestrator.config.sweep import Sweep, requested_workers
from orchestrator.config.writer import to_json
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import Inventory, secret_values
from orchestrator.plan.planning import Plan
from orchestrator.plan.workers import check_cpu, choose_backend, choose_strategy, choose_workers, uses_gpus
from orchestrator.record.ledger import Ledger, TrialRow, parse_trial
from orchestrator.record.sweep_screen import SweepScreen
from orchestrator.redaction import mask, secrets_in
from orchestrator.runtime.cluster.session import joins_cluster
from orchestrator.runtime.ray_internals import unpropagated_variables
from orchestrator.runtime.sweep.search import Listed, Optuna, Points, Source, needed_optuna
from orchestrator.runtime.sweep.trial import Common, Trial
from orchestrator.tasks.load import BUILT_IN
from orchestrator.train.worker.prepared_run import PreparedRun

_SLICES = 8  # parts of a trial after which it may be stopped early
_HALVING = 2
_REASON = 300  # characters of why a trial failed


@dataclass(frozen=True)
class Ground:
    """What a sweep has to run on, and what each worker of a trial is given of it."""

    inventory: Inventory
    cluster: Cluster
    on_gpu: bool
    cores: int

    @classmethod
    def of(cls, config: Config, space: Space, inventory: Inventory, cluster: Cluster) -> Ground:
        """A GPU for each worker; or, on CPUs, as many cores as let the largest number of workers that can be had run, so that
        workers of all trials are alike and their numbers compare."""
        on_gpu = uses_gpus(config, cluster) and bool(inventory.gpus)
        if on_gpu:  # trials side by side share a node's cores, one part for each of its GPUs
            return cls(
                inventory,
                cluster,
                True,
                max(1, inventory.cores // max(1, *(node.gpus for node in cluster.nodes))),
            )
        possible = [count for count in requested_workers(space, config) if count <= cluster.cpus]
        if not possible:
            possible = _left_open(config, space, inventory, cluster)
        elif any(
            "workers" not in point for point in space.given
        ):  # some points of a list leave it to the rest of the settings
            with suppress(ResourceError):
                possible += _left_open(config, space, inventory, cluster)
        with_cpus = [node for node in cluster.nodes if node.cpus] or list(cluster.nodes)
        each = -(-max(possible) // len(with_cpus))  # they are spread over the nodes
        largest = max(node.cpus for node in with_cpus)
        return cls(
            inventory, cluster, False, max(1, min(largest, max(node.cores for node in with_cpus)) // each)
        )

    @property
    def devices(self) -> int:
        return (
            self.cluster.gpus if self.on_gpu else sum(node.cpus // self.cores for node in self.cluster.nodes)
        )

    @property
    def name(self) -> str:
        return self.inventory.gpus[0].name if self.on_gpu else self.inventory.cpu_name

    def why_not(self, config: Config, point: Point) -> str:
        """Why the devices are not enough for a trial; empty where they are, whatever else is wrong with it."""
        with suppress(UserError):
            try:
                self.workers(config.but(**point))
            except ResourceError as error:
                return _line(error)
        return ""

    def workers(self, config: Config) -> int:
        """How many workers a trial has. ResourceError where they are not to be had."""
        count = 1
        if choose_strategy(config, self.inventory, self.cluster.joined).value != "single":
            count = choose_workers(config, self.cluster, self.inventory).value
            check_cpu(config, self.on_gpu)
            choose_backend(config, self.on_gpu, count)
        if count > self.devices:
            each = "a GPU" if self.on_gpu else f"{self.cores} core{'s' * (self.cores > 1)}"
            raise ResourceError(
                f"{count} workers with {each} each were asked for; {self.cluster.text('GPUs' if self.on_gpu else 'CPUs')}"
            )
        return count


def _left_open(config: Config, space: Space, inventory: Inventory, cluster: Cluster) -> list[int]:
    """The workers that the plan would choose, where nothing says how many: of the base, and of each strategy that is tried."""
    strategies = space.domains.get("parallel_strategy")
    tried = (
        [config.but(parallel_strategy=one) for one in strategies.values]
        if isinstance(strategies, Values)
        else [config]
    )
    alone = [choose_strategy(one, inventory, cluster.joined).value == "single" for one in tried]
    return [
        1 if single else choose_workers(one, cluster, inventory).value
        for one, single in zip(tried, alone, strict=True)
    ]


def check_first(sweep: Sweep, config: Config, found: Inventory) -> None:
    """What can be told before a cluster is started: where one is made of this machine, whether any point can be had of it."""
    if config.batch.batch_size == "auto" and "batch_size" not in sweep.space.domains:
        raise UserError(
            "--batch-size auto measures a batch size by itself; sweep over sizes: --sweep batch-size=16..256:x2"
        )
    if sweep.search == "optuna":
        needed_optuna()
    if not sweep.space.listed or sweep.space.size > MAX_POINTS or joins_cluster(config):
        return
    here = Cluster.of(found, config.parallel.devices)
    asked = config.parallel.workers if isinstance(config.parallel.workers, int) else 0
    declared = tuple(
        replace(node, cpus=max(node.cpus, asked)) for node in here.nodes
    )  # as a cluster of our own declares its slots
    ground, points = Ground.of(config, sweep.space, found, replace(here, nodes=declared)), sweep.space.grid()
    if all(ground.why_not(config, point) for point in points):
        raise ResourceError(
            f"none of the {len(points)} points can be tried here; the first: {ground.why_not(config, points[0])}"
        )


def run_sweep(
    sweep: Sweep,
    prepared: PreparedRun,
    ground: Ground,
    ledger: Ledger,
    done: tuple[TrialRow, ...],
    screen: SweepScreen,
    asked: Callable[[], bool],
) -> None:
    """Make the trials that the ledger does not hold yet. Returns when there are none left, or when ``asked`` says to stop."""
    config = prepared.resolved.config
    secrets = secret_values()

    def record(row: TrialRow) -> None:
        row = replace(
            row, reason=mask(row.reason, secrets)[:_REASON]
        )  # in this order: half a secret would not be known for one
        ledger.add(row)
        screen.trial_done(row)

    def needs(point: Point) -> int | TrialRow:
        try:
            return ground.workers(config.but(**point))
        except ResourceError as error:
            return TrialRow(0, point, "infeasible", _line(error))
        except UserError as error:
            return TrialRow(0, point, "failed", _line(error))

    points = Points(
        source_of(sweep, config, prepared.plan, done, needs),
        done,
        sweep.num_trials,
        lambda row: row.score(sweep.objective),
        needs,
        record,
    )
    common = Common(
        config,
        ground.inventory,
        ground.cluster,
        Path.cwd(),
        ground.on_gpu,
        ground.cores,
        sweep.objective,
        sweep.trial_seconds,
        sweep.trial_steps,
        _SLICES if sweep.asha else 1,
        None
        if config.task in BUILT_IN or (":" in config.task and not config.task.startswith("python:"))
        else prepared.task,
        secrets_in([to_json(config), sweep.space.to_json(), *sweep.space.given], secrets),
    )
    _fit(sweep, ground, common, points, _Recorder(points, record, screen, asked), asked)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def source_of(
    sweep: Sweep,
    config: Config,
    plan: Plan,
    done: tuple[TrialRow, ...],
    needs: Callable[[Point], int | TrialRow],
) -> Source:
    """A list of points in its own order. Of a grid or of draws, points that cannot be tried come first, to be told at once; then
    trials with the same number of workers follow one another: workers are kept from one to the next."""
    if sweep.search == "optuna":
        return Optuna(
            sweep.space, config.run.seed, [] if done else [planned_point(sweep.space, config, plan)]
        )
    if sweep.search == "grid" and sweep.space.given:
        return Listed(sweep.space.given)
    points = (
        sweep.space.grid()
        if sweep.search == "grid"
        else list(islice(sweep.space.draws(config.run.seed), sweep.num_trials))
    )
    wanted = {point_key(point): needs(point) for point in points[: sweep.num_trials]}

    def workers(point: Point) -> int:
        want = wanted[point_key(point)]
        return 0 if isinstance(want, TrialRow) else want

    return Listed(sorted(points[: sweep.num_trials], key=workers))


def planned_point(space: Space, config: Config, plan: Plan) -> Point:
    """The point of the space next to what is asked for and the plan would choose: where a search begins."""
    flat: dict[str, Any] = {
        name: getattr(getattr(config, section), name) for name, section in flat_names().items() if section
    }
    chosen = (
        flat
        | {name: choice.value for name, choice in plan.choices().items()}
        | {"parallel_strategy": plan.strategy.value}
    )
    chosen |= {
        name: "on" if chosen.get(name) else "off" for name in space.domains if setting_types()[name] == Switch
    }
    point: dict[str, Any] = {}
    for name, domain in space.domains.items():
        value = chosen.get(name)
        if isinstance(domain, Values):
            point[name] = _nearest(domain.values, value)
        else:
            inside = (
                min(domain.high, max(domain.low, float(value)))
                if isinstance(value, int | float)
                else domain.low
            )
            point[name] = round(inside) if domain.integer else inside
    return point


def _nearest(values: tuple[Any, ...], value: Any) -> Any:
    numbers = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    if value in values or isinstance(value, bool) or not isinstance(value, int | float) or not numbers:
        return value if value in values else values[0]
    return min(numbers, key=lambda one: abs(one - value))


def _fit(
    sweep: Sweep,
    ground: Ground,
    common: Common,
    points: Points,
    recorder: _Recorder,
    asked: Callable[[], bool],
) -> None:
    bundle = {"GPU": 1.0} if ground.on_gpu else {"CPU": float(ground.cores)}
    # the leader of a trial has no bundle: Ray drops an empty one, and the workers' begin at 0
    resources = lambda config: PlacementGroupFactory([{}, *[bundle] * config["workers"]])  # noqa: E731
    scheduler = None
    if sweep.asha:
        scheduler = ASHAScheduler(
            time_attr="training_iteration", max_t=_SLICES, grace_period=1, reduction_factor=_HALVING
        )
    folder = tempfile.mkdtemp(prefix="sweep_")
    logger = logging.getLogger("ray.tune")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what becomes of a trial is told by its row
    try:
        tuner = Tuner(
            with_resources(with_parameters(Trial, common=common), resources),
            tune_config=TuneConfig(
                metric="score",
                mode="max",
                search_alg=points,
                scheduler=scheduler,
                num_samples=sweep.num_trials + 1,
                max_concurrent_trials=sweep.concurrent,
                reuse_actors=True,
                trial_name_creator=_name,
                trial_dirname_creator=_name,
            ),
            run_config=RunConfig(
                name="trials",
                storage_path=folder,
                verbose=0,
                callbacks=[recorder],
                stop=_Asked(asked),
                checkpoint_config=CheckpointConfig(checkpoint_at_end=False),
            ),
        )
        with unpropagated_variables("AWS_"):
            tuner.fit()
    finally:
        logger.setLevel(level)
        shutil.rmtree(folder, ignore_errors=True)


def _name(trial: Any) -> str:
    return f"trial_{trial.config['trial']}"


class _Kept:
    """What Tune pickles of us it never gets to use: a sweep goes on from its ledger."""

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ()


class _Asked(_Kept, Stopper):
    """Ends a sweep when someone wants it to end."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        return False

    def stop_all(self) -> bool:
        return self._asked()


def trial_error(trial: Any) -> str:
    """The last line of what Tune has written down of a trial's error; empty where it has nothing."""
    with suppress(OSError, TypeError, AttributeError):
        lines = Path(trial.error_file).read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


class _Recorder(_Kept, Callback):
    """Writes down what came of each trial, as soon as it is known."""

    def __init__(
        self,
        points: Points,
        record: Callable[[TrialRow], None],
        screen: SweepScreen,
        asked: Callable[[], bool],
    ) -> None:
        self._points, self._record, self._screen, self._asked = points, record, screen, asked

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:  # noqa: ARG002
        self._screen.trial_started(trial.config["trial"], trial.config["point"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:  # noqa: ARG002
        result = trial.last_result or {}
        row = parse_trial({"event": "trial", **result["row"]}) if "row" in result else None
        if row is None or (self._asked() and not result.get("ended")):
            return  # broken off: it will be tried again
        if not result.get("ended"):
            row = replace(row, status="stopped", reason="stopped early: others were better")
        self._told(trial, row)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:  # noqa: ARG002
        if self._asked():
            return
        config, told = trial.config, trial_error(trial)
        reason = f"the process that led the trial was lost{f': {told}' if told else ''}"
        self._told(
            trial, TrialRow(config["trial"], config["point"], "failed", reason, workers=config["workers"])
        )

    def _told(self, trial: Any, row: TrialRow) -> None:
        self._record(row)
        with suppress(Exception):
            self._points.told(trial.trial_id, row)
