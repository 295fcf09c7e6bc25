"""GPUs as torch sees them, and the reason if it sees none."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from orchestrator.plan.inventory.nvml import NvmlView
from orchestrator.types import first_line


@dataclass(frozen=True)
class Gpu:
    """One GPU with the index that torch gives it (``cuda:index``). Memory in bytes."""

    index: int
    name: str
    memory_total: int
    memory_free: int
    capability: tuple[int, int]
    multiprocessors: int
    uuid: str | None = None


def import_torch() -> tuple[Any, str | None]:
    """Return the torch module, or None with the reason."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a CUDA library that cannot be loaded
        reason = first_line(error, max_chars=None)
        fix = "reinstall it: pip install --force-reinstall torch"
        return None, f"torch cannot be imported: {reason}\n{fix}"
    return torch, None


def find_gpus(
    torch: Any, nvml: NvmlView | None, num_visible: int | None
) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs, or none with the reason if the driver shows ``num_visible`` of them."""
    # torch reports a driver that is too old by a warning, and returns False.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                return tuple(_gpu(torch, index, nvml) for index in range(torch.cuda.device_count())), None
            reason = "torch.cuda.is_available() is False"
            if caught:
                reason = first_line(caught[-1].message, max_chars=None)
        except Exception as error:  # torch raises its set-up errors under several classes
            reason = first_line(error, max_chars=None)
    return (), _why_unusable(torch, nvml, num_visible, reason)


def _gpu(torch: Any, index: int, nvml: NvmlView | None) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    raw_uuid = getattr(properties, "uuid", None)
    # torch leaves out the prefix that NVML has.
    uuid = None if raw_uuid is None else f"GPU-{str(raw_uuid).removeprefix('GPU-')}"
    memory_free = nvml.memory_free.get(uuid or "") if nvml else None
    if memory_free is None:
        memory_free = torch.cuda.mem_get_info(index)[0]
    return Gpu(
        index=index,
        name=properties.name,
        memory_total=properties.total_memory,
        memory_free=memory_free,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        uuid=uuid,
    )


def _why_unusable(torch: Any, nvml: NvmlView | None, num_visible: int | None, reason: str) -> str | None:
    """Return why torch sees no GPU although the driver shows some, and what to do.

    None if there is no GPU, or if the user has hidden all of them.
    """
    if nvml is None or num_visible == 0:
        return None
    count = num_visible or "some"
    found = f"the driver ({nvml.driver}) shows {count} GPU(s), but torch {torch.__version__} sees none"
    if torch.version.cuda is None:
        fix = "install a build with CUDA, as https://pytorch.org/get-started/locally shows"
        return f"{found}: it is a build without CUDA\n{fix}"
    return (
        f"{found}: {reason}\nupdate the NVIDIA driver to one that supports CUDA {torch.version.cuda}, "
        f"or install a torch built for an older CUDA; in a container, start it with --gpus all"
    )
