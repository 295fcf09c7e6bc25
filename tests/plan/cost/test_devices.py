"""The costs of known GPUs, against their data sheets and measured steps."""

from __future__ import annotations

from importlib.resources import files
from itertools import product

import pytest

from orchestrator.plan.cost.cluster_spec import machine_of, parse_cluster
from orchestrator.plan.cost.devices import catalogue, device_of, links_of, short_name
from orchestrator.plan.cost.interpolate import PiecewiseCurve
from orchestrator.plan.cost.machine import Link
from orchestrator.plan.cost.model import predict
from orchestrator.plan.cost.ops import AttentionOp, MicroBatchOps, MoveKind, MoveOp, ProductOp


def test_known_devices_are_plausible():
    """Each has a source; achieved shares are shares; a newer GPU is not slower than an older one
    of its line."""
    known = catalogue()
    assert {"h200", "h100", "a100", "l4", "t4", "rtx4090"} <= set(known.devices)
    for name, sheet in known.devices.items():
        assert sheet.source, name
        assert sheet.peak_tflops["fp32"] > 0
        assert ("bf16" in sheet.peak_tflops) == (sheet.capability >= (8, 0)), name
        assert 1e9 < device_of(name).memory_bytes < 1e12
    achieved = known.achieved
    for share in (
        achieved.tensor_products,
        achieved.fp32_products,
        achieved.memory,
        achieved.attention_forward,
    ):
        assert 0 < share < 1
    bandwidths = [known.devices[name].bandwidth_gb_s for name in ("a100", "h100", "h200")]
    assert bandwidths == sorted(set(bandwidths))


def test_the_file_is_packaged():
    assert files("orchestrator.plan.cost").joinpath("devices.json").is_file()


def test_an_h200_reaches_its_measured_rates():
    """A bf16 product within a fifth of the 799 TFLOP/s of 8192 cubed, a copy within a tenth of 4.3
    TB/s."""
    h200 = machine_of(parse_cluster("gpu=h200"))
    size = 8192
    cube = ProductOp(size, size, size, precision="bf16")
    computed = predict(MicroBatchOps(1, products=(cube,)), h200)
    assert 2 * size**3 / computed.parts["compute"] == pytest.approx(799e12, rel=0.2)
    moved = predict(MicroBatchOps(1, moves=(MoveOp("plain", 2**30),)), h200)
    assert 2**30 / moved.parts["memory"] == pytest.approx(4.3e12, rel=0.1)


def test_a_gpt2_small_on_an_h200_takes_its_measured_time():
    """benchmarks/results/costmodel_h200_2026-11-15.md: products and gigabytes of such a step, as
    traced.

    The share of norms was fitted to this step; the others were measured by themselves.
    """
    rows = 16 * 1024
    width = 768
    vocabulary = 50257
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    products = [ProductOp(rows, k, n, precision="bf16", times=36) for k, n in layer]
    products.append(ProductOp(rows, width, vocabulary, "nt", precision="bf16"))
    products.append(ProductOp(rows, vocabulary, width, "nn", precision="bf16"))
    products.append(ProductOp(vocabulary, rows, width, "tn", precision="bf16"))
    gigabytes: dict[MoveKind, float] = {"plain": 24.0, "norm": 19.5, "rows": 10.3, "reduce": 2.8}
    moves = tuple(MoveOp(kind, 10**8, times=round(10 * size)) for kind, size in gigabytes.items())
    attentions = tuple(
        AttentionOp(192, 1024**2 / 2, 64, backward, "bf16", times=12) for backward in (False, True)
    )
    ops = MicroBatchOps(16, tuple(products), attentions, moves, parameters=124_439_808)
    predicted = predict(ops, machine_of(parse_cluster("gpu=h200")))
    assert predicted.step_seconds == pytest.approx(0.072, rel=0.1)


# --- every cost by hand, from the data sheet and the achieved shares

KNOWN = sorted(catalogue().devices)
MOVED_BYTES = (4**6, 4**7, 4**8, 4**9, 4**10, 4**11, 4**12, 4**13, 4**14, 4**15)
GRID_SIZES = (16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)


@pytest.mark.parametrize("name", KNOWN)
def test_moves_and_updates_take_a_kernel_and_their_bytes(name: str):
    achieved = catalogue().achieved
    bandwidth = catalogue().devices[name].bandwidth_gb_s * 1e9 * achieved.memory
    costs = device_of(name)
    for kind, curve in costs.moves.items():
        passes = achieved.passes.get(kind, 1.0)
        expected = tuple(achieved.kernel_s + passes * size / bandwidth for size in MOVED_BYTES)
        assert curve == PiecewiseCurve(MOVED_BYTES, expected)
    assert costs.moves["plain"].values[0] == achieved.kernel_s + 4096 / bandwidth
    update_s = tuple(4 * achieved.kernel_s + achieved.update_bytes * size / bandwidth for size in MOVED_BYTES)
    assert costs.optimizer == PiecewiseCurve(MOVED_BYTES, update_s)


@pytest.mark.parametrize("name", KNOWN)
def test_a_product_takes_the_longer_of_its_arithmetic_and_its_traffic(name: str):
    sheet = catalogue().devices[name]
    achieved = catalogue().achieved
    for precision, peak in sheet.peak_tflops.items():
        share = achieved.fp32_products if precision == "fp32" else achieved.tensor_products
        element_bytes = 4 if precision in ("fp32", "tf32") else 2
        grid = device_of(name).products[precision]["nn"]
        assert grid.m == grid.k == grid.n == GRID_SIZES
        for (m, k, n), seconds in zip(product(GRID_SIZES, repeat=3), grid.seconds, strict=True):
            arithmetic_s = 2 * m * k * n / (peak * 1e12 * share)
            moved_bytes = element_bytes * (m * k + k * n + m * n)
            traffic_s = moved_bytes / (sheet.bandwidth_gb_s * 1e9 * achieved.memory)
            assert seconds == pytest.approx(achieved.kernel_s + max(arithmetic_s, traffic_s), rel=1e-12)


@pytest.mark.parametrize("name", KNOWN)
def test_attention_takes_its_arithmetic_at_a_share_of_its_own(name: str):
    sheet = catalogue().devices[name]
    achieved = catalogue().achieved
    shares = {
        (False, "forward"): achieved.attention_forward,
        (False, "backward"): achieved.attention_backward,
        (True, "forward"): achieved.attention_fp32_forward,
        (True, "backward"): achieved.attention_fp32_backward,
    }
    expected = {}
    for precision, direction in product(set(sheet.peak_tflops) - {"tf32"}, ("forward", "backward")):
        flops_per_s = sheet.peak_tflops[precision] * 1e12 * shares[precision == "fp32", direction]
        curve = PiecewiseCurve((1e4, 1e12), (1e4 / flops_per_s, 1e12 / flops_per_s))
        expected[f"{precision} {direction}"] = curve
    assert device_of(name).attention == expected


@pytest.mark.parametrize("name", KNOWN)
def test_the_host_runs_ahead_and_only_new_gpus_fuse_grouped_products(name: str):
    sheet = catalogue().devices[name]
    achieved = catalogue().achieved
    costs = device_of(name)
    assert costs.asynchronous
    assert costs.memory_bytes == sheet.memory_gb * 1e9
    assert costs.grouped == (
        achieved.grouped if sheet.capability >= (9, 0) else PiecewiseCurve((1.0,), (1.0,))
    )


def test_links_have_one_direction_of_nvlink_and_a_part_of_the_network():
    sheet = catalogue().devices["h100"]
    links = catalogue().links
    inner, outer = links_of("h100", "nvlink", 400, 2, 8)
    nvlink = Link("nvlink", links["nvlink"].latency_s, sheet.nvlink_gb_s / 2 * 1e9 * links["nvlink"].share)
    assert (inner.sums, inner.exchange) == (nvlink, nvlink)
    network = 50e9 * 2 * links["network"].share
    assert outer.sums.latency_s == outer.exchange.latency_s == links["network"].latency_s
    assert outer.sums.bytes_per_s == pytest.approx(network)
    assert outer.exchange.bytes_per_s == pytest.approx(network / 8)
    by_pcie, _ = links_of("h100", "pcie", 400, 2, 8)
    assert by_pcie.sums == Link("pcie", links["pcie"].latency_s, sheet.pcie_gb_s * 1e9 * links["pcie"].share)


@pytest.mark.parametrize(
    ("full_name", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("A CPU", None),
    ],
)
def test_gpus_are_recognised_by_their_full_name(full_name: str, short: str | None):
    assert short_name(full_name) == short
