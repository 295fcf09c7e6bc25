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
