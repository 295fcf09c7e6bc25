"""The part of an exchange that is hidden behind other kernels."""

from __future__ import annotations

from benchmarks.parallel.kernel_overlap import KernelTime, Overlap


def exchange(begin: int, end: int) -> KernelTime:
    return KernelTime("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", begin, end)


def product(begin: int, end: int) -> KernelTime:
    return KernelTime("_product_kernel", begin, end)


def test_times_at_once_are_counted_once() -> None:
    kernels = [exchange(0, 10), product(8, 12), product(11, 20), exchange(15, 18), product(15, 17)]
    found = Overlap.of(kernels)
    assert (found.exchange, found.compute, found.both) == (13, 12, 5)
    assert (found.hidden_share, found.busy_share) == (5 / 13, 5 / 12)


def test_kernels_one_after_another_hide_nothing() -> None:
    found = Overlap.of([product(0, 5), exchange(5, 9), product(9, 10)])
    assert (found.exchange, found.compute, found.both) == (4, 6, 0)


def test_without_an_exchange_nothing_is_hidden() -> None:
    assert Overlap.of([product(0, 5)]).hidden_share == 0.0
