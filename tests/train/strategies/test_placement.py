"""Tests of predicted placements, made before anything is measured or started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experts.placement.placement import ExpertCost, HostFacts, Placement, place, placement_of
from harness.fakes.inventories import machine, model
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.host_groups import expert_memory
from orchestrator.plan.planning import plan
from orchestrator.record.events.kinds import PlacedHost
from orchestrator.train.group.world import World
from orchestrator.train.strategies import placement as placement_module
from orchestrator.train.strategies.placement import (
    PlacementDecision,
    PredictedPlacement,
    decide_placement,
    place_in_turn,
    predict_placement,
)
from orchestrator.train.strategies.shares import MeasuredDevice

SIZES = (100, 100, 400, 200, 200)
FACTS = model(experts=5, moe_layers=2, expert_weights=(SIZES, SIZES[::-1]))


def predict(workers: int = 2, **settings: Any) -> PredictedPlacement:
    config = Config.of(parallel_strategy="expert_parallel", workers=workers, **settings)
    predicted = predict_placement(config, plan(config, machine(), FACTS), FACTS)
    assert predicted is not None
    return predicted


def test_round_robin_and_a_file_are_known_before_a_run(tmp_path: Path) -> None:
    in_turn = predict(placement="round_robin")
    assert in_turn.to_json() == {"assumes": "in turn", "host_of": [[0, 1, 0, 1, 0]] * 2}
    file = tmp_path / "mine.json"
    file.write_text('{"layers": [[1, 1, 0, 0, 0], [0, 0, 0, 0, 1]]}')
    from_file = predict(placement=str(file))
    assert [layer.host_of for layer in from_file.layers] == [(1, 1, 0, 0, 0), (0, 0, 0, 0, 1)]
    assert from_file.assumes == f"as {file} says"


def test_placement_by_cost_states_its_assumptions() -> None:
    predicted = predict()
    assert [layer.imbalance for layer in predicted.layers] == [1.0, 1.0], "400 + 100 and 200 + 200 + 100"
    assert "taken to be equally fast" in predicted.assumes
    assert "measures" in predicted.assumes
    deterministic = predict(deterministic=True)
    assert deterministic.layers == predicted.layers
    assert "measures" not in deterministic.assumes, "a deterministic run does not measure"


def test_there_is_no_placement_without_expert_parallel() -> None:
    config = Config.of()
    assert predict_placement(config, plan(config, machine(), FACTS), FACTS) is None


def test_experts_that_fit_on_no_host_are_refused() -> None:
    config = Config.of(parallel_strategy="expert_parallel", workers=2)
    sizes = {"parameters": 2 * 10**9, "trainable": 2 * 10**9, "expert_parameters": 2 * 10**9}
    large = model(experts=2, moe_layers=1, expert_weights=((10**9, 10**9),), **sizes)
    with pytest.raises(ResourceError, match=r"2 experts need 29\.8 GiB"):
        predict_placement(config, plan(config, machine(), large), large)


def test_each_layer_leaves_less_memory_for_the_next() -> None:
    layer = [ExpertCost(1, 4), ExpertCost(1, 2), ExpertCost(2, 1)]
    hosts = [HostFacts(1.0, 7), HostFacts(1.0, 8)]
    used_bytes: list[list[float]] = []

    def place_layer(_: int, experts: Any, hosts: Any, used: list[float]) -> Any:
        used_bytes.append(used)
        return place(experts, hosts, used)

    placements = place_in_turn([layer, layer], hosts, place_layer)
    first = placements[0]
    taken = [sum(layer[expert].bytes for expert in first.held(host)) for host in range(2)]
    assert used_bytes == [[0.0, 0.0], taken]
    assert sum(taken) == 7


# --- the decision, its costs and its record


def test_an_expert_costs_its_share_of_the_rows_and_the_state_of_its_weights() -> None:
    """Three forward passes of two FLOP per weight and row; 16 bytes of state per weight."""
    weights = ((100, 300), (100, 300), (100, 300))
    facts = model(experts=2, moe_layers=3, expert_parameters=1200, expert_weights=weights)
    costs = placement_module._expert_costs(facts, [[0.25, 0.75], [0, 0]])
    assert costs[0] == [ExpertCost(150.0, 1600), ExpertCost(1350.0, 4800)]
    evenly = [ExpertCost(300.0, 1600), ExpertCost(900.0, 4800)]
    assert costs[1:] == [evenly, evenly], "no token was seen, or nothing is known of the layer"
    other_experts = placement_module._expert_costs(facts, [[1, 2, 3]] * 3)
    assert other_experts == [evenly] * 3


def test_the_state_of_an_expert_is_that_of_its_optimizer() -> None:
    """SGD has one moment, an average of the weights is one more tensor, a frozen expert is its weights."""
    facts = model(experts=2, moe_layers=1, expert_parameters=400, expert_weights=((100, 300),))
    of_forms = {
        16.0: facts,
        12.0: replace(facts, moments=1.0),
        20.0: replace(facts, averages=1.0),
        10.0: replace(facts, frozen_experts=200),
        2.0: replace(facts, frozen_experts=400, weight_bytes=2.0),
    }
    for state_bytes, form in of_forms.items():
        (costs,) = placement_module._expert_costs(form, [])
        assert [cost.bytes for cost in costs] == [100 * state_bytes, 300 * state_bytes]


@pytest.mark.parametrize(
    ("settings", "state_bytes"),
    [({"optimizer": "sgd", "momentum": 0.0}, 8), ({"optimizer": "sgd"}, 12), ({"ema_decay": 0.9}, 20)],
    ids=str,
)
def test_placements_count_the_state_of_the_optimizer_in_the_settings(
    settings: dict[str, Any], state_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The facts of a traced model know nothing of them."""
    placed: list[list[float]] = []

    def note_bytes(experts: list[ExpertCost], *rest: Any) -> Placement:
        placed.append([expert.bytes for expert in experts])
        return place(experts, *rest)

    monkeypatch.setattr(placement_module, "place", note_bytes)
    config = Config.of(parallel_strategy="expert_parallel", workers=2, deterministic=True, **settings)
    facts = model(experts=2, moe_layers=1, expert_parameters=400, expert_weights=((100, 300),))
    chosen = plan(config, machine(), facts)
    predict_placement(config, chosen, facts)
    decide_placement(config, chosen, facts, World.single_process(), {}, ())
    assert placed == [[100 * state_bytes, 300 * state_bytes]] * 2


def test_each_group_of_hosts_has_memory_for_every_expert() -> None:
    """Two groups of two hosts: the plan counts half of the experts on each host."""
    config = Config.of(parallel_strategy="expert_parallel", workers=4, expert_replicas=2)
    facts = model(experts=4, moe_layers=1, expert_parameters=400_000, expert_weights=((100_000,) * 4,))
    chosen = plan(config, machine(), facts)
    exactly_full = replace(chosen, memory=replace(chosen.memory, limit=chosen.memory.total))
    predicted = predict_placement(config, exactly_full, facts)
    assert predicted is not None
    (layer,) = predicted.layers
    assert sorted(layer.host_of) == [0, 0, 1, 1]
    assert "the first of 2 groups" in predicted.assumes


def test_a_gpu_of_another_size_than_the_smallest_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's limit is that of the smallest device."""
    config = Config.of(parallel_strategy="expert_parallel", workers=2, gpu_memory_fraction=0.5)
    chosen = plan(config, machine(), FACTS)
    total = 4 * chosen.memory.total
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    on_gpu = World.single_process("cuda")
    left = placement_module._expert_memory(config, chosen, FACTS, on_gpu)
    assert left == expert_memory(0.5 * total, chosen, FACTS)
    on_cpu = placement_module._expert_memory(config, chosen, FACTS, World.single_process())
    assert on_cpu == expert_memory(chosen.memory.limit, chosen, FACTS) != left


def place_again(
    known: dict[str, Any],
    num_hosts: int = 2,
    memory: float = 1e9,
    workers: int | None = None,
    **settings: str,
) -> list[Placement]:
    """The placement of a resumed run, by ``known`` fields of its plan; on fewer hosts than ``workers`` after
    a loss."""
    config = Config.of(parallel_strategy="expert_parallel", workers=workers or num_hosts, **settings)
    hosts = [HostFacts(1.0, memory)] * num_hosts
    return placement_module._place_layers(config, plan(config, machine(), FACTS), FACTS, hosts, known, ())


BEFORE = [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]]
KNOWN = {"placement": BEFORE, "placement_asked": "auto", "placement_hosts": 2}


def test_a_resumed_run_keeps_its_placement() -> None:
    layers = place_again(KNOWN)
    assert [list(layer.host_of) for layer in layers] == BEFORE
    assert {layer.method for layer in layers} == {"as before"}


@pytest.mark.parametrize(
    "change",
    [
        {"placement": None},
        {"placement_asked": "round_robin"},
        {"placement_hosts": 3},
        {"placement": [[0, 0, 1, 1, 2], BEFORE[1]]},
        {"placement": [[0, 0, 1, 1], BEFORE[1]]},
        {"placement": BEFORE[:1]},
        {"placement": "auto"},
    ],
)
def test_a_placement_for_other_hosts_or_experts_is_made_anew(change: dict[str, Any]) -> None:
    assert place_again(KNOWN | change) == place_again({})


def test_a_placement_that_fits_no_more_is_made_anew() -> None:
    """Of 2,000 weights with 16 bytes each, the old placement has 1,000 on a host, but not evenly."""
    uneven = KNOWN | {"placement": [[0] * 5, [0] * 5]}
    assert [set(layer.host_of) for layer in place_again(uneven)] == [{0}, {0}]
    tight = place_again(uneven, memory=16 * 1100)
    assert "as before" not in {layer.method for layer in tight}


def test_a_decision_is_recorded_with_its_least_even_layer() -> None:
    hosts = (HostFacts(1.0, 1e9, "node0"), HostFacts(1.0, 1e9, "node1"))
    costs = [ExpertCost(weight, weight) for weight in SIZES]
    even = placement_of((0, 1, 0, 1, 1), costs, hosts)
    uneven = placement_of((0, 0, 0, 0, 1), costs, hosts)
    devices = (MeasuredDevice("a", 100.0), MeasuredDevice("b", 50.0))
    facts = model(experts=5, moe_layers=2, expert_weights=(SIZES, SIZES))
    decision = PlacementDecision((even, uneven), devices, hosts, 1)
    assert decision.host_of == [(0, 1, 0, 1, 1), (0, 0, 0, 0, 1)]
    assert decision.saved_fields("auto") == {
        "device_speeds": {"a": 100.0, "b": 50.0},
        "placement": [[0, 1, 0, 1, 1], [0, 0, 0, 0, 1]],
        "placement_asked": "auto",
        "placement_hosts": 2,
    }
    event = decision.event(facts)
    assert event.sentence == uneven.sentence() + ", the least even of 2 layers"
    assert event.hosts[1] == PlacedHost(rank=1, node="node1", name="b", speed=50.0)
    assert event.layers[0].costs == (0.1, 0.1, 0.4, 0.2, 0.2)
    assert [layer.imbalance for layer in event.layers] == [even.imbalance, uneven.imbalance]
    one = PlacementDecision((even,), devices, hosts, 1)
    assert one.event(model(expert_weights=(SIZES,))).sentence == even.sentence()


def test_a_deterministic_run_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> MeasuredDevice:
        return MeasuredDevice("measured", 7.0)

    monkeypatch.setattr(placement_module, "own_device", measure)
    names: dict[bool, tuple[str, float]] = {}
    for deterministic in (False, True):
        config = Config.of(parallel_strategy="expert_parallel", workers=1, deterministic=deterministic)
        chosen = plan(config, machine(), FACTS)
        decision = decide_placement(config, chosen, FACTS, World.single_process(), {}, ())
        (device,) = decision.devices
        names[deterministic] = (device.name, device.speed)
        assert decision.host_of == [(0,) * 5, (0,) * 5]
    assert names == {False: ("measured", 7.0), True: ("cpu", 1.0)}


def test_a_file_no_longer_counts_once_experts_may_have_moved(tmp_path: Path) -> None:
    """It has the experts of the start, and a recovery must not bring back the hosts that they had then."""
    file = tmp_path / "placement.json"
    file.write_text(json.dumps({"layers": [[0, 0, 0, 1, 1]] * 2}))
    known = KNOWN | {"placement_asked": str(file)}
    assert [layer.host_of for layer in place_again(known, placement=str(file))] == [(0, 0, 0, 1, 1)] * 2
    moved = place_again(known | {"placement_outdated": True}, placement=str(file))
    assert [list(layer.host_of) for layer in moved] == BEFORE


def test_a_file_for_more_hosts_than_are_left_gives_way(tmp_path: Path) -> None:
    """A run that lost a host for good continues on the others, wherever the file puts the experts."""
    file = tmp_path / "placement.json"
    file.write_text(json.dumps({"host_of": [0, 1, 2, 2, 1]}))
    known = KNOWN | {"placement_asked": str(file), "placement_hosts": 3}
    left = place_again(known, num_hosts=2, workers=3, placement=str(file))
    assert [layer.host_of for layer in left] == [layer.host_of for layer in place_again({})]
    complete = place_again(known, num_hosts=3, placement=str(file))
    assert {layer.method for layer in complete} == {"file"}
    with pytest.raises(UserError, match="puts expert 2 on host 2; hosts are whole numbers from 0 to 1"):
        place_again(known, num_hosts=2, placement=str(file))
