"""Turn the exceptions of workers into failures that the recovery decisions understand.

This module does not import Ray, so that it can be tested without a cluster: Ray's exceptions are
recognised by the names of their classes. ``tests/runtime/test_failures.py`` checks those names
against the installed Ray."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import OrchestratorError, OutOfMemory, ResourceError, TaskFailed, TrainingFailed
from orchestrator.runtime.recovery import Failure, FailureKind, GiveUp, LossCause, root_cause
from orchestrator.train.group.comm_errors import is_communication_error
from orchestrator.types import first_line

_TRAIN_WRAPPERS = {
    "UserExceptionWithTraceback": "_base_exc",
    "WorkerHealthCheckFailedError": "health_check_failure",
}
"""Ray Train's exceptions that hold another one, and the attribute that holds it."""
_DEATHS = {"RayActorError", "WorkerHealthCheckTimeoutError", "WorkerHealthCheckFailedError"}


class HostsDeadlocked(Exception):
    """All hosts of a group wait for each other."""


def classify(
    error: BaseException, rank: int, *, noun: str = "worker", retry_task_errors: bool = False
) -> Failure:
    """Return the failure of one worker, given the exception that its call raised.

    ``noun`` names the worker in messages. An error in the user's task is final, unless
    ``retry_task_errors``: then it counts as a fault of unknown cause, which may not happen again."""
    name = f"{noun} {rank}"
    if _process_died(error):
        return Failure("worker", f"{name} was lost", rank, loss="died")
    cause = cause_of(error)
    if isinstance(cause, OutOfMemory):
        return Failure("memory", str(cause), rank, cause.micro_batch)
    if isinstance(cause, OrchestratorError):
        retried = retry_task_errors and isinstance(cause, TaskFailed)
        return Failure("fault" if retried else "error", str(cause), rank)
    # After an error of CUDA's own, other than one of memory, the process is unusable.
    loss = "device" if "CUDA error" in str(cause) else None
    if isinstance(cause, HostsDeadlocked) or is_communication_error(cause):
        # The worker that waited in vain is not the one that failed, so the failure has no rank.
        message = "workers lost contact with each other: one is frozen, dead or unreachable (see logs/)"
        return Failure("communication", message, loss=loss)
    return Failure("fault", f"{name}: {type(cause).__name__}: {first_line(cause)}", rank, loss=loss)


def classify_group(error: BaseException) -> tuple[Failure, BaseException]:
    """Return the failure that ended a group of Ray Train workers, and the error to show."""
    names = _type_names(error)
    if "WorkerGroupError" not in names:
        kind: FailureKind = "resources" if "TrainingFailedError" in names else "error"
        return Failure(kind, first_line(getattr(error, "controller_failure", error))), error
    by_rank: dict[int, BaseException] = dict(sorted(getattr(error, "worker_failures").items()))  # noqa: B009
    failure = root_cause([classify(raised, rank) for rank, raised in by_rank.items()])
    raised = error if failure.rank is None else by_rank[failure.rank]
    return failure, error_for_user(raised, failure)


def merge_deaths(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Merge the deaths of hosts into one failure that names all, before the other failures.

    One cause, such as a lost node, may have killed them all."""
    ranks = sorted(
        failure.rank for failure in failures if failure.loss == "died" and failure.rank is not None
    )
    others = tuple(failure for failure in failures if failure.loss != "died")
    if not ranks:
        return others
    return (Failure("worker", _lost_hosts_text(ranks), ranks[0], loss="died"), *others)


def _lost_hosts_text(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return f"hosts {', '.join(first)} and {last} were lost" if first else f"host {last} was lost"


def lost_host(rank: int, cause: LossCause, detail: str) -> Failure:
    """Return the loss of a host whose process still exists: another host may replace it."""
    return Failure("worker", f"host {rank} {detail}", rank, loss=cause)


def error_for_user(raised: BaseException, failure: Failure) -> BaseException:
    """Return the error to show for a failure: a known one as it is, a bug with its traceback."""
    cause = cause_of(raised)
    if isinstance(cause, OrchestratorError):
        return cause
    return TrainingFailed(f"{failure.message}\n{raised}")


def final_error(failure: Failure, error: BaseException | None, decision: GiveUp) -> BaseException:
    """Return the error that ends a run: the worker's own, or the reason to give up."""
    if failure.kind in ("error", "fault") and error is not None:
        return error
    if failure.kind in ("resources", "memory"):
        return ResourceError(decision.reason)
    return TrainingFailed(decision.reason)


def cause_of(error: BaseException) -> BaseException:
    """Return the exception that a worker raised, without the wrappers that Ray puts around it."""
    inner = _without_train_wrappers(error)
    return getattr(inner, "cause", inner) if "RayTaskError" in _type_names(inner) else inner


def _process_died(error: BaseException) -> bool:
    names = _type_names(_without_train_wrappers(error))
    # A RayTaskError that is a RayActorError too: the worker lives, and another actor has died.
    return bool(names & _DEATHS) and "RayTaskError" not in names


def _without_train_wrappers(error: BaseException) -> BaseException:
    for wrapper, attribute in _TRAIN_WRAPPERS.items():
        if wrapper in _type_names(error):
            error = getattr(error, attribute)
    return error


def _type_names(error: BaseException) -> set[str]:
    return {base.__name__ for base in type(error).__mro__}
