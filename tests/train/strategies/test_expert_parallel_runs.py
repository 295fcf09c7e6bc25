"""Whole runs on expert hosts, real processes over gloo: the same as in one process, saved on some hosts and resumed on others,
whatever lives where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.record.events import by_step, of_kind
from orchestrator.train.checkpoint.files import load
from tests.train.worker.test_run import losses, trained

HOSTED: dict[str, Any] = {
    "parallel_strategy": "expert_parallel",
    "experts": 5,
    "expert_hidden_size": (4, 8, 4, 12, 8),
    "schedule": "constant",
}
PLAIN: dict[str, Any] = {name: value for name, value in HOSTED.items() if name != "parallel_strategy"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The run that the others are held against: one process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, trained(folder, 1, max_steps=24, checkpoint_every=8, **PLAIN)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two hosts": (2, {}),
    "three hosts, accumulated": (3, {"batch_size": 6}),
    "the gate on the first host": (3, {"gate": "primary"}),
    "round robin, in parts": (2, {"placement": "round_robin", "exchange_chunks": 2}),
    "recomputed": (2, {"activation_checkpointing": "on"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_whole_run_is_the_same_on_hosts(tmp_path: Path, whole: tuple[Path, list[Any]], name: str) -> None:
    hosts, settings = CASES[name]
    events = trained(tmp_path / "run", hosts, max_steps=24, **HOSTED | settings)
    assert losses(events) == pytest.approx(losses(whole[1]), rel=1e-5)
    ours, theirs = of_kind(events, "evaluate")[-1], of_kind(whole[1], "evaluate")[-1]
    assert (ours["samples"], theirs["samples"]) == (359, 359)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    (start,), (placement,) = of_kind(events, "start"), of_kind(events, "placement")
    assert (start["strategy"], start["workers"], start["global_batch_size"]) == ("expert_parallel", hosts, 50)
    assert [event["samples"] for event in by_step(events)] == [50] * 24
    assert len(placement["hosts"]) == hosts
    assert all(len(layer["host_of"]) == 5 for layer in placement["layers"])
    exchange = of_kind(events, "exchange")
    assert sum(event["steps"] for event in exchange) == 24
    assert all(event["bytes"] > event["rows"] > 0 for event in exchange)


def test_saved_on_four_hosts_resumed_on_three_on_another_placement_and_in_other_ways(
    tmp_path: Path, whole: tuple[Path, list[Any]]
) -> None:
    """Four hosts, three, two with a placement of their own, data parallel, one process: the losses go on as if nothing had
    happened, and what is saved on hosts has the names of what is saved in one process."""
    run, expected = tmp_path / "run", losses(whole[1])
    trained(run, 4, max_steps=8, **HOSTED)
    ours, theirs = (
        load(run / "checkpoints" / "step_00000008"),
        load(whole[0] / "checkpoints" / "step_00000008"),
    )
    for file in ("model", "optimizer"):
        assert ours.tensors[file].keys() == theirs.tensors[file].keys()
        for name, tensor in theirs.tensors[file].items():
            torch.testing.assert_close(ours.tensors[file][name], tensor, rtol=1e-3, atol=1e-5)
    trained(run, 3, max_steps=12, resume="auto", **HOSTED)
    file = tmp_path / "placement.json"
    file.write_text(json.dumps({"layers": [[1, 1, 0, 1, 1], [0, 0, 0, 0, 0]]}))
    elsewhere: dict[str, Any] = {"placement": str(file)}
    trained(run, 2, max_steps=16, resume="auto", **HOSTED | elsewhere)
    trained(run, 2, max_steps=20, resume="auto", **PLAIN)
    events = trained(run, 1, max_steps=24, resume="auto", **PLAIN)
    assert losses(events) == pytest.approx(expected, rel=1e-5)
    assert [event["step"] for event in of_kind(events, "resume")] == [8, 12, 16, 20]
    assert of_kind(events, "placement")[-1]["layers"][0]["host_of"] == [1, 1, 0, 1, 1]


def test_a_run_keeps_its_placement_and_its_bits(tmp_path: Path) -> None:
    """On the same number of hosts, deterministic: a run that was broken off goes on to the bit, where its experts lived."""
    settings: dict[str, Any] = HOSTED | {"deterministic": True}
    calm = trained(tmp_path / "calm", 2, max_steps=12, **settings)
    trained(tmp_path / "run", 2, max_steps=5, **settings)
    events = trained(tmp_path / "run", 2, max_steps=12, resume="auto", **settings)
    first, second = of_kind(events, "placement")
    assert [layer["host_of"] for layer in first["layers"]] == [layer["host_of"] for layer in second["layers"]]
    assert second["method"] == "as before"
    assert losses(events) == losses(calm)
    assert [event["grad_norm"] for event in by_step(events)] == [
        event["grad_norm"] for event in by_step(calm)
    ]


def test_more_hosts_share_the_experts_anew(tmp_path: Path) -> None:
    trained(tmp_path / "run", 2, max_steps=4, **HOSTED)
    events = trained(tmp_path / "run", 4, max_steps=8, resume="auto", **HOSTED)
    last = of_kind(events, "placement")[-1]
    assert last["method"] != "as before"
    assert {host for layer in last["layers"] for host in layer["host_of"]} == {0, 1, 2, 3}
