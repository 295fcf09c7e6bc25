"""Writes the manifest of a reproducible run when its workers start, and compares it with an earlier start."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experts.model import mix
from orchestrator.errors import UserError
from orchestrator.plan.inventory.cpu import cpu_facts, system_text
from orchestrator.record.events import kinds
from orchestrator.record.files.log import Log
from orchestrator.run.manifest import Environment, Manifest, bit_settings, read_manifest, write_manifest
from orchestrator.run.prepared_run import PreparedRun
from orchestrator.train.data.indexed import IndexedFeed
from orchestrator.train.data.loading import seed_python_and_numpy
from orchestrator.train.data.steps import Feed
from orchestrator.train.group.world import World
from orchestrator.train.worker.torch_settings import preserved_random_state
from orchestrator.types import VERSION

_NUM_SAMPLES = 16
_VERSIONS = ("torch", "cuda", "cudnn")


def record_manifest(
    prepared: PreparedRun, world: World, feed: Feed, step: int, run_dir: Path, log: Log
) -> None:
    """Write the manifest, on the main worker, and warn where another kind of device or version goes on.

    All workers of a reproducible run must call it: each says what its device is."""
    devices = set(world.gather_values(device_kind(world.device)))
    if not world.is_main:
        return
    now = Environment(step, tuple(sorted(devices)), _versions(prepared, world.device))
    if len(devices) > 1:
        message = (
            f"the workers have devices of {len(devices)} kinds ({' and '.join(now.devices)}), which round in "
            "different ways: the bits of this run depend on the device that computes a micro-batch. Only "
            "devices of one kind give the same bits on any number of workers"
        )
        log.write(kinds.Warned(kind="reproducible", message=message))
    environments = [now]
    # Without a manifest that can be read, the run has none from here on either way.
    with suppress(UserError):
        earlier = [each for each in read_manifest(run_dir).environments if each.step < step]
        if earlier and now.same_as(earlier[-1]):
            environments = earlier
        elif earlier:
            environments = [*earlier, now]
            message = (
                f"from step {step + 1} on the run is computed on {now.text}, before on {earlier[-1].text}: "
                "the bits of these steps are those of the new devices and versions; "
                "'orchestrator verify' compares each part on its own"
            )
            log.write(kinds.Warned(kind="reproducible", message=message))
    plan = prepared.plan
    config = prepared.resolved.config
    manifest = Manifest(
        bit_settings(config) | {"precision": plan.precision.value},
        config.run.seed,
        plan.batch_size.value,
        plan.global_batch_size.value,
        plan.threads.value,
        data_fingerprint(feed, config.run.seed),
        tuple(environments),
    )
    write_manifest(manifest, run_dir)


def device_kind(device: torch.device) -> str:
    """Return the kind of a device, as far as its arithmetic depends on it."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name} (compute capability {properties.major}.{properties.minor})"
    name, _ = cpu_facts(system_text(Path("/proc/cpuinfo")))
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _versions(prepared: PreparedRun, device: torch.device) -> dict[str, str]:
    known = prepared.inventory.versions
    names = _VERSIONS if device.type == "cuda" else _VERSIONS[:1]
    python = ".".join(known["python"].split(".")[:2])
    return {"orchestrator": VERSION, "python": python} | {
        name: known[name] for name in names if name in known
    }


def data_fingerprint(feed: Feed, seed: int) -> dict[str, Any]:
    """Return the number of training samples, and a hash of a few of them with what it covers."""
    if not isinstance(feed, IndexedFeed):
        return {"samples": feed.num_samples, "hash": "", "covers": "nothing: the data is read in order"}
    digest = hashlib.sha256()
    # Data that transforms its samples at random draws the same numbers each time, and none of the run's.
    with preserved_random_state():
        torch.manual_seed(mix(seed, "fingerprint"))
        seed_python_and_numpy(mix(seed, "fingerprint"))
        for name, read in islice(feed.named_samples(0, 0, _NUM_SAMPLES), _NUM_SAMPLES):
            digest.update(name.encode())
            # A bad sample ends the run, or is left out, when it is trained.
            with suppress(Exception):
                _add(digest, read())
    covers = f"the first {min(_NUM_SAMPLES, feed.num_samples)} samples of the first epoch, in its order"
    return {"samples": feed.num_samples, "hash": digest.hexdigest()[:16], "covers": covers}


def _add(digest: Any, value: Any) -> None:
    """Add a sample to a hash: the bytes of its tensors, and plain values."""
    if isinstance(value, Mapping):
        for key in value:
            digest.update(str(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(digest, item)
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        digest.update(repr(value).encode())
