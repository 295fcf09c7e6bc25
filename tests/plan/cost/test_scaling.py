"""``--cluster`` and the figures of known GPUs."""

from __future__ import annotations

from importlib.resources import files

import pytest

from orchestrator.errors import UserError
from orchestrator.plan.cost.devices import catalogue, device_of, short_name
from orchestrator.plan.cost.model import Parallelism, predict
from orchestrator.plan.cost.ops import AttentionOp, MicroBatchOps, MoveKind, MoveOp, ProductOp
from orchestrator.plan.cost.scaling import machine_of, parse_cluster


def test_a_cluster_is_read() -> None:
    found = parse_cluster("nodes=16,gpus=8,gpu=h200,link=nvlink,net=400gbit")
    assert (found.nodes, found.gpus, found.gpu, found.link, found.net_gbit, found.nics) == (
        16,
        8,
        "h200",
        "nvlink",
        400.0,
        1,
    )
    assert found.devices == 128
    assert parse_cluster("gpu=L4").link == "pcie"
    assert parse_cluster("gpu=h200,net=50gbyte, nics=8").net_gbit == 400.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "needs to know the GPU"),
        ("nodes=2", "needs to know the GPU"),
        ("gpu=h300", "did you mean 'h.00'"),
        ("gpu=h200,node=2", "did you mean 'nodes'"),
        ("gpu=h200,nodes", "is not understood"),
        ("gpu=h200,nodes=0", "a whole number from 1 on"),
        ("gpu=h200,gpus=-8", "a whole number from 1 on"),
        ("gpu=h200,gpus=1.5", "a whole number from 1 on"),
        ("gpu=h200,net=fast", "a rate such as 400gbit"),
        ("gpu=h200,net=0gbit", "a rate such as 400gbit"),
        ("gpu=l4,link=nvlink", "has no NVLink"),
        ("gpu=h200,link=infiniband", "must be nvlink or pcie"),
        ("gpu=h200,nodes=1024,gpus=8", "up to 4,096"),
    ],
)
def test_a_wrong_cluster_is_told(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_cluster(text)


def test_known_devices_are_sound() -> None:
    """Each has a source; achieved shares are shares; a newer one is no slower than an older one of
    its line."""
    found = catalogue()
    assert {"h200", "h100", "a100", "l4", "t4", "rtx4090"} <= set(found.devices)
    for name, known in found.devices.items():
        assert known.source, name
        assert known.peak_tflops["fp32"] > 0
        assert ("bf16" in known.peak_tflops) == (known.capability >= (8, 0)), name
        assert 1e9 < device_of(name).memory_bytes < 1e12
    shares = found.achieved
    assert all(
        0 < share < 1
        for share in (shares.tensor_products, shares.fp32_products, shares.memory, shares.attention_forward)
    )
    assert (
        found.devices["h200"].bandwidth_gb_s
        > found.devices["h100"].bandwidth_gb_s
        > found.devices["a100"].bandwidth_gb_s
    )


def test_the_file_is_packaged() -> None:
    assert files("orchestrator.plan.cost").joinpath("devices.json").is_file()


def test_an_h200_does_what_was_measured_of_it() -> None:
    """A large product in bf16 within a fifth of the 799 TFLOP/s of 8192 cubed, a copy within a
    tenth of 4.3 TB/s."""
    size = 8192
    found = predict(
        MicroBatchOps(1, products=(ProductOp(size, size, size, precision="bf16"),)),
        machine_of(parse_cluster("gpu=h200")),
    )
    assert 2 * size**3 / found.parts["compute"] == pytest.approx(799e12, rel=0.2)
    moved = predict(MicroBatchOps(1, moves=(MoveOp("plain", 2**30),)), machine_of(parse_cluster("gpu=h200")))
    assert 2**30 / moved.parts["memory"] == pytest.approx(4.3e12, rel=0.1)


def test_a_gpt2_small_on_an_h200_takes_what_it_took() -> None:
    """benchmarks/results/costmodel_h200_2026-11-15.md: products and gigabytes of such a step, as
    they are traced. To it the share of norms was fitted; the others were measured by
    themselves."""
    rows, width = 16 * 1024, 768
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    products = [ProductOp(rows, k, n, precision="bf16", times=36) for k, n in layer]
    products += [
        ProductOp(rows, width, 50257, "nt", precision="bf16"),
        ProductOp(rows, 50257, width, "nn", precision="bf16"),
    ]
    products += [ProductOp(50257, rows, width, "tn", precision="bf16")]
    gigabytes: dict[MoveKind, float] = {"plain": 24.0, "norm": 19.5, "rows": 10.3, "reduce": 2.8}
    moves = tuple(MoveOp(kind, 10**8, times=round(10 * size)) for kind, size in gigabytes.items())
    attention = (AttentionOp(192, 1024, 64, False, "bf16", 12), AttentionOp(192, 1024, 64, True, "bf16", 12))
    work = MicroBatchOps(16, tuple(products), attention, moves, parameters=124_439_808)
    assert predict(work, machine_of(parse_cluster("gpu=h200"))).step_seconds == pytest.approx(0.072, rel=0.1)


def test_faster_links_help() -> None:
    work = MicroBatchOps(1, products=(ProductOp(4096, 4096, 4096, precision="bf16"),), parameters=10**9)
    texts = [
        "nodes=2,gpus=8,gpu=h200,link=pcie,net=10gbit",
        "nodes=2,gpus=8,gpu=h200,net=10gbit",
        "nodes=2,gpus=8,gpu=h200,net=400gbit",
    ]
    steps = [
        predict(work, machine_of(parse_cluster(text)), Parallelism(16, "data_parallel")).step_seconds
        for text in texts
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[1] > steps[2]


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("A CPU", None),
    ],
)
def test_gpus_are_known_by_what_they_call_themselves(full: str, short: str | None) -> None:
    assert short_name(full) == short


def test_an_l40s_is_no_l4() -> None:
    assert short_name("NVIDIA L40S") == "l40s"
