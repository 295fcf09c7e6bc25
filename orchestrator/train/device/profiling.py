"""``--profile``: a trace of a few steps, and a table of the operations that took the most time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

_SKIPPED_STEPS = 2
_WARMUP_STEPS = 1
_TRACED_STEPS = 4


@contextmanager
def profiling(run_dir: Path, device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yield the function to call after each step.

    Writes ``trace.json`` (for chrome://tracing or Perfetto) and ``profile.txt`` to the run folder.
    """
    activities = [ProfilerActivity.CPU]
    sort_by = "self_cpu_time_total"
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        sort_by = "self_cuda_time_total"

    def write_results(profiler: profile) -> None:
        profiler.export_chrome_trace(str(run_dir / "trace.json"))
        table = profiler.key_averages().table(sort_by=sort_by, row_limit=25)
        (run_dir / "profile.txt").write_text(table, encoding="utf-8")

    with profile(
        activities=activities,
        schedule=schedule(wait=_SKIPPED_STEPS, warmup=_WARMUP_STEPS, active=_TRACED_STEPS, repeat=1),
        on_trace_ready=write_results,
        profile_memory=True,
        record_shapes=True,
    ) as profiler:
        yield lambda step: profiler.step()  # noqa: ARG005
