"""The GPUs and the backends of tests with several ranks.

On a machine with enough GPUs each rank has one. On fewer, all ranks share the first: gloo allows that,
NCCL from version 2.30 on, if the variable ``NCCL_MULTI_RANK_GPU_ENABLE`` is 1."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

_SHARED_GPU_VERSION = 23000


def rank_device(rank: int, size: int) -> torch.device:
    """Return the GPU of a rank."""
    return torch.device("cuda", rank if torch.cuda.device_count() >= size else 0)


def nccl_problem(size: int) -> str | None:
    """Return why NCCL cannot run this many ranks here; None if it can."""
    num_gpus = torch.cuda.device_count()
    if num_gpus >= size:
        return None
    version = nccl_version()
    if version < _SHARED_GPU_VERSION:
        return f"NCCL {version} refuses {size} ranks on {num_gpus} GPU(s); 23000 or later is needed"
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return f"{size} ranks on {num_gpus} GPU(s) need NCCL_MULTI_RANK_GPU_ENABLE=1"
    return None


def nccl_version() -> int:
    """Return the version of the library that is loaded; torch knows the one it was compiled with."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return 0
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    return version.value


def skip_without(backend: str, size: int) -> None:
    problem = nccl_problem(size) if backend == "nccl" else None
    if problem is not None:
        pytest.skip(problem)
