"""Probe of collectives: fresh processes form a group, sum a tensor and exchange rows."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from time import monotonic

_PEER_GRACE_S = 5.0
"""How long the others may still take to end after a rank has failed."""

_RANK_SCRIPT = """
import datetime, os, sys, torch, torch.distributed as dist

def probe(rank, size, backend, store):
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=30)
    method = "file://" + store
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=size, timeout=timeout)
    total = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(total)
    assert total.eq(size * (size + 1) / 2).all(), f"a wrong sum: {total[0].item()}"
    received = torch.empty(size, device=device)
    dist.all_to_all_single(received, torch.full((size,), float(rank), device=device))
    assert received.tolist() == list(range(size)), f"wrong rows: {received.tolist()}"
    dist.destroy_process_group()

try:
    probe(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
except BaseException as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # the exit of an interpreter whose group has failed can abort, and hide the error
"""


def probe_collective(backend: str, size: int = 2, timeout_s: float = 90.0) -> str | None:
    """All-reduce and exchange a tensor over ``size`` fresh processes. Return the problem, or None.

    Over NCCL each process takes a GPU; with fewer GPUs than processes they share them."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start_rank(rank, size, backend, f"{folder}/store") for rank in range(size)]
        try:
            return _first_problems(ranks, timeout_s)
        finally:
            # On every path: a rank that waits for a failed peer does not end by itself.
            for process in ranks:
                process.kill()
                process.wait()


def _first_problems(ranks: list[subprocess.Popen[str]], timeout_s: float) -> str | None:
    """Return the errors of all ranks that fail: the one that fails first may only have lost its peer."""
    deadline_s = monotonic() + timeout_s
    problems: list[str] = []
    for rank, process in enumerate(ranks):
        try:
            _, errors = process.communicate(timeout=max(0.0, deadline_s - monotonic()))
        except subprocess.TimeoutExpired:
            if not problems:
                return f"no answer within {timeout_s:g} s"
            continue
        if process.returncode:
            lines = [line for line in errors.strip().splitlines() if line.strip()]
            reason = lines[-1] if lines else "no message"
            problems.append(f"rank {rank} ended with code {process.returncode}: {reason}")
            deadline_s = min(deadline_s, monotonic() + _PEER_GRACE_S)
    return "; ".join(problems) or None


def _start_rank(rank: int, size: int, backend: str, store: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _RANK_SCRIPT, str(rank), str(size), backend, store],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
