"""Who this process is among those that train together. Passed by hand; there is no global one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class World:
    """Rank, size and device of one worker."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def alone(cls, device: str | torch.device = "cpu") -> World:
        return cls(0, 1, torch.device(device))

    @property
    def is_main(self) -> bool:
        return self.rank == 0


_COLLECTIVE_PROBE = """
import sys, datetime, torch, torch.distributed as dist
rank, size, backend, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=30))
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
x = torch.full((1024,), float(rank + 1), device=device)
dist.all_reduce(x)
assert x.eq(size * (size + 1) / 2).all(), x[0].item()
dist.destroy_process_group()
"""


def probe_collective(backend: str, size: int = 2, timeout_s: float = 90.0) -> str | None:
    """Sum a tensor over ``size`` fresh processes. None when the sum was right, else what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _COLLECTIVE_PROBE, str(rank), str(size), backend, f"{folder}/store"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            for rank, process in enumerate(ranks):
                _, errors = process.communicate(timeout=timeout_s)
                if process.returncode:
                    lines = [line for line in errors.strip().splitlines() if line.strip()]
                    return f"rank {rank} ended with code {process.returncode}: {lines[-1] if lines else 'no message'}"
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout_s:g} s"
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    return None
