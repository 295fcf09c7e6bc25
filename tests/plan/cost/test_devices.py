"""The costs of known GPUs, against their data sheets and measured steps."""

from __future__ import annotations

from importlib.resources import files

import pytest

from orchestrator.plan.cost.devices import catalogue, device_of, short_name
from orchestrator.plan.cost.model import predict
from orchestrator.plan.cost.ops import AttentionOp, MicroBatchOps, MoveKind, MoveOp, ProductOp
from orchestrator.plan.cost.scaling import machine_of, parse_cluster


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
    product = ProductOp(size, size, size, precision="bf16")
    computed = predict(MicroBatchOps(1, products=(product,)), h200)
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
    attentions = tuple(AttentionOp(192, 1024, 64, backward, "bf16", times=12) for backward in (False, True))
    ops = MicroBatchOps(16, tuple(products), attentions, moves, parameters=124_439_808)
    predicted = predict(ops, machine_of(parse_cluster("gpu=h200")))
    assert predicted.step_seconds == pytest.approx(0.072, rel=0.1)


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
