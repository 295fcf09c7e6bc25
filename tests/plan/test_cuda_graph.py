"""Which runs capture their steps in CUDA graphs, and why others do not."""

from __future__ import annotations

from typing import Any

import pytest

from harness.fakes.inventories import gpu, machine, model, planned
from orchestrator.errors import UserError

CPU = machine()
H200 = machine(gpu())
TWO = machine(gpu(0), gpu(1))
SHORT = model(flops_per_sample=1e7, samples=10_000)
LONG = model(flops_per_sample=1e12, samples=10_000)


def test_short_steps_of_one_process_are_captured():
    chosen = planned(H200, SHORT).cuda_graph
    assert chosen.value
    assert "launches" in chosen.reason
    assert [rejected.option for rejected in chosen.rejected] == ["off"]


def test_steps_that_keep_the_gpu_busy_are_not_captured():
    chosen = planned(H200, LONG, batch_size=16).cuda_graph
    assert not chosen.value
    assert "longer than its launches" in chosen.reason
    assert planned(H200, LONG, batch_size=16, cuda_graph="on").cuda_graph.value


def test_the_user_can_turn_it_off():
    chosen = planned(H200, SHORT, cuda_graph="off").cuda_graph
    assert (chosen.value, chosen.reason) == (False, "set by --cuda-graph off")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"workers": 2}, "2 workers"),
        ({"optimizer": "muon"}, "one kernel"),
        ({"optimizer": "adamw8bit"}, "one kernel"),
        ({"activation_checkpointing": "on"}, "recomputation"),
        ({"compile": "on", "compile_mode": "reduce-overhead"}, "graphs of its own"),
        ({"gate_jitter": 0.1}, "noise"),
        ({"capacity_factor": 1.5}, "capacity"),
    ],
)
def test_an_obstacle_is_named_and_refuses_the_flag(settings: dict[str, Any], reason: str):
    inventory = TWO if "workers" in settings else H200
    chosen = planned(inventory, SHORT, **settings).cuda_graph
    assert not chosen.value
    assert reason in chosen.reason
    assert [rejected.option for rejected in chosen.rejected] == ["on"]
    with pytest.raises(UserError, match=reason):
        planned(inventory, SHORT, cuda_graph="on", **settings)


def test_experts_in_a_loop_are_not_captured():
    experts = model(flops_per_sample=1e7, experts=8, expert_weights=((100,) * 8,))
    assert planned(H200, experts).cuda_graph.value
    chosen = planned(H200, experts, precision="fp32").cuda_graph
    assert (chosen.value, "loop" in chosen.reason) == (False, True)


def test_a_cpu_has_no_cuda_graphs():
    chosen = planned(CPU, SHORT).cuda_graph
    assert (chosen.value, chosen.is_worth_a_row) == (False, False)
    with pytest.raises(UserError, match="CPU"):
        planned(CPU, SHORT, cuda_graph="on")
