"""Small checkpoints, and random damage to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import torch

from orchestrator.checkpoint.files import Contents, HostPart, write_part
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.storage.folder import RemoteFolder
from orchestrator.train.remote.checkpoints import RemoteCheckpoints

DAMAGE_KINDS = ("flip", "truncate", "missing", "swap")


def small_contents(step: int) -> Contents:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "model": {"w": torch.randn(40, 7, generator=generator), "n": torch.tensor(step)},
        "optimizer": {"exp_avg/w": torch.full((3,), step)},
    }
    return Contents(tensors, {"progress": {"step": step}, "text": "x" * 300})


def remote_run_with_checkpoints(folder: Path, steps: Sequence[int] = (20, 40)) -> RemoteFolder:
    """Return a new remote run with checkpoints of these steps, which are written into a folder first."""
    remote = RemoteFolder(f"memory://{uuid4().hex}/run1")
    store = CheckpointStore(folder)
    for step in steps:
        path = save_checkpoint(store, step, small_contents(step))
        RemoteCheckpoints(remote / "checkpoints").upload(path, lambda: None)
    return remote


def save_checkpoint(store: CheckpointStore, step: int, contents: Contents) -> Path:
    """Write and publish a checkpoint as one host."""
    folder = store.begin(step)
    try:
        files = write_part(folder, 0, HostPart(contents.tensors, state=contents.state))
        return store.publish(folder, step, files)
    except OSError:
        store.discard(folder)
        raise


def damage(folder: Path, other: Path, generator: random.Random) -> tuple[str, str]:
    """Damage one file: flip a bit, truncate it, remove it, or take that of another checkpoint.

    Return the kind of damage and the name of the file."""
    kind = generator.choice(DAMAGE_KINDS)
    file = folder / generator.choice(sorted(path.name for path in folder.iterdir()))
    data = bytearray(file.read_bytes())
    if kind == "flip":
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        file.write_bytes(bytes(data))
    elif kind == "truncate":
        file.write_bytes(bytes(data[: generator.randrange(len(data))]))
    elif kind == "missing":
        file.unlink()
    else:
        file.write_bytes((other / file.name).read_bytes())
    return kind, file.name
