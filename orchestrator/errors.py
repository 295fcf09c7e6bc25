"""Errors a person can act on. Each carries the exit code of its class; everything else is a bug of ours and keeps its
traceback."""

from __future__ import annotations


class OrchestratorError(Exception):
    """Base of the known errors. The message says what was found, what was needed, and what to do."""

    exit_code = 4


class UserError(OrchestratorError):
    """The user's mistake: a wrong setting, a missing file, a task that cannot be loaded."""

    exit_code = 2


class ResourceError(OrchestratorError):
    """Resources that are not to be had: a GPU where there is none, memory that no batch fits."""

    exit_code = 3


class OutOfMemory(ResourceError):
    """A worker ran out of memory where the others could not be told in time: the run begins again with less at once."""

    def __init__(self, message: str, micro_batch: int = 0) -> None:
        super().__init__(message, micro_batch)
        self.micro_batch = micro_batch

    def __str__(self) -> str:
        return str(self.args[0])


class TrainingFailed(OrchestratorError):
    """Training ended without a result after all retries."""

    exit_code = 4


class TaskFailed(OrchestratorError):
    """The user's own code raised. The message shows their frame; it is never retried."""

    exit_code = 2


class CheckpointDamaged(OrchestratorError):
    """A checkpoint whose files do not match its manifest."""

    exit_code = 4


class Interrupted(OrchestratorError):
    """The run was asked to stop; a checkpoint was written first."""

    exit_code = 130
