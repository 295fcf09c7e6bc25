"""The GPUs that the kernel of row products is used on. GPU tests run the kernel."""

from __future__ import annotations

import pytest
import torch

from experts.kernels import row_products

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "hip", "works"),
    [
        ((9, 0), None, True),  # Hopper
        ((10, 0), None, True),  # Blackwell
        ((12, 0), None, False),  # Blackwell of workstations
        ((8, 0), None, False),
        ((9, 4), "6.4", False),  # an MI300 of AMD
    ],
)
def test_gpus_with_enough_shared_memory_are_supported(
    capability: tuple[int, int], hip: str | None, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert row_products.available(GPU, torch.bfloat16) == works


def test_other_types_and_devices_are_not() -> None:
    assert not row_products.available(GPU, torch.float32)
    assert not row_products.available(torch.device("cpu"), torch.bfloat16)
