"""The classification of workers' exceptions, with the exceptions of the installed Ray."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.train import WorkerGroupError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2.api.exceptions import ControllerError

from experts.hosts.membership import GroupLeft
from orchestrator.errors import OutOfMemory, ResourceError, TaskFailed, TrainingFailed, UserError
from orchestrator.runtime.failures import (
    HostsDeadlocked,
    cause_of,
    classify,
    classify_group,
    error_for_user,
    final_error,
    lost_host,
    merge_deaths,
)
from orchestrator.runtime.recovery import Failure, GiveUp

CONNECTION_CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")


def raised_by_task(error: Exception) -> BaseException:
    """Return the exception that ``ray.get`` raises when an actor call raised ``error``."""
    return RayTaskError(
        "run_segment", "Traceback …", error, "ray::host", 1, "127.0.0.1"
    ).as_instanceof_cause()


def raised_by_train_worker(error: Exception) -> Any:
    return UserExceptionWithTraceback(error, f"Traceback …\n{type(error).__name__}: {error}")


def test_the_module_does_not_import_ray() -> None:
    program = "import sys, orchestrator.runtime.failures; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# One worker


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        WorkerHealthCheckTimeoutError("no answer"),
        WorkerHealthCheckFailedError("the health check failed", ActorDiedError()),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_dead_process_is_a_lost_worker(error: BaseException) -> None:
    assert classify(error, 1) == Failure("worker", "worker 1 was lost", 1, loss="died")
    assert classify(error, 1, noun="host").message == "host 1 was lost"


def test_a_worker_that_met_another_dead_actor_is_not_lost() -> None:
    failure = classify(raised_by_task(ActorDiedError()), 1)
    assert (failure.kind, failure.loss) == ("fault", None)


@pytest.mark.parametrize("wrap", [raised_by_task, raised_by_train_worker, lambda error: error])
def test_the_cause_is_found_inside_rays_wrappers(wrap: Any) -> None:
    error = UserError("no such column")
    assert cause_of(wrap(error)) is error
    assert classify(wrap(error), 2) == Failure("error", "no such column", 2)
    assert cause_of(WorkerHealthCheckFailedError("failed", error)) is error


def test_out_of_memory_reports_the_micro_batch() -> None:
    failure = classify(raised_by_task(OutOfMemory("worker 2 ran out", 8)), 2)
    assert failure == Failure("memory", "worker 2 ran out", 2, 8)


@pytest.mark.parametrize(
    "error", [CONNECTION_CLOSED, GroupLeft("the group was left"), HostsDeadlocked("all wait")], ids=str
)
def test_a_communication_error_blames_no_rank(error: Exception) -> None:
    failure = classify(error, 2)
    assert (failure.kind, failure.rank, failure.loss) == ("communication", None, None)


def test_an_error_of_the_users_task_is_final_unless_it_may_be_retried() -> None:
    error = TaskFailed("KeyError: 'a'")
    assert classify(error, 0) == Failure("error", "KeyError: 'a'", 0)
    assert classify(error, 0, retry_task_errors=True) == Failure("fault", "KeyError: 'a'", 0)
    assert classify(UserError("wrong flag"), 0, retry_task_errors=True).kind == "error"


def test_an_unknown_exception_is_a_fault_with_its_first_line() -> None:
    failure = classify(ValueError("first\nsecond"), 3, noun="host")
    assert failure == Failure("fault", "host 3: ValueError: first", 3)


@pytest.mark.parametrize(
    "message", ["CUDA error: misaligned address", "NCCL failed: CUDA error: unspecified"]
)
def test_a_cuda_error_loses_the_device(message: str) -> None:
    assert classify(RuntimeError(message), 1).loss == "device"
    assert classify(OutOfMemory(message, 4), 1).loss is None, "memory comes back when the work is smaller"


# Several workers


def test_deaths_are_merged_by_their_cause_and_not_by_their_message() -> None:
    stuck = lost_host(2, "stuck", "was lost")
    died = [Failure("worker", "any words", rank, loss="died") for rank in (3, 0, 1)]
    other = Failure("fault", "host 4: OSError", 4)
    merged = merge_deaths([died[0], stuck, *died[1:], other])
    assert merged == (
        Failure("worker", "hosts 0, 1 and 3 were lost", 0, loss="died"),
        stuck,
        other,
    )
    assert merge_deaths([died[0]])[0].message == "host 3 was lost"
    assert merge_deaths([stuck, other]) == (stuck, other)


def failure_of(errors: dict[int, Any]) -> Failure:
    return classify_group(WorkerGroupError("failed", errors))[0]


def test_the_root_cause_among_the_workers_of_ray_train() -> None:
    closed = raised_by_train_worker(CONNECTION_CLOSED)
    lost = failure_of({0: closed, 1: ActorDiedError()})
    assert (lost.kind, lost.rank) == ("worker", 1)
    assert failure_of({0: closed}).kind == "communication"
    exhausted = failure_of({0: closed, 2: raised_by_train_worker(OutOfMemory("worker 2 ran out", 8))})
    assert (exhausted.kind, exhausted.micro_batch) == ("memory", 8)
    task_error = raised_by_train_worker(TaskFailed("KeyError: 'a'"))
    assert failure_of({0: task_error, 1: task_error, 2: closed}).kind == "error"


def test_an_error_of_ray_train_itself_is_one_of_resources() -> None:
    failure, error = classify_group(ControllerError(TimeoutError("no placement group\nin time")))
    assert failure == Failure("resources", "no placement group")
    assert isinstance(error, ControllerError)
    assert classify_group(OSError("disk"))[0] == Failure("error", "disk")


# The error that the user sees


def shown_for(errors: dict[int, Any], reason: str = "gave up") -> BaseException:
    failure, error = classify_group(WorkerGroupError("failed", errors))
    return final_error(failure, error, GiveUp(reason))


def test_the_users_own_error_is_shown_as_it_was_raised() -> None:
    error = shown_for({0: raised_by_train_worker(TaskFailed("KeyError: 'a'"))})
    assert isinstance(error, TaskFailed)
    assert str(error) == "KeyError: 'a'"


def test_a_bug_is_shown_with_its_traceback() -> None:
    error = shown_for({1: raised_by_train_worker(ZeroDivisionError("division by zero"))})
    assert isinstance(error, TrainingFailed)
    assert "worker 1: ZeroDivisionError: division by zero" in str(error)
    assert "Traceback" in str(error)
    raised = raised_by_task(ValueError("wrong"))
    shown = error_for_user(raised, Failure("fault", "host 0: wrong", 0))
    assert str(shown) == f"host 0: wrong\n{raised}"


def test_other_failures_are_shown_by_the_reason_to_give_up() -> None:
    lost = shown_for({1: ActorDiedError()}, "worker 1 was lost; no restart is allowed")
    assert isinstance(lost, TrainingFailed)
    assert str(lost) == "worker 1 was lost; no restart is allowed"
    exhausted = shown_for({0: raised_by_train_worker(OutOfMemory("worker 0 ran out", 1))})
    assert isinstance(exhausted, ResourceError)
