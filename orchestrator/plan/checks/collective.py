"""Probe of collectives: fresh processes form a group and all-reduce a tensor."""

from __future__ import annotations

import subprocess
import sys
import tempfile

_RANK_SCRIPT = """
import sys, datetime, torch, torch.distributed as dist
rank, size, backend, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
timeout = datetime.timedelta(seconds=30)
dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=size, timeout=timeout)
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
x = torch.full((1024,), float(rank + 1), device=device)
dist.all_reduce(x)
assert x.eq(size * (size + 1) / 2).all(), x[0].item()
dist.destroy_process_group()
"""


def probe_collective(backend: str, size: int = 2, timeout_s: float = 90.0) -> str | None:
    """All-reduce a tensor over ``size`` fresh processes. Return None if the sum is right, else the
    problem."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start_rank(rank, size, backend, f"{folder}/store") for rank in range(size)]
        try:
            for rank, process in enumerate(ranks):
                _, errors = process.communicate(timeout=timeout_s)
                if process.returncode:
                    lines = [line for line in errors.strip().splitlines() if line.strip()]
                    reason = lines[-1] if lines else "no message"
                    return f"rank {rank} ended with code {process.returncode}: {reason}"
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout_s:g} s"
        finally:
            # On every path: a rank that waits for a failed peer does not end by itself.
            for process in ranks:
                process.kill()
                process.wait()
    return None


def _start_rank(rank: int, size: int, backend: str, store: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _RANK_SCRIPT, str(rank), str(size), backend, store],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
