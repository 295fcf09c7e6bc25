"""One trial of a sweep, as Ray Tune runs it: an actor without a device of its own, which leads the workers that have one. Workers
and what they imported are kept from trial to trial; they live in the trial's own placement group and end with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import ray
from ray.tune import Trainable
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from experts.actor_host import ExpertHost
from orchestrator.config.settings import Config
from orchestrator.config.space import Point
from orchestrator.errors import OrchestratorError, OutOfMemory, UserError
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import Inventory, secret_values
from orchestrator.record.ledger import TrialRow
from orchestrator.redaction import Secrets, longest_first
from orchestrator.types import first_line

if TYPE_CHECKING:
    from orchestrator.measure.trial import ThroughputTrial, TrialResult
    from orchestrator.plan.estimate import ModelFacts
    from orchestrator.plan.planning import Plan

_GRACE_SECONDS = 2.0  # for the others to fail too, once one has
_RENEW_AFTER = (
    40  # trials that a group of workers is kept for: each leaves the sockets of its process group open
)
_OF_THE_BATCH = {"batch_size", "accumulation_steps", "global_batch_size", "workers"}
_FACTS: dict[str, Any] = {}
"""Facts of models that this process has traced; trials of a sweep differ in few settings that matter to them."""


@dataclass(frozen=True)
class Common:
    """What all trials of a sweep have in common."""

    config: Config
    inventory: Inventory
    cluster: Cluster
    folder: Path
    on_gpu: bool
    cores: int
    """Of each worker."""
    objective: str
    seconds: float
    steps: int | None
    """That a trial trains, where that was asked for; else those of its own run."""
    slices: int
    """Parts that a trial is run in; after each it may be stopped, others being better."""
    task: Any = None
    """A task that cannot be loaded by its name."""
    secrets: Secrets = field(default=(), repr=False)
    """Of the driver's environment, those that the settings hold."""

    @property
    def hidden(self) -> Secrets:
        return longest_first(self.secrets, secret_values())


# --- the leader


class Trial(Trainable):
    """A trial. Nothing that a worker does ends the actor: a trial that fails is a row of the table."""

    def setup(self, config: dict[str, Any], common: Common | None = None) -> None:
        assert common is not None
        self._common, self._gang, self._trials = common, _Gang(common, config["workers"]), 0
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._trials += 1
        if self._trials % _RENEW_AFTER == 0:
            self._gang.end()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._number, self._point, self._workers = config["trial"], config["point"], config["workers"]
        self._begun, self._opened = perf_counter(), False

    def step(self) -> dict[str, Any]:
        """A slice of the trial."""
        try:
            if not self._opened:
                self._gang.open(self._point)
                self._opened = True
            measured, facts = self._gang.advance(1 / self._common.slices)
        except _Failed as failure:
            row = TrialRow(
                self._number, self._point, failure.status, failure.reason, self._took(), workers=self._workers
            )
            return _report(row, self._common, done=True)
        row = measured_row(
            TrialRow(self._number, self._point, "completed", "", self._took(), workers=self._workers),
            measured,
            facts,
        )
        if measured.done:
            self._gang.close()
        return _report(row, self._common, measured.done)

    def _took(self) -> float:
        return perf_counter() - self._begun

    def cleanup(self) -> None:
        self._gang.end()


def measured_row(row: TrialRow, measured: TrialResult, facts: dict[str, Any]) -> TrialRow:
    names = (
        "samples_per_second",
        "interval",
        "units_per_second",
        "step_seconds",
        "steps",
        "peak_memory_bytes",
        "phases",
        "train_loss",
    )
    figures = {name: getattr(measured, name) for name in (*names, "validation_loss")}
    if not math.isfinite(measured.interval):  # of a single block of steps there is none
        figures["interval"] = None
    return replace(row, start_seconds=max(0.0, row.seconds - measured.seconds), **figures, **facts)


def _report(row: TrialRow, common: Common, done: bool) -> dict[str, Any]:
    """What Tune is told: a score, the larger the better (of throughput, that of one device: trials on few are not to be stopped
    for being few), and the row for the ledger. ``ended`` is our word for done: Tune's own
    is also said of trials that it stops."""
    score = row.score(common.objective)
    if score is None:  # nothing to compare others with
        return {"row": asdict(row), "ended": done, "done": done}
    each = score / max(1, row.workers or 1) if common.objective == "throughput" else score
    return {"score": each, "row": asdict(row), "ended": done, "done": done}


class _Failed(Exception):
    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class _Gang:
    """The workers of a trial, one for each bundle of its placement group. Made when they are first needed, and again after one was
    lost or left the others waiting."""

    def __init__(self, common: Common, size: int) -> None:
        self._common, self._size = common, size
        self._sent = ray.put(common)
        self._actors: list[Any] = []

    def open(self, point: Point) -> None:
        if not self._actors:
            group = get_current_placement_group()
            assert group is not None, "a trial runs in a placement group of its own"
            self._actors = [self._worker(group, rank) for rank in range(self._size)]
        patience = self._common.config.parallel.resource_timeout
        place = self._answers([self._actors[0].rendezvous_address.remote()], patience)[0]
        self._answers(
            [
                actor.open.remote(trial_work, self._sent, dict(point), place, rank, self._size)
                for rank, actor in enumerate(self._actors)
            ]
        )

    def _worker(self, group: PlacementGroup, rank: int) -> Any:
        where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
        return ExpertHost.options(  # pyright: ignore[reportAttributeAccessIssue]
            num_cpus=0 if self._common.on_gpu else self._common.cores,
            num_gpus=1 if self._common.on_gpu else 0,
            scheduling_strategy=where,
            max_restarts=0,
        ).remote()

    def advance(self, part: float) -> tuple[TrialResult, dict[str, Any]]:
        return self._answers([actor.advance.remote(part) for actor in self._actors])[0]

    def close(self) -> None:
        """Let the workers put away what they measured with. What goes wrong then is not the trial's fault: the next gets new ones."""
        try:
            self._answers([actor.close.remote() for actor in self._actors])
        except _Failed:
            self.end()

    def _answers(self, calls: list[Any], patience_s: float | None = None) -> list[Any]:
        """What all workers answer. Where one fails, the others may wait for it: they are ended, and the next trial gets new ones."""
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=patience_s)
            if not done:
                self.end()
                raise _Failed(
                    "failed",
                    f"workers did not start within {patience_s:.0f} s: a node of the trial may be lost",
                )
            if any(_error(call) is not None for call in done):
                ray.wait(waiting, num_returns=len(waiting), timeout=_GRACE_SECONDS) if waiting else None
                raise self._failure(calls)
        return ray.get(calls)

    def _failure(self, calls: list[Any]) -> _Failed:
        ended, under_way = ray.wait(calls, num_returns=len(calls), timeout=0)
        told = [
            _trial_failure(rank, error)
            for rank, call in enumerate(calls)
            if call in ended and (error := _error(call)) is not None
        ]
        told_by_us = all(failure.status in ("out_of_memory", "refused") for failure in told)
        if (
            under_way or self._size > 1 or not told_by_us
        ):  # a process that failed otherwise may be damaged: CUDA's errors stick
            self.end()
        order = ("out_of_memory", "refused", "failed", "lost", "silence")
        cause = min(told, key=lambda failure: order.index(failure.status))
        return cause if cause.status == "out_of_memory" else _Failed("failed", cause.reason)

    def end(self) -> None:
        for actor in self._actors:
            with suppress(Exception):
                ray.kill(actor)
        self._actors = []


def _error(call: Any) -> BaseException | None:
    try:
        ray.get(call)
    except Exception as error:
        return error
    return None


_STATUSES = {"worker": "lost", "memory": "out_of_memory", "communication": "silence", "error": "refused"}
"""Statuses by the kind of a worker's failure; all other kinds are ``failed``."""


def _trial_failure(rank: int, error: BaseException) -> _Failed:
    """Return the failure of a worker as a status and one line."""
    from orchestrator.runtime.failures import cause_of, classify
    from orchestrator.train.parts.memory import is_out_of_memory

    cause = cause_of(error)
    if is_out_of_memory(cause) or (isinstance(cause, OrchestratorError) and "out of memory" in str(cause)):
        error = OutOfMemory(first_line(cause))
    failure = classify(error, rank)
    status = _STATUSES.get(failure.kind, "failed")
    if status == "lost":
        return _Failed(status, f"{failure.message}: its process ended, or was killed for lack of memory")
    if status == "silence":
        return _Failed(status, "workers lost contact with each other")
    return _Failed(status, first_line(failure.message))


# --- a worker


class _Measuring:
    """What a worker works at: a slice of the measurement at a time."""

    def __init__(self, measurement: ThroughputTrial, facts: dict[str, Any]) -> None:
        self._measurement, self._facts = measurement, facts

    def advance(self, part: float) -> tuple[TrialResult, dict[str, Any]]:
        return self._measurement.advance(part), self._facts


@contextmanager
def trial_work(
    common: Common, point: Point, place: tuple[str, int], rank: int, size: int
) -> Iterator[_Measuring]:
    """A worker of a trial, from its start to its end."""
    from orchestrator.runtime.bootstrap import masked_errors

    with masked_errors(common.hidden), _trial_work(common, point, place, rank, size) as measuring:
        yield measuring


@contextmanager
def _trial_work(
    common: Common, point: Point, place: tuple[str, int], rank: int, size: int
) -> Iterator[_Measuring]:
    from orchestrator.measure.trial import TrialLimits, open_trial
    from orchestrator.runtime.bootstrap import enter_working_dir
    from orchestrator.tasks.load import load_task

    config = common.config.but(**point)
    enter_working_dir(common.folder, config.parallel.nccl_debug, common.hidden)
    task = common.task or load_task(config)
    plan, facts = _planned(common, config, task)
    check_batch(config, point, size, facts.samples)
    with _world(config, plan, place, rank, size) as world:
        limits = TrialLimits(
            common.seconds, plan.total_steps.value if common.objective == "validation_loss" else None
        )
        with open_trial(config, plan, facts, task, world, limits) as measuring:
            yield _Measuring(measuring, _facts_of(plan, facts, size))


def _planned(common: Common, config: Config, task: Any) -> tuple[Plan, ModelFacts]:
    """The plan of the trial, as ``train`` would make it; the cores are those that the trial was given."""
    from orchestrator.measure.model_facts import model_facts
    from orchestrator.plan.compute import choose_precision
    from orchestrator.plan.device import choose_worker_device
    from orchestrator.plan.planning import plan
    from orchestrator.plan.schedule import choose_loader_workers
    from orchestrator.types import Choice

    found = common.inventory if common.on_gpu else replace(common.inventory, gpus=())
    device = choose_worker_device(config, found, common.cluster.gpus).value if common.on_gpu else "cpu"
    precision = choose_precision(config, found, device).value
    key = repr((replace(config, batch=Config().batch, parallel=Config().parallel), precision, device))
    if key not in _FACTS:
        _FACTS[key] = model_facts(task, device, precision)
    facts = _FACTS[key]
    made = plan(config, found, facts, None, common.cluster)
    threads = Choice(common.cores, "the cores that each worker of a trial is given")
    made = replace(
        made, threads=threads, loader_workers=choose_loader_workers(config, facts, device, threads)
    )
    if common.steps is not None:
        made = replace(made, total_steps=Choice(common.steps, "--trial-steps"))
    return made, facts


def check_batch(config: Config, point: Point, workers: int, samples: int) -> None:
    """A step of more samples than there are is cut, as ``train`` cuts it, and would be another trial than its row says."""
    asked, parts = config.batch.batch_size, config.batch.accumulation_steps or 1
    whole = config.batch.global_batch_size or (asked * parts * workers if isinstance(asked, int) else 0)
    if whole > samples and point.keys() & _OF_THE_BATCH:
        made = f"--batch-size {asked} × --accumulation-steps {parts} × {workers} workers"
        named = "--global-batch-size" if config.batch.global_batch_size else made
        raise UserError(
            f"a step of {whole:,} samples ({named}) is more than the {samples:,} that the data has; try smaller ones"
        )


@contextmanager
def _world(config: Config, plan: Plan, place: tuple[str, int], rank: int, size: int) -> Iterator[Any]:
    import torch

    from orchestrator.train.parts.stores import tcp_store
    from orchestrator.train.parts.world import World, process_group_world

    on_gpu = plan.device.value != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")  # an actor sees its own GPU alone
    if plan.strategy.value == "single":
        yield World.single_process(device)
        return
    patience = config.parallel.step_timeout_s(hosts=False)
    store = tcp_store(*place, size, rank == 0, patience)
    with process_group_world(store, rank, size, device, plan.backend.value, patience) as world:
        yield world


def _facts_of(plan: Plan, facts: ModelFacts, size: int) -> dict[str, Any]:
    """What the plan made of the point, for the table."""
    return {
        "workers": size,
        "device": "cpu" if plan.device.value == "cpu" else "gpu",
        "strategy": plan.strategy.value,
        "precision": plan.precision.value,
        "batch_size": plan.batch_size.value,
        "accumulation_steps": plan.accumulation_steps.value,
        "global_batch_size": plan.global_batch_size.value,
        "compile": plan.compile.value,
        "unit": facts.unit,
    }
