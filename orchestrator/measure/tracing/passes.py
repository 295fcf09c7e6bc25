"""The passes of a task's model over any number of samples, traced when they are asked for."""

from __future__ import annotations

from typing import Any

from torch import nn

from orchestrator.errors import OrchestratorError, UserError
from orchestrator.measure.tracing.fake_batches import TrainingData, fake_tensor_mode
from orchestrator.measure.tracing.step_trace import TraceOptions, trace_model
from orchestrator.plan.estimate import PassForm, PassMemory, saved_gradient_bytes
from orchestrator.plan.ops import MicroBatchOps
from orchestrator.tasks.task import Gatherable, Task
from orchestrator.tasks.user_code import user_code
from orchestrator.tasks.validate import build_checked_model
from orchestrator.types import GIB, PrecisionName, bytes_text, count_text

SMALL_BATCH = 2  # samples; batch norm needs more than one
_LARGEST_BATCH = 64
"""Samples from which on memory grows evenly: a loss in chunks has filled its first chunk (``token_loss``)."""
_LARGEST_IN_MEMORY = 1024
"""The same for data in memory, where reading many samples costs nothing."""
_MAX_UNITS = 2**16
"""Most units of a larger batch: a loss in many chunks takes long to trace."""
_MAX_BUILT_BYTES = 8 * GIB
"""Parameters of a model that may be built for a plan because it cannot be traced."""


class TracedPasses:
    """The passes of a task's model for a device and a precision. Each is traced once.

    Every number of samples is traced, up to a largest one: memory does not grow evenly up to there. A loss in
    chunks needs no more for a second chunk, and the peak of small batches is at the end of the backward pass,
    where all gradients are alive. A model that fails with fake tensors runs on the CPU, with few samples."""

    def __init__(self, task: Task, on_gpu: bool, precision: PrecisionName, data: TrainingData) -> None:
        self.task = task
        self.on_gpu = on_gpu
        self.precision: PrecisionName = precision
        self.is_fake = True
        self._data = data
        self._passes: dict[tuple[int, TraceOptions, bool], MicroBatchOps] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the training data: a worker reads its own."""
        return self.__dict__ | {"_data": TrainingData(self.task)}

    @property
    def method(self) -> str:
        """How the passes were found, for people."""
        device = "cuda" if self.on_gpu else "cpu"
        return f"traced for {device} in {self.precision}" if self.is_fake else "run once on the CPU in fp32"

    def first_passes(self) -> tuple[nn.Module, MicroBatchOps, MicroBatchOps]:
        """Return the model, its pass over a small batch and that over one of twice the size."""
        try:
            model = self._compute(SMALL_BATCH, self._options(PassForm()), fake=True)
        except Exception as error:  # not every model can be built or run without data
            _check_size(self.task, error)
            self.is_fake = False
            model = self._run_model()
        return model, self._pass(SMALL_BATCH, PassForm()), self._pass(2 * SMALL_BATCH, PassForm())

    def trace(self, samples: int, form: PassForm, grouped: bool = True, chunks: int = 1) -> MicroBatchOps:
        """Return the operations of a pass; raise the error of a model that cannot be traced."""
        return self._computed(samples, self._options(form, grouped, chunks), fake=True)

    def memory(self, samples: int, form: PassForm) -> PassMemory:
        """Return the memory of a pass over so many samples."""
        if SMALL_BATCH <= samples <= self._largest:
            return _memory_of(self._pass(samples, form))
        upper = max(2 * SMALL_BATCH, self._largest) if samples > SMALL_BATCH else 2 * SMALL_BATCH
        lower = upper // 2
        at_lower = _memory_of(self._pass(lower, form))
        at_upper = _memory_of(self._pass(upper, form))
        return at_lower.towards(at_upper, samples / lower - 1)

    @property
    def _largest(self) -> int:
        """The most samples that are traced."""
        if not self.is_fake:
            return 2 * SMALL_BATCH
        if not isinstance(self._data.data, Gatherable):
            return _LARGEST_BATCH
        units = getattr(self.task, "units_per_sample", 1)
        return max(_LARGEST_BATCH, min(_LARGEST_IN_MEMORY, _MAX_UNITS // units))

    def _pass(self, samples: int, form: PassForm) -> MicroBatchOps:
        """Return a pass, traced if that is possible."""
        if self.is_fake:
            return self.trace(samples, form)
        # The experts compute as they do in one process.
        options = TraceOptions(recompute=form.recompute, recompute_experts=form.recompute_experts)
        return self._computed(samples, options, fake=False)

    def _options(self, form: PassForm, grouped: bool = True, chunks: int = 1) -> TraceOptions:
        return TraceOptions(self.on_gpu, self.precision, grouped, chunks=chunks, **vars(form))

    def _computed(self, samples: int, options: TraceOptions, fake: bool) -> MicroBatchOps:
        if (samples, options, fake) not in self._passes:
            self._compute(samples, options, fake)
        return self._passes[samples, options, fake]

    def _compute(self, samples: int, options: TraceOptions, fake: bool) -> nn.Module:
        ops, model = trace_model(self.task, samples, options, self._data, fake)
        self._passes[samples, options, fake] = ops
        return model

    def _run_model(self) -> nn.Module:
        """Run a pass on the CPU. Errors are the user's: their message shows the user's frame."""
        try:
            return self._compute(SMALL_BATCH, TraceOptions(), fake=False)
        except OrchestratorError:
            raise
        except Exception as error:
            with user_code("computing the loss of a first batch"):
                raise error
            raise


def _memory_of(ops: MicroBatchOps) -> PassMemory:
    gradients = 4.0 * ops.trained - saved_gradient_bytes(ops.copied)
    return PassMemory(max(0.0, ops.peak_bytes - gradients), ops.pass_bytes)


def _check_size(task: Task, error: Exception) -> None:
    """Raise if the model that could not be traced is too large to be built for a plan."""
    try:
        with fake_tensor_mode():
            parameters = list(build_checked_model(task).parameters())
    except Exception:  # its size is unknown: build it as the task does
        return
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    if num_bytes <= _MAX_BUILT_BYTES:
        return
    if isinstance(error, OrchestratorError):
        raise error
    raise UserError(
        f"the model has {count_text(sum(p.numel() for p in parameters))} parameters "
        f"({bytes_text(num_bytes)}), and a pass without memory failed, from which the plan knows its sizes: "
        f"{type(error).__name__}: {error}. Models above {bytes_text(_MAX_BUILT_BYTES)} are not built for a "
        "plan; let the model run with fake tensors (torch.compile needs the same)"
    ) from error
