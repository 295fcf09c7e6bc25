"""Memory of the device: what a run may use, what it used, what to do when it runs out."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from experts.context import MoEContext, RecomputeCache
from experts.layer import MoELayer
from orchestrator.errors import UserError

_MUCH = 0.1  # of the device's memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is the device or the host running out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "out of memory" in str(error)
    )


def free_cached(device: torch.device) -> None:
    """Let go of what only waits to be collected, and hand cached blocks back to the driver."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def release_idle(device: torch.device) -> None:
    """At the end of an epoch: hand cached blocks back if there is much of them. To get them again costs the driver
    milliseconds each, so a little is kept."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if idle > _MUCH * torch.cuda.get_device_properties(device).total_memory:
            torch.cuda.empty_cache()


def limit_memory(device: torch.device, fraction: float) -> None:
    """Hold this process to its share of the device, so that what fits here fits there."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # Linux: from here on the largest resident size is counted anew
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> dict[str, int]:
    """Most bytes allocated and reserved since the last reset; on a CPU the largest resident size of this process."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    resident = _resident_peak()
    return {"allocated": resident, "reserved": resident}


def _resident_peak() -> int:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def allocated_now(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def recompute_blocks(model: nn.Module, hosts: MoEContext | None) -> int:
    """Activation checkpointing: the repeated blocks of a model keep their inputs only and are run again in the backward
    pass. What passes between ``hosts`` is kept too: tokens neither travel nor are routed a second time (None, where the
    compiler sees to what is kept). Returns how many blocks; the model is changed in place and keeps its parameter names."""
    blocks = [block for blocks in block_lists(model) for block in blocks]
    if not blocks:
        raise UserError(
            "activation checkpointing needs repeated blocks (an nn.ModuleList or nn.Sequential of two or more modules of one class); "
            "this model has none: use --activation-checkpointing off"
        )
    for block in blocks:
        forward: Any = block.forward
        routes = any(isinstance(module, MoELayer) for module in block.modules())
        contexts = {"context_fn": partial(_taped, hosts)} if routes and hosts is not None else {}
        block.forward = partial(checkpoint, forward, use_reentrant=False, **contexts)
    return len(blocks)


def _taped(hosts: MoEContext) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    tape = RecomputeCache()
    return tape.recording(hosts), tape.replaying(hosts)


def block_lists(model: nn.Module) -> list[list[nn.Module]]:
    """Outermost lists of alike blocks; lists inside a block are left to it."""
    found: list[list[nn.Module]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        children = list(module.children())
        alike = len(children) > 1 and len({type(child) for child in children}) == 1
        if (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and alike
            and any(True for _ in children[0].parameters())
        ):
            found.append(children)
            inside = (*inside, f"{name}." if name else "")
    return found
