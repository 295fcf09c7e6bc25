"""The evaluation of a checkpoint on workers under Ray Train, data parallel or expert parallel.

It has no state that could be lost, so there is no recovery: if a worker is lost, it begins again, once."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import ray
from ray.train import get_context

from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.live.screen.evaluation_screen import EvaluationScreen
from orchestrator.plan.inventory.cluster import Cluster
from orchestrator.plan.inventory.hardware import secret_values
from orchestrator.plan.workers import uses_gpus
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.runtime.bootstrap import (
    NONCE_FILE,
    Assignment,
    masked_errors,
    prepare_worker,
    worker_folder,
)
from orchestrator.runtime.cluster.session import wait_for_slots
from orchestrator.runtime.data_parallel.fit import WorkerGroup
from orchestrator.runtime.data_parallel.worker import form_world
from orchestrator.runtime.driver import make_assignment, placement_groups, remove_groups_since
from orchestrator.runtime.failures import final_error
from orchestrator.runtime.recovery import GiveUp
from orchestrator.runtime.shared_folder import open_link
from orchestrator.tasks.generation import GenerationOptions
from orchestrator.train.remote.opened_checkpoint import OpenedCheckpoint
from orchestrator.types import counted

_POLL_SECONDS = 0.1
_PROGRESS_FILE = "progress"
_ATTEMPTS = 2
_RETRIED = ("worker", "communication")
"""Failures that need not happen again."""


@dataclass(frozen=True)
class EvaluationJob:
    """An evaluation of one split of the data on a checkpoint."""

    folder: Path
    """The folder of the driver that the workers write to."""
    checkpoint: OpenedCheckpoint
    split: str
    options: GenerationOptions


def evaluate_on_workers(
    prepared: PreparedRun, cluster: Cluster, job: EvaluationJob, screen: EvaluationScreen
) -> dict[str, Any]:
    """Evaluate a checkpoint; return what ``evaluate_checkpoint`` does.

    Where a node does not see the driver's copy of a remote checkpoint, each node downloads its own."""
    config = prepared.resolved.config
    logs = job.folder / "logs"
    logs.mkdir()
    (logs / NONCE_FILE).write_text(uuid.uuid4().hex, encoding="utf-8")
    workers = prepared.plan.workers.value
    gpu = uses_gpus(config, cluster)
    if cluster.autoscaling:
        wait_for_slots(workers, gpu, config.parallel.resource_timeout, screen.note)
    remote = job.checkpoint.remote
    link = open_link(job.folder, remote, gpu) if remote is not None else None
    if link is not None:
        screen.note("the nodes share no disk: each of them downloads the checkpoint")
    name = job.checkpoint.name
    work = partial(evaluate_worker, checkpoint=name, split=job.split, options=job.options)
    assignment = replace(make_assignment(prepared, job.folder), link=link)
    attempts_left = _ATTEMPTS
    while True:
        screen.note(f"starting {counted(workers, 'worker')} ...")
        groups_before = placement_groups()
        with closing(WorkerGroup(work, assignment, workers, gpu)) as group:
            while not group.wait(_POLL_SECONDS):
                _show_progress(job.folder / _PROGRESS_FILE, screen)
        failure = group.failure
        if failure is None:
            return group.value
        remove_groups_since(groups_before)
        attempts_left -= 1
        if failure.kind not in _RETRIED or not attempts_left:
            reason = f"{failure.message}; the checkpoint is as it was: start the evaluation again"
            raise final_error(failure, group.error, GiveUp(reason))
        screen.note(f"{failure.message}: the evaluation begins again")
        if cluster.autoscaling:
            wait_for_slots(workers, gpu, config.parallel.resource_timeout, screen.note)


def evaluate_worker(
    config: dict[str, Any], checkpoint: str, split: str, options: GenerationOptions
) -> dict[str, Any]:
    """Evaluate as one worker. The driver receives the result of rank 0, and the exception of any rank.

    ``checkpoint`` is its name in the remote folder, if there is one."""
    from orchestrator.train.worker.checkpoint_evaluation import evaluate_checkpoint

    context = get_context()
    rank = context.get_world_rank()
    with masked_errors(secret_values()):
        assignment: Assignment = ray.get(config["assignment"])
    with masked_errors(assignment.prepared.hidden), worker_folder(assignment, rank) as folder:
        assignment = folder.assignment
        prepared = _prepare(assignment, rank, split)
        store = None
        if assignment.link is not None:
            store = folder.open_store(assignment.run_dir / "checkpoints", repair=False)
            prepared = _with_downloaded(prepared, store, checkpoint)
        on_batch = _progress_writer(assignment.run_dir, rank)
        with form_world(prepared, rank, context.get_world_size(), assignment.secret) as world:
            return evaluate_checkpoint(prepared, world, on_batch, options, store)


def _with_downloaded(prepared: PreparedRun, store: CheckpointStore, checkpoint: str) -> PreparedRun:
    """Return the run with the copy of the checkpoint that this node has downloaded."""
    path = store.fetch_named(checkpoint)
    resolved = prepared.resolved
    return replace(prepared, resolved=replace(resolved, config=resolved.config.but(resume=str(path))))


def _prepare(assignment: Assignment, rank: int, split: str) -> PreparedRun:
    """Return the run as this worker sees it, with the split as its validation data."""
    from orchestrator.tasks.split import with_split

    prepared = prepare_worker(assignment, rank)
    if assignment.prepared.task is None:
        prepared = replace(prepared, task=with_split(prepared.task, split))
    return prepared


def _progress_writer(folder: Path, rank: int) -> Callable[[int, int | None], None]:
    """Return a function that tells the driver how many batches are done."""
    next_s = 0.0

    def write(done: int, total: int | None) -> None:
        nonlocal next_s
        if rank == 0 and monotonic() >= next_s:
            next_s = monotonic() + _POLL_SECONDS
            with suppress(OSError):  # progress is for people alone
                (folder / _PROGRESS_FILE).write_text(f"{done} {total or 0}", encoding="utf-8")

    return write


def _show_progress(path: Path, screen: EvaluationScreen) -> None:
    # No file yet, or one that is being written.
    with suppress(OSError, ValueError):
        done, total = path.read_text(encoding="utf-8").split()
        screen.progress(int(done), int(total) or None)
