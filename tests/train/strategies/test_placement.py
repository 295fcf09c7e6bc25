"""Where experts would live, told before anything is measured or started; and a file of theirs that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experts.placement import ExpertCost, HostFacts, place
from orchestrator import Trainer
from orchestrator.config.settings import Config
from orchestrator.errors import ResourceError, UserError
from orchestrator.plan.planning import plan
from orchestrator.runtime.cluster import session
from orchestrator.train.strategies.placement import PredictedPlacement, _in_turn, predict_placement
from orchestrator.train.strategies.placement_file import check_placement_file
from tests.support.inventories import machine, model

SIZES = (100, 100, 400, 200, 200)
FACTS = model(experts=5, moe_layers=2, expert_weights=(SIZES, SIZES[::-1]))


def told(workers: int = 2, **given: Any) -> PredictedPlacement:
    config = Config.of(parallel_strategy="expert_parallel", workers=workers, **given)
    found = predict_placement(config, plan(config, machine(), FACTS), FACTS)
    assert found is not None
    return found


def test_round_robin_and_a_file_are_known_before_a_run(tmp_path: Path) -> None:
    turns = told(placement="round_robin")
    assert turns.to_json() == {"assumes": "in turn", "host_of": [[0, 1, 0, 1, 0]] * 2}
    file = tmp_path / "mine.json"
    file.write_text('{"layers": [[1, 1, 0, 0, 0], [0, 0, 0, 0, 1]]}')
    mine = told(placement=str(file))
    assert [layer.host_of for layer in mine.layers] == [(1, 1, 0, 0, 0), (0, 0, 0, 0, 1)]
    assert mine.assumes == f"as {file} says"


def test_placing_by_cost_says_what_it_assumes() -> None:
    found = told()
    assert [layer.imbalance for layer in found.layers] == [1.0, 1.0], "400 + 100 and 200 + 200 + 100"
    assert "taken to be equally fast" in found.assumes
    assert "measures" in found.assumes
    certain = told(deterministic=True)
    assert certain.layers == found.layers
    assert "measures" not in certain.assumes, "a deterministic run does not"


def test_without_expert_parallel_nobody_hosts() -> None:
    config = Config.of()
    assert predict_placement(config, plan(config, machine(), FACTS), FACTS) is None


def test_experts_that_fit_nowhere_are_told() -> None:
    config = Config.of(parallel_strategy="expert_parallel", workers=2)
    held = {"parameters": 2 * 10**9, "trainable": 2 * 10**9, "expert_parameters": 2 * 10**9}
    large = model(experts=2, moe_layers=1, expert_weights=((10**9, 10**9),), **held)
    with pytest.raises(ResourceError, match=r"2 experts need 29\.8 GiB"):
        predict_placement(config, plan(config, machine(), large), large)


def test_what_a_layer_takes_is_missing_for_the_next() -> None:
    layer, hosts = (
        [ExpertCost(1, 4), ExpertCost(1, 2), ExpertCost(2, 1)],
        [HostFacts(1.0, 7), HostFacts(1.0, 8)],
    )
    seen: list[list[float]] = []

    def make(_: int, experts: Any, hosts: Any, used: list[float]) -> Any:
        seen.append(used)
        return place(experts, hosts, used)

    made = _in_turn([layer, layer], hosts, make)
    held = [sum(layer[expert].bytes for expert in made[0].held(host)) for host in range(2)]
    assert seen == [[0.0, 0.0], held]
    assert sum(held) == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "mine.json cannot be read .*No such file.*; give auto, round_robin or a JSON file"),
        ("{", "mine.json: the placement file is not JSON"),
        ('{"hosts": []}', r"mine.json: the placement file has the keys \['hosts'\]"),
        (
            '{"host_of": [0, 2]}',
            "mine.json: layer 0 .* puts expert 1 on host 2; hosts are whole numbers from 0 to 1",
        ),
    ],
)
def test_a_wrong_file_is_refused_before_a_cluster_is_started(
    text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> None:
        pytest.fail("a cluster was started first")

    monkeypatch.setattr(session, "session", started)
    file = tmp_path / "mine.json"
    if text is not None:
        file.write_text(text)
    config = Config.of(parallel_strategy="expert_parallel", workers=2, placement=str(file))
    with pytest.raises(UserError, match=words):
        Trainer(config=config, quiet=True).fit()


def test_hosts_are_not_held_against_a_number_of_workers_that_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"host_of": [0, 7]}')
    check_placement_file(Config.of(parallel_strategy="expert_parallel", placement=str(file)))
