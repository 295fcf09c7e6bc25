"""Tests of predicted placements, made before anything is measured or started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experts.placement import ExpertCost, HostFacts, place
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError
from orchestrator.plan.planning import plan
from orchestrator.train.strategies.placement import PredictedPlacement, place_in_turn, predict_placement
from tests.support.inventories import machine, model

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
