"""``--profile``: a trace of a few steps, and the table of what they spent their time on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

_SKIP, _WARM_UP, _TRACED = 2, 1, 4


@contextmanager
def profiling(run_dir: Path, device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yields what to call after each step. Writes ``trace.json`` (for chrome://tracing or Perfetto) and ``profile.txt``."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"

    def ready(done: profile) -> None:
        done.export_chrome_trace(str(run_dir / "trace.json"))
        (run_dir / "profile.txt").write_text(
            done.key_averages().table(sort_by=order, row_limit=25), encoding="utf-8"
        )

    with profile(
        activities=activities,
        schedule=schedule(wait=_SKIP, warmup=_WARM_UP, active=_TRACED, repeat=1),
        on_trace_ready=ready,
        profile_memory=True,
        record_shapes=True,
    ) as running:
        yield lambda step: running.step()  # noqa: ARG005
