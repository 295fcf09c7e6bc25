"""Errors that a person can act on.

Each class carries its exit code. Any other exception is a bug of this project and keeps its traceback."""

from __future__ import annotations


class OrchestratorError(Exception):
    """Base of the known errors. The message says what was found, what was needed, and what to do."""

    exit_code = 4


class UserError(OrchestratorError):
    """A mistake of the user: a wrong setting, a missing file, a task that cannot be loaded."""

    exit_code = 2


class ResourceError(OrchestratorError):
    """Insufficient resources: a GPU is required and none is present, or no batch fits the memory."""

    exit_code = 3


class OutOfMemory(ResourceError):
    """A worker ran out of memory and could not warn its peers in time.

    The run restarts with smaller micro-batches."""

    def __init__(self, message: str, micro_batch: int = 0) -> None:
        # Both values go to the base class: pickle rebuilds an exception from its args.
        super().__init__(message, micro_batch)
        self.micro_batch = micro_batch

    def __str__(self) -> str:
        return str(self.args[0])


class TrainingFailed(OrchestratorError):
    """Training ended without a result after all retries."""

    exit_code = 4


class TaskFailed(OrchestratorError):
    """The user's own code raised. The message shows the user's frame; the run is not retried."""

    exit_code = 2


class CheckpointDamaged(OrchestratorError):
    """The files of a checkpoint do not match its manifest."""

    exit_code = 4


class Interrupted(OrchestratorError):
    """The run was asked to stop; a checkpoint was written first."""

    exit_code = 130
