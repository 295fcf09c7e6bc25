"""Process-wide settings of torch and of the random generators, restored after the run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from orchestrator.config.settings import Config
from orchestrator.plan.inventory.hardware import set_environment
from orchestrator.plan.planning import Plan
from orchestrator.train.device.memory import keep_freed_memory, limit_memory

_ALL_SHAPES = 1_000_000
"""Of torch's limits of code for one function: with 8 shapes, the ninth would not be compiled."""


@contextmanager
def torch_settings(config: Config, plan: Plan, device: torch.device) -> Iterator[None]:
    """Set torch's process-wide switches for the run, and restore them after it."""
    cudnn = torch.backends.cudnn
    num_threads = torch.get_num_threads()
    matmul_precision = torch.get_float32_matmul_precision()
    cudnn_benchmark = cudnn.benchmark
    cudnn_deterministic = cudnn.deterministic
    cudnn_tf32 = cudnn.allow_tf32
    deterministic_algorithms = torch.are_deterministic_algorithms_enabled()
    deterministic: Any = torch.utils.deterministic
    fills_memory = deterministic.fill_uninitialized_memory
    torch.set_num_threads(plan.threads.value)
    torch.set_float32_matmul_precision("high" if plan.tf32.value else "highest")
    cudnn.allow_tf32 = plan.tf32.value
    cudnn.benchmark = plan.cudnn_benchmark.value
    if config.run.repeats:
        # cuBLAS is deterministic only with a workspace of fixed size.
        set_environment("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        cudnn.deterministic = True
        torch.use_deterministic_algorithms(True)
        # Torch would fill each new tensor first, 12 % of a step; no kernel reads memory that none wrote.
        deterministic.fill_uninitialized_memory = False
    limit_memory(device, config.batch.gpu_memory_fraction)
    untimed = _untimed_compiler(config.run.repeats and plan.compile.value)
    try:
        with untimed, keep_freed_memory(device):
            yield
    finally:
        limit_memory(device, 1.0)
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(matmul_precision)
        cudnn.benchmark = cudnn_benchmark
        cudnn.deterministic = cudnn_deterministic
        cudnn.allow_tf32 = cudnn_tf32
        torch.use_deterministic_algorithms(deterministic_algorithms)
        deterministic.fill_uninitialized_memory = fills_memory


@contextmanager
def _untimed_compiler(wanted: bool) -> Iterator[None]:
    """Keep the compiler from choosing kernels by their time, which differs from one worker to the next, and
    from giving up after some shapes, of which workers see others first."""
    if not wanted:
        yield
        return
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor  # takes a second

    compiler: Any = dynamo
    autograd: Any = functorch
    kernels: Any = inductor
    limits = {"recompile_limit": _ALL_SHAPES, "accumulated_recompile_limit": _ALL_SHAPES}
    # Torch keeps these settings per thread. A backward pass that is compiled when it is first needed would be
    # compiled in the thread of its device, without them.
    at_once = autograd.patch(force_non_lazy_backward_lowering=True)
    with compiler.patch(limits), kernels.patch(deterministic=True), at_once:
        yield


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the caller's random generators after the run.

    A run seeds them: without this, a notebook that trains twice would draw the same numbers
    after each run."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
