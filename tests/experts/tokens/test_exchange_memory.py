"""Memory of the token exchange: it does not grow with the number of hosts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.parallel.exchange_memory import Case, LiveBytes, Shape, peak_bytes

SHAPE = Shape(tokens=512, width=64, experts=128)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_is_the_same_for_2_and_for_128_hosts(dtype: torch.dtype) -> None:
    """Forward and backward, with as many rows sent and received in each case."""
    peaks = [peak_bytes(Case.build(hosts, SHAPE, dtype, CPU)) for hosts in (2, 8, 32, 128)]
    assert max(peaks) <= 1.1 * min(peaks), peaks


@pytest.mark.parametrize("hosts", [2, 128])
def test_the_measured_exchange_computes_the_layer(hosts: int) -> None:
    """Output and gradients are those of a layer on one host."""
    case = Case.build(hosts, SHAPE, torch.float64, CPU)
    case.run()
    output_TD = case.run()
    x_TD = case.x_TD.detach().requires_grad_()
    expected_TD = case.layer._forward_local(x_TD, case.routing)
    torch.testing.assert_close(output_TD, expected_TD.detach())
    case.clear()
    case.run()
    (grad_TD,) = torch.autograd.grad(expected_TD.sum(), x_TD)
    torch.testing.assert_close(case.x_TD.grad, grad_TD)


def test_live_bytes_count_each_storage_once_while_it_lives() -> None:
    held = torch.zeros(1000)
    with LiveBytes() as live:
        held.view(10, 100).add_(1)
        assert live.now == live.peak == 0, "views and updates in place allocate nothing"
        first = held + 1
        second = first.view(-1)[10:]
        assert live.now == 4000
        del first
        assert live.now == 4000, "a view keeps the storage"
        del second
        third = held[:10].clone()
        assert (live.now, live.peak) == (40, 4000)
        del third
        assert live.now == 0
