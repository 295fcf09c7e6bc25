"""A worker of a trial: it plans the point as ``train`` would, and measures its steps a slice at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from orchestrator.config.settings import Config
from orchestrator.config.sweep.objective import THROUGHPUT, VALIDATION_LOSS, read_objective
from orchestrator.config.sweep.space import Point
from orchestrator.errors import UserError
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import Inventory, secret_values
from orchestrator.redaction import Secrets, longest_first
from orchestrator.types import Choice

# The leader of a trial imports this module too and needs no torch: imports that need it are inside
# functions.
if TYPE_CHECKING:
    from orchestrator.measure.trial import ThroughputTrial, TrialResult
    from orchestrator.plan.estimate import ModelFacts
    from orchestrator.plan.planning import Plan
    from orchestrator.train.group.world import World

_BATCH_SETTINGS = {"batch_size", "accumulation_steps", "global_batch_size", "workers"}
_MODEL_FACTS: dict[str, ModelFacts] = {}
"""Facts of the models that this process has traced. Few settings of a sweep change them, and
tracing takes seconds."""


@dataclass(frozen=True)
class TrialSetup:
    """The data that all trials of a sweep share."""

    config: Config
    inventory: Inventory
    cluster: Cluster
    working_dir: Path
    on_gpu: bool
    cores: int
    """Cores of each worker."""
    objective: str
    seconds: float
    """Longest measurement of a trial."""
    steps: int | None
    """Steps that a trial trains; None: those of its own run."""
    slices: int
    """Parts in which a trial runs; after each, ASHA may stop it."""
    task: Any = None
    """A task that cannot be loaded by its name."""
    secrets: Secrets = field(default=(), repr=False)
    """Secrets of the driver's environment that the settings hold."""
    store_secret: str = field(default_factory=token_hex, repr=False)
    """The secret by which the workers of a trial recognise each other's values in the rendezvous store."""

    @property
    def hidden(self) -> Secrets:
        """The secrets to mask: the driver's, and those of this process's environment."""
        return longest_first(self.secrets, secret_values())


class _TrialWorker:
    """The work of a host: a slice of the measurement at a time."""

    def __init__(self, trial: ThroughputTrial, plan_fields: dict[str, Any]) -> None:
        self._trial = trial
        self._plan_fields = plan_fields

    def run_segment(self, part: float) -> tuple[TrialResult, dict[str, Any]]:
        return self._trial.run_part(part), self._plan_fields


@contextmanager
def run_trial_worker(
    setup: TrialSetup, point: Point, address: tuple[str, int], rank: int, size: int
) -> Iterator[_TrialWorker]:
    """Prepare one worker of the trial of a point, and release it at the end.

    ``address`` is the rendezvous.
    """
    from orchestrator.runtime.bootstrap import masked_errors

    with masked_errors(setup.hidden), _open_worker(setup, point, address, rank, size) as worker:
        yield worker


@contextmanager
def _open_worker(
    setup: TrialSetup, point: Point, address: tuple[str, int], rank: int, size: int
) -> Iterator[_TrialWorker]:
    from orchestrator.measure.trial import TrialLimits, open_trial
    from orchestrator.runtime.bootstrap import enter_working_dir
    from orchestrator.tasks.load import load_task

    config = setup.config.but(**point)
    enter_working_dir(setup.working_dir, config.parallel.nccl_debug, setup.hidden)
    task = setup.task or load_task(config)
    plan, facts = _plan_trial(setup, config, task)
    check_batch(config, point, size, facts.samples)
    limits = TrialLimits(setup.seconds)
    if setup.objective != THROUGHPUT:
        metric = None if setup.objective == VALIDATION_LOSS else read_objective(setup.objective).name
        if plan.total_steps.value is None:
            raise UserError(
                f"--objective {setup.objective} needs a number of steps, and the data does not tell "
                "its length; give --trial-steps"
            )
        limits = TrialLimits(setup.seconds, plan.total_steps.value, metric)
    with (
        _open_world(config, plan, address, rank, size, setup.store_secret) as world,
        open_trial(config, plan, facts, task, world, limits) as trial,
    ):
        yield _TrialWorker(trial, _plan_fields(plan, facts, size))


def _plan_trial(setup: TrialSetup, config: Config, task: Any) -> tuple[Plan, ModelFacts]:
    """Return the plan that ``train`` would make, with the cores of a trial's worker."""
    from orchestrator.measure.tracing.model_facts import model_facts
    from orchestrator.plan.compute import choose_precision
    from orchestrator.plan.device import choose_worker_device
    from orchestrator.plan.planning import plan
    from orchestrator.plan.schedule import choose_loader_workers

    inventory = setup.inventory if setup.on_gpu else replace(setup.inventory, gpus=())
    device = "cpu"
    if setup.on_gpu:
        device = choose_worker_device(config, inventory, setup.cluster.gpus).value
    precision = choose_precision(config, inventory, device).value
    # Batch and parallelism do not change the model.
    model_config = replace(config, batch=Config().batch, parallel=Config().parallel)
    key = repr((model_config, precision, device))
    if key not in _MODEL_FACTS:
        _MODEL_FACTS[key] = model_facts(task, device, precision, short_weights=config.device.short_weights)
    facts = _MODEL_FACTS[key]
    threads = trial_threads(setup)
    loader_workers = choose_loader_workers(config, facts, device, threads)
    result = plan(config, inventory, facts, None, setup.cluster)
    threads = result.threads if config.run.reproducible else threads
    result = replace(result, threads=threads, loader_workers=loader_workers)
    if setup.steps is not None:
        result = replace(result, total_steps=Choice(setup.steps, "--trial-steps"))
    return result, facts


def trial_threads(setup: TrialSetup) -> Choice[int]:
    """Return the threads of each worker: one for each of its cores, or fewer if the user has set fewer.

    Ray sets OMP_NUM_THREADS in the processes of a trial; the user's is that of the driver."""
    given = setup.inventory.omp_threads
    if given is None or given >= setup.cores:
        return Choice(setup.cores, "the cores of each worker of a trial")
    return Choice(given, f"set by OMP_NUM_THREADS={given}")


def check_batch(config: Config, point: Point, workers: int, samples: int | None) -> None:
    """Raise UserError for a step of more samples than the data has.

    ``train`` would cut such a step, and the trial would not be the one that its row describes.
    """
    size = config.batch.batch_size
    accumulation = config.batch.accumulation_steps or 1
    product = size * accumulation * workers if isinstance(size, int) else 0
    total = config.batch.global_batch_size or product
    if samples is not None and total > samples and point.keys() & _BATCH_SETTINGS:
        factors = f"--batch-size {size} × --accumulation-steps {accumulation} × {workers} workers"
        flags = "--global-batch-size" if config.batch.global_batch_size else factors
        raise UserError(
            f"a step of {total:,} samples ({flags}) is more than the {samples:,} that the data has; "
            "try smaller ones"
        )


@contextmanager
def _open_world(
    config: Config, plan: Plan, address: tuple[str, int], rank: int, size: int, secret: str
) -> Iterator[World]:
    import torch

    from orchestrator.train.group.stores import tcp_store
    from orchestrator.train.group.world import World, process_group_world

    on_gpu = plan.device.value != "cpu" and torch.cuda.is_available()
    # Ray shows an actor its own GPU only.
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if plan.strategy_facts.in_process:
        yield World.single_process(device)
        return
    timeout_s = config.parallel.step_timeout_s(hosts=False)
    store = tcp_store(*address, rank == 0, timeout_s, secret)
    with process_group_world(store, rank, size, device, plan.backend.value, timeout_s, secret) as world:
        yield world


def _plan_fields(plan: Plan, facts: ModelFacts, size: int) -> dict[str, Any]:
    """Return the plan's choices for the row of the ledger."""
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
