"""Recovery from a failed attempt at a step: the attempt is repeated with smaller passes, or uncompiled.

A smaller pass needs less memory for activations. Passes grow again after many good steps."""

from __future__ import annotations

from typing import Literal

from orchestrator.errors import OrchestratorError, OutOfMemory, ResourceError
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Emit
from orchestrator.tasks.user_code import raised_in_user_code, user_code
from orchestrator.train.device.compiling import is_compile_error
from orchestrator.train.device.memory import is_out_of_memory
from orchestrator.train.group.comm_errors import is_communication_error
from orchestrator.train.group.world import World
from orchestrator.train.strategies.base import Strategy

Problem = Literal["uncompile", "halve", "exhausted"]

_PROBLEMS: tuple[Problem | None, ...] = (None, "uncompile", "halve", "exhausted")  # from good to worst
NO_LIMIT = 2**62
"""A limit that splits nothing: where workers wait for each other in a pass, all must make the same number
of passes."""
GROW_AFTER = 100
"""Good steps before a halved micro-batch is doubled again; each failure doubles the wait."""


class StepRecovery:
    """Decides what a failed attempt needs, and the size of the passes."""

    def __init__(self, world: World, strategy: Strategy, micro_batch: int, emit: Emit) -> None:
        self._world = world
        self._strategy = strategy
        self._micro_batch = micro_batch
        self._emit = emit
        self._good_steps = 0
        self._steps_to_grow = GROW_AFTER
        self.max_pass_samples = NO_LIMIT if strategy.lockstep else micro_batch
        """Most samples of one forward and backward pass; halved when memory runs out."""

    @property
    def pass_samples(self) -> int:
        """The number of samples that are computed at once."""
        return min(self.max_pass_samples, self._micro_batch)

    def classify(self, error: Exception, step: int, is_compiled: bool) -> Problem | None:
        """Return the problem to recover from, or None if there is no recovery.

        Errors of the user's code are raised as such; ours keep their traceback.
        """
        can_repeat = self._world.size == 1 or self._strategy.needs_vote
        if is_out_of_memory(error):
            if self._strategy.reproducible:
                raise self.no_smaller_passes(f"at step {step + 1}") from None
            if not can_repeat:
                raise OutOfMemory(
                    f"worker {self._world.rank} ran out of memory at step {step + 1} "
                    f"with a micro-batch of {self.pass_samples}",
                    self.pass_samples,
                ) from None
            return "exhausted" if self.max_pass_samples == 1 else "halve"
        if is_compiled and is_compile_error(error) and can_repeat:
            self._emit(kinds.Compile(status="failed", seconds=0.0, detail=_error_summary(error)))
            return "uncompile"
        if self._world.size > 1 and is_communication_error(error):
            return None
        if not isinstance(error, OrchestratorError) and raised_in_user_code(error):
            with user_code(f"computing step {step + 1}"):
                raise error
        return None

    def vote(self, problem: Problem | None) -> Problem | None:
        """Return the worst problem of any worker; all workers then recover from it together."""
        worst = self._world.all_reduce_max([float(_PROBLEMS.index(problem))])[0]
        return _PROBLEMS[int(worst)]

    def no_smaller_passes(self, where: str) -> ResourceError:
        """Return the error of a run whose micro-batches cannot be divided."""
        return ResourceError(
            f"worker {self._world.rank} ran out of memory {where}; the micro-batches of {self.pass_samples} "
            "samples are part of a reproducible run and cannot be divided; start it again with a smaller "
            "--batch-size"
        )

    def shrink_passes(self, problem: Problem, step: int) -> None:
        """Halve the passes after an attempt that ran out of memory."""
        if problem == "exhausted":
            raise ResourceError(
                f"out of memory at step {step + 1} with a micro-batch of one sample; try "
                "--activation-checkpointing on, --precision bf16, a smaller --width, or a device with more "
                "memory"
            )
        self._strategy.micro_batch_changed()
        before = self.max_pass_samples
        self.max_pass_samples = -(-before // 2)
        self._good_steps = 0
        self._steps_to_grow *= 2
        self._emit(
            kinds.OutOfMemory(
                step=step + 1,
                micro_batch=before,
                next_micro_batch=self.max_pass_samples,
                where=str(self._world.device),
            )
        )

    def grow_back(self, step: int) -> None:
        """Double halved passes after many good steps.

        One unusual step (a long sample, another program on the GPU) should not slow down the rest of the
        run.
        """
        self._good_steps += 1
        if self.max_pass_samples < self._micro_batch and self._good_steps >= self._steps_to_grow:
            self.max_pass_samples = min(self._micro_batch, self.max_pass_samples * 2)
            self._good_steps = 0
            self._strategy.micro_batch_changed()
            self._emit(
                kinds.Warned(
                    kind="memory",
                    message=f"step {step + 1}: memory allows again; micro-batch back to "
                    f"{self.max_pass_samples}",
                )
            )


def _error_summary(error: BaseException) -> str:
    """Return an error's class and two lines of its message: the first may only name the compiler."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]
